"""Builds int16_products.c and times the matrix products of one SmolLM2-135M token with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from wasmtime import Engine, Instance, Module, Store

from pie_server.build.cpu_module import compile_c

FLAGS = (
    "-target", "wasm32-freestanding", "-O3", "-msimd128", "-nostdlib", "-Wl,--no-entry", "-Wl,--export-memory",
    "-Wl,--initial-memory=268435456",
)  # fmt: skip
LAYERS, SHAPES = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (rows, columns) of one layer: qkv, o, gate and up, down
HEAD = (49_152, 576)
X, X_SCALES, OUT, WEIGHTS = 1 << 20, 2 << 20, 4 << 20, 32 << 20  # byte addresses


class Int16Products:
    """111 MB of weights in the yardstick's layout. `token` and `layers` return the best seconds of a few runs by `clock`
    (the wall's, or `time.thread_time` where other work shares the machine)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        source = Path(__file__).with_suffix(".c")
        with TemporaryDirectory() as folder:
            target = Path(folder) / "yardstick.wasm"
            compile_c({source.name: source.read_text()}, target, FLAGS)
            code = target.read_bytes()
        engine = Engine()
        self.store = Store(engine)
        exports = Instance(self.store, Module(engine, code), []).exports(self.store)
        self.q4_1, self.q8_0 = exports["q4_1"], exports["q8_0"]
        self.matrices: list[tuple[int, int, int, int]] = []
        end = WEIGHTS
        for m, k in SHAPES * LAYERS:
            self.matrices.append((m, k, end, end + m * k // 2))
            end += m * k // 2 + m * k // 32 * 8
        self.head = (*HEAD, end, end + HEAD[0] * HEAD[1])
        end += HEAD[0] * HEAD[1] + HEAD[0] * HEAD[1] // 32 * 4
        # Every word is 0.013 as f32: no product becomes denormal, which would cost time that real weights do not.
        exports["memory"].write(self.store, b"\x12\x34\x56\x3c" * ((end - WEIGHTS) // 4), WEIGHTS)
        exports["memory"].write(self.store, b"\x12\x34\x56\x3c" * (1 << 19), X)

    def layers(self, rows: int, runs: int = 3) -> float:
        """Seconds of the 120 products of the layers over `rows` rows (1, or a multiple of 4)."""

        def run() -> None:
            for m, k, w, s in self.matrices:
                self.q4_1(self.store, w, s, X, X_SCALES, OUT, m, k, rows)

        return self._best(run, runs)

    def token(self, runs: int = 5) -> float:
        """Seconds of all products of one token, the output head included."""
        m, k, w, s = self.head
        return self.layers(1, runs) + self._best(lambda: self.q8_0(self.store, w, s, X, X_SCALES, OUT, m, k), runs)

    def _best(self, run: Callable[[], object], runs: int) -> float:
        times = []
        for _ in range(runs):
            start = self.clock()
            run()
            times.append(self.clock() - start)
        return min(times)
