"""Programs for devices in the page that read and write memory at other elements: selection, sorting, scans, lookups, scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pie_core.eta import Traced
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Batch, Lane

Array = Any
LANES = 2
SEVERAL = 1050  # over what is sorted by counting ranks, over a chunk of 1,024


class Case(NamedTuple):
    """`fn` of cells of the given types. Tolerances are for floats that were summed; all else is exact."""

    fn: Callable[..., Any]
    cells: tuple[tuple[str, tuple[int, ...]], ...]
    rtol: float = 0
    atol: float = 0


def _masks(p: Any, order: Any) -> Any:
    keep = F["pivot_threshold"]
    return keep(p, mass=0.6), keep(p, mass=0.6, order=order), keep(order, rank=9)


def _samplers(x: Any, state: Any) -> Any:
    typical, nucleus = F["typical"](x, 0.4), F["top_p"](x, 0.7)
    return typical, nucleus, *[F["gumbel_max"](F["masked"](-x, keep), state) for keep in (typical, nucleus, F["tail_free"](x, 0.9))]


def _row(dtype: str, *shape: int) -> tuple[str, tuple[int, ...]]:
    return dtype, shape


CASES: dict[str, Case] = {
    "top_k": Case(lambda x, i: [*F["top_k"](x, 7), *F["top_k"](i, 1030)], (_row("f32", 2, SEVERAL), _row("i32", SEVERAL))),
    "sort_desc": Case(lambda x, u: [*F["sort_desc"](x), *F["sort_desc"](u)], (_row("f32", SEVERAL), _row("u32", 3, 40))),
    "pivot_mass and pivot_rank": Case(_masks, (_row("f32", 2, 500), _row("f32", 2, 500))),
    "cumsum and cumprod": Case(
        lambda x, i, u: [F["cumsum"](x), F["cumsum"](i), F["cumprod"](u)],
        (_row("f32", SEVERAL), _row("i32", 2, 300), _row("u32", 3, 9)), 2e-6, 1e-5,
    ),
    "gather and gather_row": Case(
        lambda t, rows, m, at: [F["gather"](t, rows), F["gather_row"](m, at)],
        (_row("f32", 9, 4), _row("i32", 6), _row("bool", 5, 7), _row("i32", 5)),
    ),
    "scatter": Case(
        lambda base, at, x, few: [F["scatter_add"](base, at, x), F["scatter_set"](base, at, x), F["scatter_set"](base, few, 2.0)],
        (_row("f32", 50), _row("i32", 1050), _row("f32", 1050), _row("i32", 30)), 2e-6, 1e-5,
    ),
    "matmul": Case(lambda a, b: a @ b, (_row("f32", 5, 33), _row("f32", 33, 7)), 1e-5, 1e-5),
    "transpose and broadcast": Case(
        lambda x, c: [F["transpose"](x) + 1.0, F["broadcast"](c, (3, 50)), F["reduce_max"](F["transpose"](x))],
        (_row("f32", 5, 60), _row("i32", 3, 1)),
    ),
    "mask_apply": Case(F["mask_apply"], (_row("f32", 2, 70), _row("u32", 3))),
    "samplers": Case(_samplers, (_row("f32", SEVERAL), _row("u32", 2))),
}  # fmt: skip


def _values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Numbers with ties and specials where order matters; indices that reach out of range; small probabilities."""
    if dtype == "f32":
        x = rng.choice(np.arange(-200, 200) / np.float32(16), shape).astype(np.float32)
        x[..., 1:3] = np.nan, -np.inf if shape[-1] > 400 else -0.0
        return x
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    return rng.integers(0, 1 << 32, shape, np.uint32) if dtype == "u32" else rng.integers(-3, 60, shape).astype(np.int32)


def _cells(name: str, case: Case, rng: np.random.Generator) -> dict[int, Array]:
    cells = {i: _values(rng, *cell) for i, cell in enumerate(case.cells)}
    if name.startswith("pivot"):
        cells[0] = rng.uniform(0, 0.01, case.cells[0][1]).astype(np.float32)
    if case.atol:  # sums: no specials
        cells = {i: rng.standard_normal(c.shape).astype(np.float32) if c.dtype == np.float32 else c for i, c in cells.items()}
    if name == "samplers":
        cells[0] = rng.normal(0, 3, case.cells[0][1]).astype(np.float32)
    return cells


def batches() -> Iterator[tuple[str, Batch, float, float]]:
    """(title, launch of several lanes, rtol, atol); the same on every run."""
    for number, (name, case) in enumerate(CASES.items()):
        made: Traced = over_cells(case.fn, *case.cells)
        rng = np.random.default_rng(number)
        yield name, Batch(made.program, [Lane(0, made.params, _cells(name, case, rng)) for _ in range(LANES)]), case.rtol, case.atol
