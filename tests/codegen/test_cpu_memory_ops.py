"""Views, lookups, pivots and skeletons on the cpu virtual machine: against the oracle, in batches, at each size switch, hostile data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pie_core.codegen import emit_epilogue_cpu
from pie_core.eta import OPS
from pie_core.eta.program import Node, Program
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Answer, Batch, Lane, check, same_bits
from tests.codegen.cpu import cpu_machine

Array = Any
DTYPES = {"f": "f32", "i": "i32", "u": "u32", "b": "bool"}
NUMERIC = ("f32", "i32", "u32")
KINDS = ("view", "lookup", "pivot", "skeleton")


def launch(fn: Callable[..., Any], *lanes: tuple[Array, ...]) -> Batch:
    """`fn` over cells of the types of the first lane's arrays, one lane each."""
    result = over_cells(fn, *[(DTYPES[a.dtype.kind], a.shape) for a in lanes[0]])
    return Batch(result.program, [Lane(0, result.params, dict(enumerate(arrays))) for arrays in lanes])


def run(batch: Batch, atol: float = 0.0) -> list[Answer]:
    """Run a launch, in both orders and lane by lane: all agree bit for bit, and with the oracle."""
    machine, lanes = cpu_machine(), batch.lanes
    got = machine.run(batch)
    check(got, batch.oracle(), 0 if not atol else 1e-5, atol)
    if len(lanes) > 1:
        reverse = machine.run(Batch(batch.program, lanes[::-1]))
        for i, answer in enumerate(got):
            assert same_bits(answer, reverse[-1 - i]), f"lane {i} depends on the order of lanes"
            assert same_bits(answer, machine.run(Batch(batch.program, [lanes[i]]))[0]), f"lane {i} differs from its solo run"
    return got


