"""Ops that read memory, on the GPUs against the oracle: every dtype, both sides of each size switch, several lanes in both orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from pie_core.eta import Traced
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Batch, Lane, check, same_bits
from tests.codegen.gpu import run_batches

Cells = tuple[tuple[str, tuple[int, ...]], ...]
NUMPY = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}


class Case(NamedTuple):
    """`fn` over channel values of `cells`; `fill(rng, cell index, dtype, shape)` makes special cells."""

    fn: Callable[..., Any]
    cells: Cells
    fill: Callable[[Any, int, str, tuple[int, ...]], Any] | None = None
    rtol: float = 2e-6
    atol: float = 1e-6


def numbers(rng: Any, dtype: str, shape: tuple[int, ...], few: bool = False) -> Any:
    """Values with ties, zeros of both signs, infinities and NaN (f32), and the whole range (integers)."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "f32":
        values = rng.integers(-3, 4, shape) if few else rng.normal(0, 3, shape)
        values = np.asarray(values, np.float32)
        flat = values.reshape(-1)
        if flat.size > 8:
            flat[rng.integers(0, flat.size, 5)] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
        return values
    info = np.iinfo(NUMPY[dtype])
    low, high = (max(-3, info.min), 4) if few else (info.min, info.max)
    return rng.integers(low, high, shape, dtype=np.int64).astype(NUMPY[dtype])


