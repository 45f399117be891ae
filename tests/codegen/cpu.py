"""The cpu virtual machine for tests: kernels_wasm/vm.c alone, built by zig and run by wasmtime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import wasmtime

import kernels_wasm
from pie_core.codegen import emit_epilogue_cpu, emit_map_cpu
from pie_core.codegen.cpu_source import vm_ops_header
from pie_server.build.cpu_module import FLAGS, cache_root, compile_c, source_key, zig_version
from tests.codegen.batch import Answer, Batch, MapLaunch

GUARD_BYTES = 64
EXPORTS = ("-Wl,--export=vm_epilogue", "-Wl,--export=vm_map", "-Wl,--export=__heap_base")


def build() -> Path:
    """The test module, cached by the hash of its sources."""
    folder = Path(kernels_wasm.__file__).parent
    files = {
        name: (folder / name).read_text()
        for name in ("vm.c", "vm_lookup.c", "vm_select.c", "vm_sort.c", "vm_linear.c", "vm.h", "simd_math.h")
    } | {"vm_ops.h": vm_ops_header()}
    flags = (*FLAGS, *EXPORTS)
    target = cache_root() / "build" / f"vm-test-{source_key(files, zig_version(), flags)[:32]}.wasm"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_c(files, target, flags)
    return target


class CpuMachine:
    """Places arrays in linear memory and calls the virtual machine. One call at a time; memory is reused by the next."""

    def __init__(self) -> None:
        self.store = wasmtime.Store()
        module = wasmtime.Module.from_file(self.store.engine, str(build()))
        exports = wasmtime.Instance(self.store, module, []).exports(self.store)
        self.memory: Any = exports["memory"]
        self.epilogue: Any = exports["vm_epilogue"]
        self.map: Any = exports["vm_map"]
        base: Any = exports["__heap_base"]
        self.base = (base.value(self.store) + 63) & ~63

    def place(self, arrays: Sequence[Any]) -> list[int]:
        """Copy arrays into memory; their addresses."""
        at, places = self.base, []
        for array in arrays:
            places.append(at)
            at = (at + array.nbytes + 63) & ~63
        missing = at + 64 - self.memory.data_len(self.store)
        if missing > 0:
            self.memory.grow(self.store, missing // 65536 + 1)
        for array, place in zip(arrays, places, strict=True):
            self.memory.write(self.store, np.ascontiguousarray(array).tobytes(), place)
        return places

    def fetch(self, place: int, like: Any) -> Any:
        """The array at an address."""
        return np.frombuffer(bytes(self.memory.read(self.store, place, place + like.nbytes)), like.dtype).reshape(like.shape)

    def prepare(self, batch: Batch) -> tuple[list[int], list[Any]]:
        """Arguments of vm_epilogue and the arrays behind them."""
        program = emit_epilogue_cpu(batch.program)
        empty = np.zeros(1, np.float32)
        arrays = [
            np.array(program.words, np.uint32),
            batch.logits if batch.logits is not None else empty,
            batch.hidden if batch.hidden is not None else empty,
            batch.arena, batch.table, batch.results, np.full(program.scratch_bytes + GUARD_BYTES, 0xFF, np.uint8),
        ]  # fmt: skip
        return self.place(arrays), arrays

    def run(self, batch: Batch) -> list[Answer]:
        """Run one launch."""
        at, arrays = self.prepare(batch)
        self.epilogue(self.store, *at[:5], len(batch.lanes), at[5], at[6])
        assert (self.fetch(at[6], arrays[6])[-GUARD_BYTES:] == 0xFF).all(), "something was written behind the scratch"
        return batch.answers(self.fetch(at[3], arrays[3]), self.fetch(at[5], arrays[5]))

    def run_map(self, launch: MapLaunch) -> Any:
        """Run a map program over the rows of its step; returns what became of `out`."""
        emitted = emit_map_cpu(launch.program, launch.n, launch.inputs, launch.rows, launch.bucket)
        scratch, pointers = np.full(emitted.scratch_bytes + 16, 0xFF, np.uint8), np.zeros(len(launch.arrays), np.uint32)
        everything = [np.array(emitted.words, np.uint32), launch.step, launch.out, scratch, pointers, *launch.arrays]
        at = self.place(everything)
        everything[4] = np.array(at[5:], np.uint32)
        self.place(everything)
        self.map(self.store, at[0], at[1], at[4], at[2], at[3])
        return self.fetch(at[2], launch.out)


@lru_cache(maxsize=1)
def cpu_machine() -> CpuMachine:
    """The machine of this test process."""
    return CpuMachine()
