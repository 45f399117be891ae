"""kernels_wasm/simd_math.h: ulp bounds and special values, compiled and run alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wasmtime import Engine, Instance, Module, Store

import kernels_wasm
from pie_server.build.cpu_module import compile_c

COUNT = 1 << 16
NAMES = ("exp", "log", "sin", "cos", "tanh")
SOURCE = (
    """#include "simd_math.h"
#define EXPORT(f) __attribute__((export_name(#f))) void run_##f(void) { \\
  for (int i = 0; i < COUNT; i += 4) wasm_v128_store(y + i, simd_##f(wasm_v128_load(x + i))); }
static float x[COUNT], y[COUNT];
__attribute__((export_name("x_at"))) float *x_at(void) { return x; }
__attribute__((export_name("y_at"))) float *y_at(void) { return y; }
""".replace("COUNT", str(COUNT))
    + "\n".join(f"EXPORT({name})" for name in NAMES)
)

Apply = Callable[[str, Any], np.ndarray]


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apply]:
    """name, values (at most COUNT) -> the function's f32 results."""
    header = Path(kernels_wasm.__file__).parent / "simd_math.h"
    target = tmp_path_factory.mktemp("math") / "math.wasm"
    compile_c({"math.c": SOURCE, "simd_math.h": header.read_text()}, target)
    engine = Engine()
    store = Store(engine)
    exports = Instance(store, Module(engine, target.read_bytes()), []).exports(store)
    base = ctypes.addressof(exports["memory"].data_ptr(store).contents)

    def array(export: str) -> np.ndarray:
        return np.frombuffer((ctypes.c_float * COUNT).from_address(base + exports[export](store)), np.float32)

    x, y = array("x_at"), array("y_at")

    def run(name: str, values: Any) -> np.ndarray:
        x[: len(values)] = values
        exports[name](store)
        return y[: len(values)].copy()

    yield run


RANGES = [
    ("exp", -87.3, 88.72), ("exp", -1, 1), ("log", 1e-30, 1e30), ("log", 0.5, 2), ("log", 0.99, 1.01), ("log", 1e-44, 1e-38),
    ("sin", -8, 8), ("sin", -1.6e6, 1.6e6), ("cos", -8, 8), ("cos", -1.6e6, 1.6e6),
    ("tanh", -12, 12), ("tanh", -0.7, 0.7), ("tanh", -1e-3, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
def test_within_two_ulp(apply: Apply, name: str, low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    wide = high / low > 1e10 if low > 0 else False
    x = (np.exp(rng.uniform(np.log(low), np.log(high), COUNT)) if wide else rng.uniform(low, high, COUNT)).astype(np.float32)
    want = getattr(np, name)(x.astype(np.float64))
    ulp = np.abs(apply(name, x) - want) / np.spacing(np.abs(want).astype(np.float32))
    assert ulp.max() <= 2, f"{ulp.max():.2f} ulp at {x[ulp.argmax()]!r}"


INF, NAN = np.inf, np.nan
SPECIAL = [
    ("exp", [0, -0.0, INF, -INF, NAN, 89, -88, -87.34, 88.73, 1e30, -1e30, 1e-40], [1, 1, INF, 0, NAN, INF, 0, 0, INF, INF, 0, 1]),
    ("log", [1, 0, -0.0, INF, -INF, NAN, -1, -1e-40], [0, -INF, -INF, INF, NAN, NAN, NAN, NAN]),
    ("sin", [0, INF, -INF, NAN], [0, NAN, NAN, NAN]),
    ("cos", [0, -0.0, INF, -INF, NAN], [1, 1, NAN, NAN, NAN]),
    ("tanh", [0, INF, -INF, NAN, 1e30, -30], [0, 1, -1, NAN, 1, -1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "x", "want"), SPECIAL)
def test_special_values(apply: Apply, name: str, x: list[float], want: list[float]) -> None:
    np.testing.assert_array_equal(apply(name, x), np.array(want, np.float32))


def test_signs_of_zero_and_denormal_arguments(apply: Apply) -> None:
    tiny = np.array([1e-40, -1e-40], np.float32)
    for name in ("sin", "tanh"):
        np.testing.assert_array_equal(apply(name, tiny), tiny)
    assert np.signbit(apply("tanh", [-0.0])).all()
    np.testing.assert_allclose(apply("log", tiny[:1]), np.log(tiny[:1].astype(np.float64)), rtol=1e-7)


def test_exp_never_gives_a_denormal(apply: Apply) -> None:
    y = apply("exp", np.linspace(-104, -86, COUNT, dtype=np.float32))
    assert ((y == 0) | (y >= np.finfo(np.float32).tiny)).all() and (np.diff(y) >= 0).all()


def test_huge_angles_stay_bounded(apply: Apply) -> None:
    x = np.geomspace(1e7, 3e38, COUNT).astype(np.float32)
    for name in ("sin", "cos"):
        assert (np.abs(apply(name, x)) <= 1).all()


def test_lanes_do_not_depend_on_each_other(apply: Apply) -> None:
    x = np.array([0.3, NAN, INF, -5, 1e-40, 700.0, -1, 2], np.float32)
    for name in NAMES:
        np.testing.assert_array_equal(apply(name, x[::-1]), apply(name, x)[::-1])
