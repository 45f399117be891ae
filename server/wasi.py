"""The part of WASI an inferlet gets: clocks, random bytes, an empty environment and no files. Everything else traps.

wasmtime's own WASI would let a guest sleep inside the host, past its CPU budget, so it is never linked.
"""

from __future__ import annotations

import os
import time
from typing import Any

from wasmtime import Engine, WasmtimeError
from wasmtime.component import Component, Linker, Record

_MAX_RANDOM = 65536  # bytes of one request


def add_partial_wasi(linker: Linker, engine: Engine, component: Component) -> None:
    """Define the allowed interfaces that `component` imports, in the version it asks for; every other import traps when called.

    The functions neither block nor raise (an exception of Python in a host function could surface in an unrelated guest).
    """
    for imported in component.type.imports(engine):
        interface = imported.removeprefix("wasi:").partition("@")[0]
        if imported.startswith("wasi:") and interface in _INTERFACES:
            with linker.root() as root, root.add_instance(imported) as instance:
                for name, function in _INTERFACES[interface].items():
                    instance.add_func(name, function)
    linker.define_unknown_imports_as_traps(component)


def _datetime(seconds: int, nanoseconds: int) -> Record:
    record = Record()  # wasmtime-py reads a WIT record from an object's attributes
    record.__dict__.update(seconds=seconds, nanoseconds=nanoseconds)
    return record


def _wall_clock(_store: Any) -> Record:
    return _datetime(*divmod(time.time_ns(), 1_000_000_000))


def _random_bytes(_store: Any, count: int) -> bytes:
    if count > _MAX_RANDOM:
        raise WasmtimeError(f"{count} random bytes asked at once, at most {_MAX_RANDOM} are given")  # a trap of this guest only
    return os.urandom(count)


_INTERFACES: dict[str, dict[str, Any]] = {
    "clocks/monotonic-clock": {"now": lambda _store: time.monotonic_ns(), "resolution": lambda _store: 1},
    "clocks/wall-clock": {"now": _wall_clock, "resolution": lambda _store: _datetime(0, 1)},
    "random/random": {"get-random-bytes": _random_bytes, "get-random-u64": lambda _store: int.from_bytes(os.urandom(8), "little")},
    "random/insecure-seed": {
        "insecure-seed": lambda _store: (int.from_bytes(os.urandom(8), "little"), int.from_bytes(os.urandom(8), "little"))
    },
    "filesystem/preopens": {"get-directories": lambda _store: []},
    "cli/environment": {"get-environment": lambda _store: [], "get-arguments": lambda _store: [], "initial-cwd": lambda _store: None},
}
