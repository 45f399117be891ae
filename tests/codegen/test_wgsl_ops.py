"""Ops that read memory, on the GPUs against the oracle: every dtype, both sides of each size switch, several lanes in both orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from pie_core.eta import OPS, Traced
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Answer, Batch, Lane, check, same_bits
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


def case(label: str, name: str, cells: Cells, fill: Any = None, tolerance: tuple[float, float] = (2e-6, 1e-6), **attrs: Any) -> None:
    """Add the case of one function over cells."""
    fn = (lambda *x: F[name](*x, **attrs)) if attrs else F[name]
    CASES[" ".join([name, label, *map(str, attrs.values())])] = Case(fn, cells, fill, *tolerance)


LOOSE = (1e-5, 1e-4)
for n in (1, 33, 1023, 1024, 1025, 2500):
    case(f"f32 {n}", "sort_desc", (("f32", (n,)),))
for dtype, shape in (("f32", (3, 1100)), ("i32", (1200,)), ("u32", (1200,)), ("f32", (7, 40)), ("i32", (7, 40)), ("u32", (300,))):
    case(f"{dtype} {shape}", "sort_desc", ((dtype, shape),), few)
    case(f"{dtype} {shape}", "top_k", ((dtype, shape),), few, k=17)
    case(f"{dtype} {shape}", "top_k", ((dtype, shape),), k=1)
for k in (1024, 1025, 1500):
    case("f32 1500", "top_k", (("f32", (1500,)),), k=k)
LONG = (("f32", (16383,)), ("f32", (16384,)), ("i32", (20_000,)), ("f32", (2, 16_500)))  # from 16,384 on all counts are walked
for dtype, shape in LONG:
    case(f"{dtype} {shape} long", "sort_desc", ((dtype, shape),), few)
for shape in ((1,), (63,), (1025,), (3000,), (2, 3, 4, 5), (3, 2000), (300, 3)):
    case(f"f32 {shape}", "cumsum", (("f32", shape),), tame, LOOSE)
    case(f"f32 {shape}", "cumprod", (("f32", shape),), near_one, LOOSE)
for shape in ((64,), (65,), (2080,), (2081,), (49_152,), (40, 65), (40, 5000)):  # of 65 elements a thread on sums are cut into blocks
    case(f"equal numbers {shape}", "cumsum", (("f32", shape),), masses(0.1, 0.0), (5e-6, 0.0))
for name in ("cumsum", "cumprod"):
    for dtype, shape in (("i32", (63,)), ("u32", (3000,)), ("i32", (3, 2000))):
        case(f"{dtype} {shape}", name, ((dtype, shape),))
for name in ("scatter_set", "scatter_add"):
    for dtype, index, base, m in (
        ("f32", "i32", (50,), 200), ("f32", "u32", (1000,), 3), ("i32", "i32", (5, 7), 40), ("u32", "u32", (3, 2, 300), 9),
        ("f32", "i32", (2, 40), 70),
    ):  # fmt: skip
        case(f"{dtype} {base} {m}", name, ((dtype, base), (index, (m,)), (dtype, (m, *base[1:]))), indices(base[0]), LOOSE)
for base, m in (((300,), 1024), ((300,), 1025), ((4097,), 3000), ((70, 3), 1500), ((300,), 17_000)):  # sorted from SMALL_SORT on
    case(f"many {base} {m}", "scatter_set", (("f32", base), ("i32", (m,)), ("f32", (m, *base[1:]))), indices(base[0]))
for name in ("scatter_set", "scatter_add"):  # the order of a sorted row names no row twice
    for n, m in ((40, 300), (2000, 1500)):
        CASES[f"{name} by order {n} {m}"] = Case(
            lambda base, x, name=name: F[name](base, F["sort_desc"](x)[1], x), (("f32", (n,)), ("f32", (m,))), few, 2e-6, 1e-6
        )
case("bool", "scatter_set", (("bool", (50,)), ("u32", (30,)), ("bool", (30,))), indices(50))
for shape in ((3, 1000), (1, 5), (300, 7), (2, 3, 4, 5), (40, 130)):
    case(f"f32 {shape}", "reduce_sum", (("f32", shape),), tame, LOOSE)
    case(f"f32 {shape}", "reduce_argmax", (("f32", shape),), few)
for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_argmax"):
    for dtype, shape in (("i32", (3, 1000)), ("u32", (300, 7)), ("f32", (3, 1000))):
        case(f"{dtype} {shape} few", name, ((dtype, shape),), few if name != "reduce_sum" else tame, LOOSE)
for table, idx in (((9,), ()), ((9,), (1,)), ((9,), (40,)), ((5, 4), ()), ((5, 4), (300,)), ((5, 3, 2), (2, 3)), ((300,), (4, 5, 2, 2))):
    case(f"f32 {table} {idx}", "gather", (("f32", table), ("i32", idx)), indices(table[0]))
for dtype in ("i32", "u32", "bool"):
    case(f"{dtype} u32", "gather", ((dtype, (5, 4)), ("u32", (300,))), indices(5))
for dtype in NUMPY:
    case(dtype, "gather_row", ((dtype, (300, 7)), ("i32" if dtype != "u32" else "u32", (300,))), indices(7))
    case(dtype, "transpose", ((dtype, (5, 60)),))
    case(f"{dtype} (3,)", "broadcast", ((dtype, (3,)),), shape=(3, 4))
    case(f"{dtype} (2, 1, 3)", "broadcast", ((dtype, (2, 1, 3)),), shape=(2, 5, 3, 2))
for source, shape in (((1, 4), (3, 4)), ((), (2, 2)), ((1,), (7,)), ((3, 1), (3, 1, 4))):
    case(f"f32 {source}", "broadcast", (("f32", source),), shape=shape)
for shape in ((1,), (31,), (32,), (33,), (1000,), (5, 70)):
    case(str(shape), "mask_apply", (("f32", shape), ("u32", (-(-shape[-1] // 32),))))
for m, k, n in ((1, 1, 1), (3, 4, 5), (20, 33, 17), (1, 3000, 2), (2, 700, 300)):
    case(f"{m} {k} {n}", "matmul", (("f32", (m, k)), ("f32", (k, n))), tame, (1e-4, 1e-3))


def pivot_case(label: str, way: str, dtype: str, shape: tuple[int, ...], fill: Any) -> None:
    CASES[f"pivot {way} {label} {shape}"] = Case(lambda x, t: F["pivot_threshold"](x, **{way: t}), (("f32", shape), (dtype, ())), fill)


for shape in ((1,), (40,), (3000,), (3, 500)):
    pivot_case("of a softmax", "mass", "f32", shape, probabilities)
    for k in (0, 7, shape[-1], shape[-1] + 5):
        pivot_case(str(k), "rank", "u32", shape, ranked(k))
for value, p in (
    (0.01, 0.055),
    (0.25, 0.5),
    (1.0, 1.0),
    (0.0, 0.5),
    (0.5, 0.0),
    (0.5, -1.0),
    (0.5, float("nan")),
    (0.001, 1.0),
    (-1.0, 0.3),
):
    pivot_case(f"of {value} at {p}", "mass", "f32", (2500,), masses(value, p))


def mass_by(p: float, orders: tuple[float, ...], shape: tuple[int, ...], least: float = 0.0) -> None:
    """Random masses in an order of few values."""

    def fill(rng: np.random.Generator, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
        return (
            rng.choice(orders, shape).astype(np.float32)
            if at
            else rng.uniform(least, 1.0 if least else 2 / shape[-1], shape).astype(np.float32)
        )

    CASES[f"pivot mass {p} by {len(orders)} values over {least} {shape}"] = Case(
        lambda x, o: F["pivot_threshold"](x, mass=p, order=o), (("f32", shape), ("f32", shape)), fill
    )


TIES, SOME = (1.0, 0.0, -0.0, -2.0, float("nan"), float("-inf")), tuple(range(-500, 500))
for shape in ((1,), (40,), (2500,), (3, 500)):
    for p, orders in ((0.5, TIES), (0.9, SOME), (0.0, SOME), (1.0, (float("nan"),)), (1.0, TIES)):
        mass_by(p, orders, shape)
mass_by(1.0, (3.0,), (2500,), 0.5)  # masses that sum to more than 2^32
mass_by(0.7, TIES, (2500,), 0.5)


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
    for name, found in CASES.items():
        traced = over_cells(found.fn, *found.cells)
        lanes = lanes_of(name, found, traced)
        made[name] = [Batch(traced.program, order) for order in (lanes, lanes[::-1], lanes[:1])]
    return made


@lru_cache(maxsize=1)
def on_lavapipe() -> dict[str, list[list[Answer]]]:
    """The answers to all batches in the form of software adapters."""
    got = iter(run_batches("lavapipe", [b for found in batches().values() for b in found], 32))
    return {name: [next(got) for _ in found] for name, found in batches().items()}


def every(step: int) -> list[str]:
    """Each `step`-th case."""
    return list(CASES)[::step]


def agree(name: str, got: list[Answer], where: str) -> None:
    check(got, batches()[name][0].oracle(), CASES[name].rtol, CASES[name].atol, f"{name}, {where}")


@pytest.mark.parametrize("name", CASES)
def test_the_software_form_agrees_with_the_oracle(name: str) -> None:
    agree(name, on_lavapipe()[name][0], "workgroup 32 on lavapipe")


@pytest.mark.parametrize("name", CASES)
def test_lanes_equal_their_solo_runs_bit_for_bit(name: str) -> None:
    together, reverse, alone = on_lavapipe()[name]
    for i, lane in enumerate(together):
        assert same_bits(lane, reverse[-1 - i]), f"lane {i} depends on the order of lanes"
    assert same_bits(together[0], alone[0]), "the first lane differs from its solo run"


@pytest.mark.parametrize("name", every(4))
def test_the_forms_for_gpus_agree_and_have_the_same_bits(name: str) -> None:
    """Fused in parts and split, at the workgroup size of GPUs."""
    batch = batches()[name][0]
    fused = run_batches("lavapipe", [batch], 256, 2)[0]
    split = run_batches("lavapipe", [batch], 256, 2, split=True)[0]
    agree(name, fused, "workgroup 256 on lavapipe")
    assert all(same_bits(a, b) for a, b in zip(fused, split, strict=True))


def test_swiftshader_agrees_with_the_oracle() -> None:
    names = every(5)
    for name, got in zip(names, run_batches("swiftshader", [batches()[n][0] for n in names]), strict=True):
        agree(name, got, "swiftshader")


def test_every_op_that_reads_memory_has_a_case() -> None:
    covered = {node.name for found in batches().values() for node in found[0].program.ops}
    kinds = ("view", "lookup", "pivot", "skeleton", "pick", "reduce")
    assert {op.name for op in OPS.values() if op.kind in kinds} <= covered | {"reshape"}
