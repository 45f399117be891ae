"""The cpu module's build: cached by content, atomic, and one sentence when it cannot be done."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import wasmtime

from pie_server.build import cpu_module as build
from pie_server.build.cpu_module import FLAGS, BuildError, cache_root, compile_c, cpu_module, module_sources, source_key
from pie_server.errors import UserError

EMPTY = {"a.c": '__attribute__((export_name("f"))) int f(void) { return 7; }'}


def test_builds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_module(tmp_path)
    assert first.parent == tmp_path / "build" and first.read_bytes()[:4] == b"\0asm"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert cpu_module(tmp_path) == first
    assert [p.name for p in first.parent.iterdir() if p.name.startswith("cpu-build")] == [], "work folders are removed"


DAMAGES = (lambda data: b"", lambda data: b"junk", lambda data: data[:-1], lambda data: data[:100] + b"?" + data[101:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_module_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    monkeypatch.setattr(build, "module_sources", lambda: EMPTY)
    path = cpu_module(tmp_path)
    data = path.read_bytes()
    wasmtime.Module.validate(wasmtime.Engine(), data)  # the seal is a section that engines take
    path.write_bytes(damage(data))
    assert cpu_module(tmp_path).read_bytes() == data


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("PIE_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "pie"


def test_the_key_covers_sources_compiler_and_flags() -> None:
    files = module_sources()
    assert {"linear.c", "attention.c", "vm.c", "vm_ops.h", "simd_math.h"} <= set(files)
    key = source_key(files, "1", FLAGS)
    others = [
        source_key({**files, "linear.c": files["linear.c"] + " "}, "1", FLAGS),
        source_key({**files, "vm_ops.h": ""}, "1", FLAGS),
        source_key({n: t for n, t in files.items() if n != "repack.c"}, "1", FLAGS),
        source_key(files, "2", FLAGS),
        source_key(files, "1", (*FLAGS, "-g")),
    ]
    assert len({key, *others}) == 6
    assert source_key(dict(reversed(files.items())), "1", FLAGS) == key


def test_a_missing_zig_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ziglang" else find(name, *a))
    with pytest.raises(BuildError, match="pip install ziglang") as caught:
        cpu_module(tmp_path)
    assert "\n" not in str(caught.value) and isinstance(caught.value, UserError)


def test_a_compile_error_is_one_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"a\.c:1:.* error:") as caught:
        compile_c({"a.c": "int f(void) { return x; }"}, tmp_path / "out.wasm")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.wasm").exists()


def test_a_slow_build_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 0.0)
    with pytest.raises(BuildError, match="took over 0 s"):
        compile_c(EMPTY, tmp_path / "out.wasm")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot write the cpu module under .* set PIE_CACHE"):
        cpu_module(tmp_path / "file")