def numbers(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Values with ties, zeros of both signs, infinities, NaN and extremes in the first elements."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    n = int(np.prod(shape))
    if dtype == "f32":
        x = rng.normal(0, 4, n).astype(np.float32)
        x[rng.integers(0, n, n // 8)] = 1.5
        odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40, 3.4e38, -0.0, 0.0, np.inf], np.float32)
    else:
        info = np.iinfo(np.dtype(f"{dtype[0]}4"))
        x = rng.integers(info.min, info.max, n, dtype=info.dtype, endpoint=True)
        x[rng.integers(0, n, n // 8)] = 7
        odd = np.array([0, info.max, info.min, 1, info.max - 1, info.min + 1, 0, info.max], info.dtype)
    if n >= 2 * len(odd):
        x[rng.permutation(n)[: len(odd)]] = odd
    return x.reshape(shape)


def probabilities(shape: tuple[int, ...], seed: int, sharpness: float = 3.0) -> Array:
    logits = np.random.default_rng(seed).normal(0, sharpness, shape)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


# Sizes around vectors, short rows and lists, chunks, groups of a rank's bound, and over them.
SIZES = (1, 2, 5, 127, 128, 129, 256, 257, 1023, 1024, 1025, 2049, 2051, 2052, 4095, 4097, 10_007)


@pytest.mark.parametrize("dtype", NUMERIC)
@pytest.mark.parametrize("n", SIZES)
def test_sort_and_top_k(dtype: str, n: int) -> None:
    ks = sorted({k for k in (1, 2, 40, 511, 513, 1024, 1025, n) if k <= n})

    def fn(x: Any) -> Any:
        return [value for pair in (F["sort_desc"](x), *[F["top_k"](x, k) for k in ks]) for value in pair]

    for answer in run(launch(fn, *[(numbers(dtype, (n,), seed),) for seed in range(2)])):
        assert not np.isnan(answer.outs[0].astype(np.float64)[: n // 2]).any()


@pytest.mark.parametrize("n", SIZES)
def test_pivots(n: int) -> None:
    ranks, shares = sorted({0, 1, 2, 40, 512, 513, n - 1, n, n + 1, 0xFFFFFFFF}), (-1.0, 0.0, 1e-6, 0.3, 0.9, 0.9999, 1.0, 2.0, np.nan)

    def fn(x: Any, p: Any, q: Any) -> Any:
        by_rank = [F["pivot_threshold"](x, rank=k) for k in ranks]
        by_mass = [F["pivot_threshold"](v, mass=s) for s in shares for v in (p, q)]
        by_order = [F["pivot_threshold"](v, mass=s, order=o) for s in shares for v, o in ((p, x), (q, p), (x, q))]
        return by_rank + by_mass + by_order + [F["pivot_threshold"](p, probability=0.01)]

    lanes = [(numbers("f32", (n,), seed), probabilities((n,), seed), probabilities((n,), seed, 0.01)) for seed in range(2)]
    run(launch(fn, *lanes))


@pytest.mark.parametrize("value", [0.0, -0.0, 0.001, 1.0, np.nan, -np.inf, 1e-30])
def test_rows_of_one_value(value: float) -> None:
    """All elements tie: candidates overflow every list, bounds hold nothing back."""

    def fn(x: Any) -> Any:
        masks = [F["pivot_threshold"](x, rank=9), F["pivot_threshold"](x, mass=0.5), F["pivot_threshold"](x, mass=1.0)]
        shares = F["iota"](3001).cast("f32") / 1e5  # up to 0.03, in an order that ties
        masks += [F["pivot_threshold"](shares, mass=s, order=x) for s in (0.0, 0.5, 1.0)]
        return [*masks, *F["top_k"](x, 1000), *F["top_k"](x, 40), *F["sort_desc"](x)]

    batch = launch(fn, (np.full(3001, value, np.float32),), (np.full(3001, value, np.float32),))
    got = run(batch)
    assert got[0].outs[9].tolist() == list(range(40))
    want = 0 if np.isnan(value) else 317  # 0 + 1 + ... + 316 is the first to pass 50,000
    assert [int(m.sum()) for m in got[0].outs[3:6]] == [0, want, 0 if np.isnan(value) else 448]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("n", [300, 3000, 10_007])
def test_ordered_rows_and_whole_numbers(n: int, order: int) -> None:
    """Ascending, the greatest of a row fill its last groups only: more than a list holds. Whole numbers have equal low digits."""

    def fn(x: Any, i: Any) -> Any:
        ks = [k for k in (1, 40, 300, 512, 1000) if k <= n]
        return [F["pivot_threshold"](x, rank=k) for k in ks] + [part for v in (x, i) for k in ks for part in F["top_k"](v, k)] + [
            part for v in (x, i) for part in F["sort_desc"](v)
        ]  # fmt: skip

    x = np.arange(n)[::order]
    run(
        launch(
            fn,
            ((x * 8).astype(np.float32), (x * 4096).astype(np.int32)),
            ((x // 9 - 30).astype(np.float32), (x // 9 - 30).astype(np.int32)),
        )
    )


@pytest.mark.parametrize("n", [4, 1000, 5000])
def test_a_share_that_is_met_exactly(n: int) -> None:
    """Sums of masses equal to the share: what comes next is not kept, be it of mass 0."""
    x = np.zeros(n, np.float32)
    x[:3] = 0.5, 0.25, 0.25
    even = np.full(n, 2.0**-14, np.float32)
    shares = (0.5, 0.75, 1.0, 2.0**-13)
    got = run(launch(lambda a, b: [F["pivot_threshold"](v, mass=s) for s in shares for v in (a, b)], (x, even), (x[::-1].copy(), even)))
    assert [int(m.sum()) for m in got[0].outs[:6:2]] == [1, 2, 3]


def test_masses_beyond_one_keep_what_comes_before_the_share() -> None:
    """Sums over 2^32 do not wrap around: the walk ends where the share is first reached."""
    x = np.linspace(0.5, 3.0, 3000).astype(np.float32)
    for row in (x, x[::-1].copy(), np.tile(x, 7)):
        batch = launch(lambda v: (F["pivot_threshold"](v, mass=0.9), F["pivot_threshold"](v, mass=1.0)), (row,))
        for mask in cpu_machine().run(batch)[0].outs:
            assert np.flatnonzero(mask).tolist() == [int(np.argmax(row))]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (3, 5), (33, 31), (130, 9), (5, 1025), (1025, 3), (3, 2500)])
def test_matrices(shape: tuple[int, int]) -> None:
    """Row by row: reductions, sorting, pivots, scans; transposes and broadcasts of what they made."""
    m, n = shape

    def fn(*cells: Any) -> Any:
        x, p, idx, packed, i, flags = cells
        top = F["reduce_max"](x)
        k = min(n, 3)
        return [
            *[F[name](v) for name in ("reduce_max", "reduce_min", "reduce_argmax") for v in (x, i)], F["reduce_sum"](i),
            F["reduce_argmax"](top), F["reduce_max"](F["reduce_argmax"](x)),
            *F["sort_desc"](x), *F["sort_desc"](i), *F["top_k"](x, k), *F["top_k"](i, n),
            F["pivot_threshold"](x, rank=2), F["pivot_threshold"](p, mass=0.7), F["pivot_threshold"](p, mass=0.7, order=x),
            F["transpose"](x), F["transpose"](flags), F["transpose"](F["transpose"](i) + 1),
            F["broadcast"](top, (m, n)) > x, F["broadcast"](F["reshape"](top, (m, 1)), (m, n, 2)), F["broadcast"](i, (m, n, 2)),
            F["gather_row"](x, idx), F["gather_row"](flags, idx), F["mask_apply"](x, packed), F["cumsum"](i), F["cumprod"](i),
        ]  # fmt: skip

    def lane(seed: int) -> tuple[Array, ...]:
        rng = np.random.default_rng(seed)
        words = rng.integers(0, 1 << 32, -(-n // 32), dtype=np.uint32)
        idx = rng.integers(-2, n + 2, m).astype(np.int32)
        return (
            numbers("f32", shape, seed),
            probabilities(shape, seed),
            idx,
            words,
            numbers("i32", shape, seed),
            numbers("bool", shape, seed),
        )

    run(launch(fn, lane(0), lane(1)))


@pytest.mark.parametrize("n", [1, 3, 1023, 1024, 1025, 2049])
def test_scans_run_left_to_right(n: int) -> None:
    """f32 too, in f64 with one rounding an element, as the oracle: so the bits agree."""
    x = np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
    near_one = (1 + x / 100).astype(np.float32)
    batch = launch(
        lambda a, b, u: (F["cumsum"](a), F["cumprod"](b), F["cumsum"](u), F["cumprod"](u)), (x, near_one, numbers("u32", (n,), n))
    )
    run(batch)


def test_a_long_sum_of_equal_numbers_stays_right() -> None:
    """Rounded at each element its end was off by 5e-4 of it."""
    n = 49_152
    (got,) = run(launch(F["cumsum"], (np.full(n, 0.1, np.float32),)))
    true = np.float64(np.float32(0.1)) * np.arange(1, n + 1)
    assert np.max(np.abs(got.outs[0] - true) / true) < 1e-7


@pytest.mark.parametrize("index", ["i32", "u32"])
@pytest.mark.parametrize("n", [1, 4, 1023, 1024, 1025, 2049])
def test_lookups_are_bounds_checked(n: int, index: str) -> None:
    """Random 32-bit indices: nearly all out of range, many negative; every dtype, tables of vectors and of rows."""

    def fn(idx: Any, *cells: Any) -> Any:
        f, i, u, b, rows, packed = cells
        found = [F["gather"](t, idx) for t in (f, i, u, b, rows)]
        at = F["reduce_argmax"](i)
        ones = [F["gather"](f, at), F["gather"](b, at), F["gather"](rows, at), F["gather"](f, n), F["gather"](rows, -1), F["gather"](b, 0)]
        return [*found, *ones, F["gather"](f, F["reshape"](at, 1)), F["mask_apply"](f, packed)]

    def lane(seed: int) -> tuple[Array, ...]:
        rng = np.random.default_rng(seed)
        idx = rng.integers(0, 1 << 32, n, dtype=np.uint32)
        idx[::2] = rng.integers(0, n, n, dtype=np.uint32)[::2]
        tables = [numbers(dtype, (n,), seed) for dtype in ("f32", "i32", "u32", "bool")]
        packed = rng.integers(0, 1 << 32, -(-n // 32), dtype=np.uint32)
        return idx.view(f"{index[0]}4"), *tables, numbers("f32", (n, 3), seed), packed

    run(launch(fn, lane(0), lane(1)))


@pytest.mark.parametrize("m", [1, 5, 1025])
def test_scatters(m: int) -> None:
    """Duplicates, out of range and negative indices; the last of equal ones wins, sums go in index order (bit for bit)."""

    def fn(idx: Any, *cells: Any) -> Any:
        f, i, u, b, rows, *values = cells
        sets = [F["scatter_set"](base, idx, v) for base, v in zip((f, i, u, b, rows), values, strict=True)]
        return sets + [F["scatter_add"](base, idx, v) for base, v in zip((f, i, u, rows), (*values[:3], values[4]), strict=True)]

    def lane(seed: int) -> tuple[Array, ...]:
        rng = np.random.default_rng(seed)
        types = [("f32", ()), ("i32", ()), ("u32", ()), ("bool", ()), ("f32", (5,))]
        made = [[numbers(dtype, (n, *rest), seed + n) for dtype, rest in types] for n in (300, m)]
        for arrays in made:
            arrays[0], arrays[4] = np.nan_to_num(arrays[0], posinf=1, neginf=2), np.nan_to_num(arrays[4], posinf=1, neginf=2)
        return rng.integers(-50, 350, m).astype(np.int32), *made[0], *made[1]

    run(launch(fn, lane(0), lane(1)))


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (3, 5, 7), (1, 130, 19), (17, 127, 1), (4, 129, 16), (33, 257, 33), (9, 1, 20), (2, 1024, 2)]
)
def test_matmul(m: int, k: int, n: int) -> None:
    def lane(seed: int) -> tuple[Array, ...]:
        rng = np.random.default_rng(seed)
        return tuple(rng.normal(0, 1, s).astype(np.float32) for s in ((m, k), (k, n)))

    run(launch(lambda a, b: (F["matmul"](a, b), F["reduce_argmax"](F["matmul"](a, b))), lane(0), lane(1)), atol=1e-6 * k**0.5 + 1e-6)


def test_broadcasts_of_each_axis() -> None:
    shapes = [(1, 3, 1, 5), (4, 1, 7, 1), (4,), (1,), (4, 3), (4, 3, 7), (1, 1, 1, 5), (4, 3, 7, 5)]
    cells = [numbers("f32" if i % 2 else "bool", s, i) for i, s in enumerate(shapes)]
    run(launch(lambda *v: [F["broadcast"](x, (4, 3, 7, 5)) for x in v] + [F["reduce_argmax"](v[1])], tuple(cells)))


def test_values_cross_phases_through_scratch() -> None:
    """Sorted, scanned, cut, put back at their places, folded, and sorted again: each step reads what the one before stored."""

    def fn(x: Any) -> Any:
        values, order = F["sort_desc"](x)
        running = F["cumsum"](values)
        keep = F["scatter_set"](F["broadcast"](False, 3001), order.cast("i32"), running < 900.0)
        kept = F["select"](keep, x, float("-inf"))
        top, at = F["top_k"](kept, 7)
        spread = F["broadcast"](F["reshape"](top, (7, 1)), (7, 11)) + F["broadcast"](
            F["reshape"](F["iota"](11).cast("f32"), (1, 11)), (7, 11)
        )
        per_row = F["reduce_sum"](spread)
        return F["reduce_sum"](keep.cast("u32")), at, F["gather"](x, at), F["sort_desc"](per_row)[1], F["transpose"](spread), keep

    rng = np.random.default_rng(3)
    run(launch(fn, *[(np.round(rng.normal(0, 9, 3001) * 4).astype(np.float32) / 4,) for _ in range(3)]))


def test_long_chains_across_many_phases_are_stored_not_recomputed() -> None:
    """A scan every 31 ops, each op also reading one from before the last scan: without stores the code would grow with the square."""
    ops = [Node("iota", (), {}, "u32", (65,))]
    while len(ops) < 1000:
        n = len(ops)
        ops.append(Node("cumsum", (n - 1,), {}, "u32", (65,)) if n % 31 == 0 else Node("add", (n - 1, max(0, n - 31)), {}, "u32", (65,)))
    program = Program("epilogue", ops, [999, 500, 300]).verify()
    assert len(emit_epilogue_cpu(program).words) < 32 * len(ops)
    run(Batch(program, [Lane()]))


def test_every_row_of_these_kinds_runs() -> None:
    """A new row of a kind that the cpu emitter handles by name must be met here."""
    met = {
        "view": {"broadcast", "reshape", "transpose"}, "lookup": {"gather", "gather_row", "mask_apply"},
        "pivot": {"pivot_rank", "pivot_mass"},
        "skeleton": {"sort_desc", "top_k", "cumsum", "cumprod", "matmul", "scatter_add", "scatter_set"},
    }  # fmt: skip
    assert {kind: {r.name for r in OPS.values() if r.kind == kind} for kind in KINDS} == met
