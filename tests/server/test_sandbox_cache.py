"""The compiled-code cache and the component build: nothing foreign or damaged is loaded, failures are one sentence."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
from wasmtime import Engine, wat2wasm

from pie_server.build import python_component as build
from pie_server.build.cpu_module import BuildError
from pie_server.compiled import CompiledCacheError, load_component


@pytest.fixture
def wasm(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.wasm"
    path.write_bytes(wat2wasm('(component (core module (func (export "f"))))'))
    return path


class Progress(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def compiles(self) -> int:
        return sum("compiling" in line for line in self)


def test_compiles_once(wasm: Path, tmp_path: Path) -> None:
    said = Progress()
    for _ in range(3):
        load_component(Engine(), "plain", wasm, tmp_path / "compiled", said)
    assert said.compiles == 1
    assert sorted(p.suffix for p in (tmp_path / "compiled").iterdir()) == [".cwasm", ".lock", ".sha256"]
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700


def test_key_covers_settings_and_source(wasm: Path, tmp_path: Path) -> None:
    said = Progress()
    load_component(Engine(), "plain", wasm, tmp_path / "c", said)
    load_component(Engine(), "other settings", wasm, tmp_path / "c", said)
    wasm.write_bytes(wat2wasm('(component (core module (func (export "g"))))'))
    load_component(Engine(), "plain", wasm, tmp_path / "c", said)
    assert said.compiles == 3


@pytest.mark.parametrize("suffix", [".cwasm", ".sha256"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_damaged_code_is_compiled_again_and_never_loaded(wasm: Path, tmp_path: Path, suffix: str, damage: str) -> None:
    folder, said = tmp_path / "c", Progress()
    load_component(Engine(), "plain", wasm, folder, said)
    [victim] = folder.glob(f"*{suffix}")
    data = bytearray(victim.read_bytes())
    if damage == "remove":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 0xFF
        victim.write_bytes({"truncate": bytes(data[: len(data) // 2]), "flip": bytes(data), "empty": b""}[damage])
    load_component(Engine(), "plain", wasm, folder, said)
    load_component(Engine(), "plain", wasm, folder, said)
    assert said.compiles == 2


def test_a_folder_that_others_may_write_is_closed_first(wasm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    load_component(Engine(), "plain", wasm, folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused(wasm: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "real")
    with pytest.raises(CompiledCacheError, match="not a folder of the current user"):
        load_component(Engine(), "plain", wasm, tmp_path / "c")


def test_a_file_in_the_way_is_one_sentence(wasm: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(CompiledCacheError, match="PIE_CACHE"):
        load_component(Engine(), "plain", wasm, tmp_path / "c")


def test_component_is_cached_by_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {build._key("1.0"), build._key("1.0"), build._key("1.1")}
    assert len(keys) == 2
    extra = tmp_path / "extra.py"
    extra.write_text("x = 1\n")
    real = build._sources
    monkeypatch.setattr(build, "_sources", lambda: [*real(), ("inferlet/extra.py", extra)])
    keys.add(build._key("1.0"))
    extra.write_text("x = 2\n")
    keys.add(build._key("1.0"))
    assert len(keys) == 4


def test_sources_of_the_component() -> None:
    names = {name for name, _ in build._sources()}
    assert {"app.py", "inferlet/__init__.py", "pie_core/eta/__init__.py", "pie_core/text/stream.py"} <= names
    assert not [
        n for n in names if n.startswith("pie_core/") and not n.startswith(("pie_core/eta/", "pie_core/text/", "pie_core/__init__"))
    ]


def test_missing_tool_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(BuildError, match=r"^componentize-py is not installed.*\[server\]"):
        build.python_component(tmp_path)


def test_a_missing_source_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_sources", lambda: [("gone.py", tmp_path / "gone.py")])
    with pytest.raises(BuildError, match=r"gone\.py of the Python component cannot be read"):
        build.python_component(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file in the way")
    with pytest.raises(BuildError, match="PIE_CACHE"):
        build.python_component(tmp_path)


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    said = "Traceback (most recent call last):\n  File 'app.py'\nAttributeError: no such thing\n\nStack backtrace:\n 0: x"
    tool.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 3\n")
    tool.chmod(0o755)
    with pytest.raises(BuildError, match="exit status 3: AttributeError: no such thing"):
        build._componentize(tool, tmp_path, tmp_path / "out.wasm")
    with pytest.raises(BuildError, match="cannot be started"):
        build._componentize(tmp_path / "absent", tmp_path, tmp_path / "out.wasm")


def test_the_environment_does_not_leak_into_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\nenv > {tmp_path}/env\ntouch {tmp_path}/out.wasm\n")
    tool.chmod(0o755)
    build._componentize(tool, tmp_path, tmp_path / "out.wasm")
    assert "PYTHONPATH" not in (tmp_path / "env").read_text()
    assert os.environ["PYTHONPATH"] == "/somewhere"


def test_only_recent_results_are_kept(wasm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for k in range(7):
        load_component(Engine(), f"settings {k}", wasm, folder)
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 10, path.stat().st_mtime - 10))
    said = Progress()
    load_component(Engine(), "settings 6", wasm, folder, said)
    assert said.compiles == 0, "the newest is there"
    assert [len(list(folder.glob(f"*{suffix}"))) for suffix in (".cwasm", ".sha256", ".lock")] == [4, 4, 4]
    load_component(Engine(), "settings 0", wasm, folder, said)
    assert said.compiles == 1, "the oldest was removed"


def test_code_that_is_there_needs_no_lock(wasm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cache that was filled before and cannot be written now."""
    folder = tmp_path / "c"
    load_component(Engine(), "plain", wasm, folder)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pie_server.compiled.build_lock", refuse)
    folder.chmod(0o500)
    load_component(Engine(), "plain", wasm, folder)
    with pytest.raises(CompiledCacheError, match=r"cannot be written under .*Permission denied; set PIE_CACHE to a writable folder"):
        load_component(Engine(), "other settings", wasm, folder)
    folder.chmod(0o700)


def test_a_damaged_component_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def componentize(tool: Path, stage: Path, out: Path) -> None:
        built.append(out)
        out.write_bytes(wat2wasm('(component (core module (func (export "f"))))'))

    monkeypatch.setattr(build, "_componentize", componentize)
    path = build.python_component(tmp_path)
    assert build.python_component(tmp_path) == path and len(built) == 1
    data = path.read_bytes()
    load_component(Engine(), "plain", path, tmp_path / "compiled")
    path.write_bytes(data[:50] + b"?" + data[51:])
    assert build.python_component(tmp_path).read_bytes() == data and len(built) == 2
