"""The import rule of docs/architecture.md, section 1: rooms in order, no server, no third-party package but jinja2."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "pie_core"
ROOMS = ("eta", "codegen", "device", "weights", "poem", "models", "text", "engine", "host")
LAZY = {"codegen": {"numpy"}}  # the oracle's NumPy, never at import time (the blocked import below holds that)
OUTSIDE = {"jinja2", "kernels_wgsl"}


def modules() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in the file, at any depth."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
                if node.level
                else node.module or ""
            )
            if base == "pie_core":  # `from pie_core import eta` names rooms
                for alias in node.names:
                    yield node.lineno, f"pie_core.{alias.name}"
            else:
                yield node.lineno, base


def violation(room: str, name: str) -> str | None:
    """Why a module of `room` may not import `name`, or None."""
    top, _, rest = name.partition(".")
    if top == "pie_core":
        target = rest.split(".")[0]
        if target in ROOMS and ROOMS.index(target) > ROOMS.index(room):
            return f"room {target} is to the right of {room}"
        return None
    if top in sys.stdlib_module_names or top in LAZY.get(room, set()):
        return None
    if room == "eta":
        return "eta imports only the standard library: it is bundled into the guest"
    return None if top in OUTSIDE else f"pie_core may import {', '.join(sorted(OUTSIDE))} and the standard library only"


def test_every_room_exists() -> None:
    assert {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()} == set(ROOMS)


def test_rooms_import_only_rooms_on_their_left() -> None:
    found = []
    for path in modules():
        room = path.relative_to(CORE).parts[0]
        if room not in ROOMS:
            continue
        for line, name in imports(path):
            why = violation(room, name)
            if why:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}: {why}")
    assert not found, "\n".join(found)


def test_eta_imports_no_other_room() -> None:
    found = [f"{path.name}: {name}" for path in (CORE / "eta").rglob("*.py") for _, name in imports(path) if violation("eta", name)]
    assert not found


@pytest.mark.parametrize(
    ("room", "name", "allowed"),
    [
        ("eta", "pie_core.codegen.wgsl", False),
        ("eta", "jinja2", False),
        ("eta", "numpy", False),
        ("codegen", "numpy", True),
        ("engine", "numpy", False),
        ("engine", "pie_core.device.protocol", True),
        ("engine", "pie_core.host", False),
        ("host", "pie_core.engine", True),
        ("host", "pie_server.app", False),
        ("text", "jinja2", True),
        ("device", "wgpu", False),
        ("device", "wasmtime", False),
        ("text", "tokenizers", False),
        ("weights", "kernels_wgsl.loader", True),
        ("models", "json", True),
    ],
)
def test_the_rule_itself(room: str, name: str, allowed: bool) -> None:
    assert (violation(room, name) is None) == allowed


BLOCKED = """
import importlib, pkgutil, sys

allowed = set(sys.stdlib_module_names) | {"jinja2", "markupsafe", "kernels_wgsl", "pie_core"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"import of {name} is blocked")

for name in [n for n in sys.modules if n.partition(".")[0] not in allowed and not n.startswith("__")]:
    del sys.modules[name]
sys.meta_path.insert(0, Block())
try:
    importlib.import_module("aiohttp")
except ImportError:
    pass
else:
    raise SystemExit("the block does not work")

import pie_core, kernels_wgsl
names = [m.name for p in (pie_core, kernels_wgsl) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".", onerror=lambda n: None)]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_every_module_imports_with_all_other_packages_blocked() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(ROOMS)