def indices(bound: int) -> Callable[[Any, int, str, tuple[int, ...]], Any]:
    """Fills i32 and u32 cells with indices, some out of range, and all others with numbers."""

    def fill(rng: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
        if at == 1:
            return rng.integers(-2 if dtype == "i32" else 0, bound + 2, shape, dtype=np.int64).astype(NUMPY[dtype])
        return numbers(rng, dtype, shape)

    return fill


def tame(rng: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Floats whose sums and products stay small."""
    if dtype != "f32":
        return numbers(rng, dtype, shape)
    return np.asarray(rng.normal(0, 1, shape), np.float32)


def near_one(rng: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Floats whose products stay near 1."""
    return np.asarray(1 + rng.normal(0, 1e-3, shape), np.float32) if dtype == "f32" else numbers(rng, dtype, shape)


def few(rng: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Many ties."""
    return numbers(rng, dtype, shape, few=True)


def probabilities(rng: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Rows of softmax, half of them with ties and zeros."""
    if shape == ():
        return np.float32(rng.uniform(0.05, 0.95))
    x = np.asarray(rng.normal(0, 2, shape), np.float32)
    x = np.round(x) if rng.integers(0, 2) else x
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), np.float32)


def masses(value: float, p: float) -> Callable[[Any, int, str, tuple[int, ...]], Any]:
    """One value everywhere: which of equal elements are kept, sums that would wrap, thresholds at the edges."""
    return lambda rng, at, dtype, shape: np.full(shape, p if shape == () else value, np.float32)


def ranked(k: int) -> Callable[[Any, int, str, tuple[int, ...]], Any]:
    return lambda rng, at, dtype, shape: np.uint32(k) if shape == () else few(rng, at, dtype, shape)


CASES: dict[str, Case] = {}
for n in (1, 2, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2500):
    CASES[f"sort_desc f32 {n}"] = Case(lambda x: F["sort_desc"](x), (("f32", (n,)),))
for dtype in ("f32", "i32", "u32"):
    for shape in ((1200,), (300,), (3, 1100), (7, 40)):
        CASES[f"sort_desc {dtype} {shape}"] = Case(lambda x: F["sort_desc"](x), ((dtype, shape),), few)
        for k in (1, 17, 40):
            CASES[f"top_k {dtype} {shape} {k}"] = Case(lambda x, k=k: F["top_k"](x, k), ((dtype, shape),), few if k == 17 else None)
    for shape in ((1,), (5,), (63,), (1025,), (3000,), (2, 3, 4, 5), (3, 2000), (300, 3)):
        CASES[f"cumsum {dtype} {shape}"] = Case(lambda x: F["cumsum"](x), ((dtype, shape),), tame, 1e-5, 1e-4)
        CASES[f"cumprod {dtype} {shape}"] = Case(lambda x: F["cumprod"](x), ((dtype, shape),), near_one, 1e-5, 1e-4)
    for name in ("scatter_set", "scatter_add"):
        index = "i32" if dtype != "u32" else "u32"
        for base, m in (((50,), 200), ((1000,), 3), ((5, 7), 40), ((3, 2, 300), 9)):
            cells = ((dtype, base), (index, (m,)), (dtype, (m, *base[1:])))
            CASES[f"{name} {dtype} {base} {m}"] = Case(F[name], cells, indices(base[0]), 1e-5, 1e-4)
    for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_argmax"):
        for shape in ((3, 1000), (1, 5), (300, 7), (2, 3, 4, 5), (40, 130)):
            CASES[f"{name} {dtype} {shape}"] = Case(F[name], ((dtype, shape),), tame if name == "reduce_sum" else few, 1e-5, 1e-4)
for k in (1023, 1024, 1025, 1500):
    CASES[f"top_k long {k}"] = Case(lambda x, k=k: F["top_k"](x, k), (("f32", (1500,)),))
CASES["scatter_set bool"] = Case(F["scatter_set"], (("bool", (50,)), ("u32", (30,)), ("bool", (30,))), indices(50))
for dtype in NUMPY:
    for table, idx in (
        ((9,), ()),
        ((9,), (1,)),
        ((9,), (40,)),
        ((5, 4), ()),
        ((5, 4), (300,)),
        ((5, 3, 2), (2, 3)),
        ((300,), (4, 5, 2, 2)),
    ):
        for index in ("i32", "u32"):
            CASES[f"gather {dtype} {table} {idx} {index}"] = Case(F["gather"], ((dtype, table), (index, idx)), indices(table[0]))
    CASES[f"gather_row {dtype}"] = Case(F["gather_row"], ((dtype, (300, 7)), ("i32", (300,))), indices(7))
    CASES[f"transpose {dtype}"] = Case(lambda x: F["transpose"](F["reshape"](x, (5, 60))), ((dtype, (300,)),))
    for source, shape in (((3,), (3, 4)), ((1, 4), (3, 4)), ((2, 1, 3), (2, 5, 3, 2)), ((), (2, 2)), ((1,), (7,)), ((3, 1), (3, 1, 4))):
        CASES[f"broadcast {dtype} {source} {shape}"] = Case(lambda x, shape=shape: F["broadcast"](x, shape), ((dtype, source),))
for n in (1, 31, 32, 33, 1000):
    CASES[f"mask_apply {n}"] = Case(F["mask_apply"], (("f32", (n,)), ("u32", (-(-n // 32),))))
CASES["mask_apply rows"] = Case(F["mask_apply"], (("f32", (5, 70)), ("u32", (3,))))
for m, k, n in ((1, 1, 1), (3, 4, 5), (20, 33, 17), (1, 3000, 2), (2, 700, 300)):
    CASES[f"matmul {m} {k} {n}"] = Case(F["matmul"], (("f32", (m, k)), ("f32", (k, n))), tame, 1e-4, 1e-3)
for shape in ((1,), (40,), (1000,), (3000,), (3, 500)):
    CASES[f"pivot_mass {shape}"] = Case(lambda x, p: F["pivot_threshold"](x, mass=p), (("f32", shape), ("f32", ())), probabilities)
    for k in (0, 1, 7, shape[-1], shape[-1] + 5):
        CASES[f"pivot_rank {shape} {k}"] = Case(lambda x, k: F["pivot_threshold"](x, rank=k), (("f32", shape), ("u32", ())), ranked(k))
    for value, p in ((0.01, 0.055), (0.25, 0.5), (0.0, 0.5), (0.5, 0.0), (0.5, -1.0), (0.5, float("nan")), (0.001, 1.0), (-1.0, 0.3)):
        case = Case(lambda x, p: F["pivot_threshold"](x, mass=p), (("f32", shape), ("f32", ())), masses(value, p))
        CASES[f"pivot_mass {shape} of {value} at {p}"] = case


def lanes_of(name: str, case: Case, traced: Traced, count: int = 3) -> list[Lane]:
    rng = np.random.default_rng(sum(name.encode()))
    made = []
    for _ in range(count):
        cells = {}
        for at, (dtype, shape) in enumerate(case.cells):
            cells[at] = case.fill(rng, at, dtype, shape) if case.fill else numbers(rng, dtype, shape)
        made.append(Lane(0, traced.params, cells))
    return made


@lru_cache(maxsize=1)
def batches() -> dict[str, list[Batch]]:
    """Of each case: three lanes, the same in reverse order, the first alone."""
    made = {}
    for name, case in CASES.items():
        traced = over_cells(case.fn, *case.cells)
        lanes = lanes_of(name, case, traced)
        made[name] = [Batch(traced.program, order) for order in (lanes, lanes[::-1], lanes[:1])]
    return made


@lru_cache(maxsize=3)
def answers(machine: str, workgroup: int) -> dict[str, list[Any]]:
    given = (
        batches() if workgroup == 32 else {n: b[:1] for i, (n, b) in enumerate(batches().items()) if i % 3 == 0 or machine == "lavapipe"}
    )
    got = iter(run_batches(machine, [b for found in given.values() for b in found], workgroup))
    return {name: [next(got) for _ in found] for name, found in given.items()}


@pytest.mark.parametrize(("machine", "workgroup"), [("lavapipe", 32), ("lavapipe", 256), ("swiftshader", 256)])
def test_against_the_oracle(machine: str, workgroup: int) -> None:
    for name, found in answers(machine, workgroup).items():
        case = CASES[name]
        check(found[0], batches()[name][0].oracle(), case.rtol, case.atol, f"{name} on {machine}, workgroup {workgroup}")


def test_lanes_equal_their_solo_runs_bit_for_bit() -> None:
    for name, (together, reverse, alone) in answers("lavapipe", 32).items():
        for i, lane in enumerate(together):
            assert same_bits(lane, reverse[-1 - i]), f"{name}: lane {i} depends on the order of lanes"
        assert same_bits(together[0], alone[0]), f"{name}: the first lane differs from its solo run"
