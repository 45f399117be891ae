"""The Makefile's refusals: each names what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import ROOT


def make(folder: Path, target: str, *settings: str, **commands: str) -> subprocess.CompletedProcess[str]:
    """`make target` on a copy of the Makefile, with shell scripts in place of some commands."""
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    fakes = folder / "fakes"
    fakes.mkdir()
    for name, script in commands.items():
        path = fakes / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{fakes}{os.pathsep}{os.environ['PATH']}"}
    env.pop("MAKEFLAGS", None)
    return subprocess.run(["make", target, *settings], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("python", "match"),
    [
        ("exit 1", "Python 3.11 or newer is needed and fakepython is not"),
        ('case "$2" in *version_info*) exit 0;; *) exit 1;; esac', "fakepython lacks the modules venv and ensurepip"),
        ('case "$1$2" in --version) echo Python;; -c*) exit 0;; *) exit 1;; esac', "fakepython could not create .venv"),
    ],
)
def test_a_python_that_does_not_do(tmp_path: Path, python: str, match: str) -> None:
    done = make(tmp_path, ".venv/bin/python", "PYTHON=fakepython", fakepython=python)
    assert done.returncode == 2
    assert match in done.stderr
    assert not (tmp_path / ".venv").exists()


ALL_MISSING = {"ls": "exit 2"}


@pytest.mark.parametrize(
    ("commands", "match"),
    [
        ({"id": "echo 1000", "apt_get": "exit 9"}, "sudo apt-get install mesa-vulkan-drivers libvulkan1 chromium"),
        ({"id": "echo 0", "apt_get": "exit 9"}, "apt-get could not install mesa-vulkan-drivers libvulkan1 chromium"),
        ({"id": "echo 0", "apt_get": "exit 0"}, "not where Debian puts them: mesa-vulkan-drivers libvulkan1 chromium"),
    ],
)
def test_system_packages_that_are_missing(tmp_path: Path, commands: dict[str, str], match: str) -> None:
    done = make(tmp_path, "system-packages", **ALL_MISSING, **commands)
    assert done.returncode == 2
    assert match in done.stderr


def test_pip_that_fails(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = make(tmp_path, ".venv/.stamp-serve")
    assert done.returncode == 2
    assert "pip could not install .[server,gpu]" in done.stderr
    assert not (tmp_path / ".venv" / ".stamp-serve").exists()
