"""Views, lookups, pivots and skeletons: the oracle against loops of plain Python, and what each op refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pie_core.eta import FUNCTIONS, OPS, Model, TraceError, intrinsics, trace_epilogue
from pie_core.eta.dtypes import DTYPES
from tests.eta.test_eta_library import run
from tests.eta.test_eta_trace import Chan

F = FUNCTIONS
NAN, INF = float("nan"), float("inf")
EDGES = np.array([3.0, NAN, -0.0, 3.0, INF, 0.0, -INF, -2.5, NAN, 3.0], np.float32)
MATRIX = np.array([[1, 5, 5, -3], [NAN, 2, NAN, 2], [NAN] * 4, [0.0, -0.0, 0.0, -1]], np.float32)
WHOLE = np.array([7, -7, 0, 2**31 - 1, -(2**31), 7, 1], np.int32)


def of(fn: Callable[..., Any], *cells: Any) -> list[Any]:
    return run(fn, np.zeros((1, 1), np.float32), cells)


def descending(row: Any) -> list[int]:
    """Places of a row in sorted order, by the definition: larger first, ties by lower index, NaN last."""
    return sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), -row[i] if not math.isnan(row[i]) else 0, i))


SORTED = [EDGES, MATRIX, WHOLE, WHOLE.view(np.uint32), np.array([[2, 2], [1, 3]], np.int32), np.array([5.0], np.float32)]


@pytest.mark.parametrize("x", SORTED, ids=lambda x: f"{x.dtype}{x.shape}")
def test_sort_desc_and_top_k(x: Any) -> None:
    values, order = of(F["sort_desc"], x)
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    want = np.array([descending(r.tolist()) for r in rows])
    assert order.dtype == np.uint32
    np.testing.assert_array_equal(order, want.reshape(x.shape))
    np.testing.assert_array_equal(values, np.stack([r[w] for r, w in zip(rows, want, strict=True)]).reshape(x.shape))
    for k in {1, width // 2 or 1, width}:
        best, places = of(lambda v, k=k: F["top_k"](v, k), x)
        np.testing.assert_array_equal(best, values[..., :k])
        np.testing.assert_array_equal(places, order[..., :k])


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 9, 2**32 - 1])
@pytest.mark.parametrize("x", [EDGES, MATRIX], ids=["vector", "matrix"])
def test_pivot_by_rank(x: Any, k: int) -> None:
    (got,) = of(lambda v: F["pivot_threshold"](v, rank=k), x)
    want = [[not math.isnan(v) and sum(w > v for w in row) < k for v in row] for row in x.reshape(-1, x.shape[-1]).tolist()]
    np.testing.assert_array_equal(got, np.array(want).reshape(x.shape))


@pytest.mark.parametrize("p", [-1.0, 0.0, 1e-9, 0.1, 0.5, 0.6, 0.999, 1.0, 2.0, NAN])
@pytest.mark.parametrize("own", [False, True], ids=["by the probabilities", "by an order"])
def test_pivot_by_mass(p: float, own: bool) -> None:
    x = np.array([[0.25, 0.5, 0.25, 0.0], [NAN, 1.5, -0.5, 0.1], [0.3, 0.3, 0.3, 0.1]], np.float32)
    order = np.array([[-2.0, -3.0, 0.0, -0.0], [NAN, NAN, -INF, INF], [1.0, 2.0, 1.0, 2.0]], np.float32) if own else x
    (got,) = of(lambda v, o: F["pivot_threshold"](v, mass=p, order=o if own else None), x, order)

    def count(v: float) -> int:
        return 0 if math.isnan(v) else int(np.float32(min(max(v, 0.0), 1.0)) * 2**30)

    want = np.zeros(x.shape, bool)
    for i, row in enumerate(x.tolist()):
        before = 0
        for j in descending(order[i].tolist()):
            if before >= count(p):
                break
            want[i, j] = not math.isnan(order[i, j])
            before += count(row[j])
    np.testing.assert_array_equal(got, want)


def test_mass_keeps_a_prefix_of_the_walk() -> None:
    """Four certain tokens sum to 2^32, which is 0 in a u32 word: what comes behind the first that went stays out."""
    (got,) = of(lambda v: F["pivot_threshold"](v, mass=0.5), np.ones(6, np.float32))
    assert got.tolist() == [True, False, False, False, False, False]


def test_pivot_by_probability() -> None:
    (got,) = of(lambda v: F["pivot_threshold"](v, probability=0.3), EDGES)
    np.testing.assert_array_equal(got, [v >= np.float32(0.3) for v in EDGES])


TABLES = [np.arange(6, dtype=np.float32) + 1, np.arange(12, dtype=np.int32).reshape(4, 3) + 1, np.ones((2, 2, 2), bool)]
INDICES = [np.int32(1), np.array([0, -1, 5, 1], np.int32), np.array([[0, 2**32 - 1], [1, 2**31]], np.uint32)]


@pytest.mark.parametrize("index", INDICES, ids=lambda i: f"{i.dtype}{i.shape}")
@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.dtype}{t.shape}")
def test_gather(table: Any, index: Any) -> None:
    if index.ndim + table.ndim - 1 > 4:
        with pytest.raises(TraceError, match="at most rank 4"):
            of(F["gather"], table, index)
        return
    (got,) = of(F["gather"], table, index)
    want = np.zeros(index.shape + table.shape[1:], table.dtype)
    for place in np.ndindex(index.shape):
        if 0 <= int(index[place]) < len(table):
            want[place] = table[int(index[place])]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == table.dtype


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_gather_row(dtype: Any) -> None:
    index = np.array([3, -1, 4, 0], np.int64).astype(dtype)
    (got,) = of(F["gather_row"], MATRIX, index)
    np.testing.assert_array_equal(got, np.array([-3, 0, 0, 0], np.float32))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 70])
def test_mask_apply(n: int) -> None:
    rng = np.random.default_rng(n)
    words = rng.integers(0, 2**32, -(-n // 32), dtype=np.uint32)
    x = rng.normal(size=(2, n)).astype(np.float32)
    keep = [bool(int(words[i // 32]) >> (i % 32) & 1) for i in range(n)]
    got, one = of(lambda v, w: (F["mask_apply"](v, w), F["mask_apply"](v[0], w)), x, words)
    np.testing.assert_array_equal(got, np.where(keep, x, -np.inf))
    np.testing.assert_array_equal(one, got[0])


@pytest.mark.parametrize(("name", "step"), [("cumsum", lambda a, b: a + b), ("cumprod", lambda a, b: a * b)])
@pytest.mark.parametrize("x", [EDGES, MATRIX, WHOLE, WHOLE.view(np.uint32), np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2)])
def test_running_sums_and_products(name: str, step: Any, x: Any) -> None:
    (got,) = of(F[name], x)
    want = x.copy()
    with np.errstate(all="ignore"):
        for i in range(1, x.shape[-1]):
            want[..., i] = step(want[..., i - 1], x[..., i])
    np.testing.assert_array_equal(got, want)


def test_sums_run_left_to_right_with_one_rounding_an_element() -> None:
    x = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    (got,) = of(F["cumsum"], x)
    np.testing.assert_array_equal(got, np.array([1e8, 1e8, 1, 2], np.float32))


def test_scatter_adds_in_order_and_the_last_set_wins() -> None:
    base = np.arange(8, dtype=np.float32).reshape(4, 2)
    index = np.array([1, 3, -1, 1, 4], np.int32)
    values = np.arange(10, dtype=np.float32).reshape(5, 2) * 10
    added, stored = of(lambda b, i, v: (F["scatter_add"](b, i, v), F["scatter_set"](b, i, v)), base, index, values)
    want_added, want_stored = base.copy(), base.copy()
    for at, value in zip(index, values, strict=True):
        if 0 <= at < 4:
            want_added[at] += value
            want_stored[at] = value
    np.testing.assert_array_equal(added, want_added)
    np.testing.assert_array_equal(stored, want_stored)
    ones, flags = of(
        lambda i: (F["scatter_add"](F["broadcast"](F["constant"](0, "i32"), 4), i, 1), F["scatter_set"](F["iota"](4) < 0, i, True)), index
    )
    assert ones.tolist() == [0, 2, 0, 1] and flags.tolist() == [False, True, False, True]


def test_matmul_transpose_and_broadcast() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
    product, turned = of(lambda x, y: (x @ y, F["transpose"](x)), a, b)
    np.testing.assert_array_equal(product, a @ b)
    np.testing.assert_array_equal(turned, a.T)
    rows, columns, cube, one = of(
        lambda v, m: (F["broadcast"](v, (3, 2)), F["broadcast"](F["reshape"](v, (1, 3)), (2, 3)), F["broadcast"](m, (2, 3, 2)),
                      F["broadcast"](2.0, 2)),
        np.arange(3, dtype=np.int32), a,
    )  # fmt: skip
    np.testing.assert_array_equal(rows, [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(columns, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(cube, np.repeat(a[:, :, None], 2, axis=2))
    np.testing.assert_array_equal(one, np.array([2, 2], np.float32))


def test_reductions_drop_the_last_axis() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 5)).astype(np.float32)
    x[0, 1, 1] = NAN
    top, low, best = of(lambda v: (F["reduce_max"](v), F["reduce_min"](v), F["reduce_argmax"](v)), x)
    assert top.shape == (2, 3, 2) and top[0, 1, 1] == -INF and low[0, 1, 1] == INF and best[0, 1, 1] == 0
    np.testing.assert_array_equal(np.delete(best.ravel(), 3), np.delete(x.argmax(-1).ravel(), 3))
    (total,) = of(F["reduce_sum"], WHOLE.reshape(1, 7))
    assert total.tolist() == [int(WHOLE.astype(np.int64).sum().astype(np.int32))]


X = np.arange(12, dtype=np.float32).reshape(4, 3)
INDEXED: list[tuple[Callable[..., Any], Any]] = [
    (lambda x: x[2], X[2]), (lambda x: x[-1], X[-1]), (lambda x: x[1:3], X[1:3]), (lambda x: x[:2], X[:2]), (lambda x: x[-2:], X[-2:]),
    (lambda x: x[2][1], X[2, 1]), (lambda x: x[F["iota"](2) + 1], X[1:3]), (lambda x: x[F["reduce_argmax"](x[0])], X[2]),
    (lambda x: F["gather"](x, 9), np.zeros(3)), (lambda x: (x > 3.0)[1], X[1] > 3), (lambda x: (x > 3.0) ^ (x > 7.0), (X > 3) ^ (X > 7)),
    (lambda x: (x > 3.0) ^ True, X <= 3), (lambda x: +x, X),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "want"), INDEXED)
def test_indexing(fn: Callable[..., Any], want: Any) -> None:
    (got,) = of(fn, X)
    np.testing.assert_array_equal(got, want)


def cell(dtype: str, *shape: int) -> Any:
    return Chan(dtype, shape).take()


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: cell("f32", 4, 3) + cell("f32", 4), r"\[4, 3\] and \[4\] differ; they must be equal or one of them a scalar: broadcast"),
    (lambda: F["broadcast"](cell("f32", 3), (4, 3)), r"broadcast repeats f32\[3\] over \[4, 3\]: extents are compared from the left"),
    (lambda: F["broadcast"](cell("f32", 4, 3), (4,)), "broadcast repeats"),
    (lambda: F["transpose"](cell("f32", 3)), r"transpose takes a matrix \(rank 2\), got f32\[3\]"),
    (lambda: F["gather"](cell("f32"), cell("i32", 2)), "gather takes a table of rank 1 or more"),
    (lambda: F["gather"](cell("f32", 3), cell("f32", 2)), r"gather takes indices of i32 or u32, got f32\[2\]; cast"),
    (lambda: F["gather"](cell("f32", 3, 1, 1, 1), cell("i32", 2, 2)), r"would make f32\[2, 2, 1, 1, 1\]; a value has at most rank 4"),
    (lambda: F["gather"](cell("f32", 2, 1 << 18), cell("i32", 64)), "and 4194304 elements"),
    (lambda: F["gather_row"](cell("f32", 3, 2), cell("i32", 2)), r"one index a row: x is f32\[3, 2\], the indices are i32\[2\], not \[3\]"),
    (lambda: F["mask_apply"](cell("f32", 33), cell("u32", 1)), r"takes a mask of 33 bits, u32\[2\], got u32\[1\]"),
    (lambda: F["mask_apply"](cell("i32", 33), cell("u32", 2)), "takes f32"),
    (lambda: F["pivot_threshold"](cell("f32", 3)), "exactly one of rank=, mass= and probability="),
    (lambda: F["pivot_threshold"](cell("f32", 3), rank=1, mass=0.5), "exactly one of"),
    (lambda: F["pivot_threshold"](cell("f32", 3), rank=0.5), "pivot_rank: a float constant cannot be combined with a u32"),
    (lambda: F["pivot_threshold"](cell("f32", 3, 1, 1), mass=0.5), r"takes a vector or a matrix \(rank 1 or 2\)"),
    (lambda: F["pivot_threshold"](cell("f32", 3), mass=cell("f32", 3)), r"takes a threshold f32\[\], got f32\[3\]"),
    (lambda: F["pivot_threshold"](3.0, mass=0.5), "pivot_threshold takes a Tensor, got float"),
    (lambda: F["pivot_threshold"](cell("f32", 3), mass=0.5, order=3.0), "pivot_threshold takes a Tensor, got float"),
    (lambda: F["pivot_threshold"](cell("f32", 3), rank=1, order=cell("f32", 3)), "takes order= with mass= only"),
    (lambda: F["pivot_threshold"](cell("f32", 3), mass=0.5, order=cell("f32", 4)), r"of one shape, got f32\[4\] and f32\[3\]"),
    (lambda: F["pivot_threshold"](cell("f32", 3), mass=0.5, order=cell("i32", 3)), r"of one shape, got i32\[3\] and f32\[3\]"),
    (lambda: F["cumsum"](cell("f32")), "cumsum works along the last axis, got the scalar"),
    (lambda: F["cumprod"](cell("bool", 3)), "cumprod takes a number"),
    (lambda: F["sort_desc"](cell("bool", 3)), "sort_desc takes a number"),
    (lambda: F["sort_desc"](cell("f32", 2, 2, 2)), "rank 1 or 2"),
    (lambda: F["sort_desc"]([3.0]), "sort_desc takes a Tensor, got list"),
    (lambda: F["top_k"](cell("f32", 3), 4), r"top_k takes k from 1 to 3, the length of the last axis of f32\[3\]; got 4"),
    (lambda: F["top_k"](cell("f32", 3), 0), "takes k from 1 to 3"),
    (lambda: F["top_k"](cell("f32", 3), cell("u32")), "takes k as a Python int, got Tensor; pivot_threshold"),
    (lambda: cell("f32", 2, 3) @ cell("f32", 2, 3), r"matmul takes \[m, k\] and \[k, n\], got f32\[2, 3\] and f32\[2, 3\]"),
    (lambda: cell("i32", 2, 3) @ cell("f32", 3, 3), "matmul takes f32"),
    (lambda: F["matmul"](F["broadcast"](0.0, (4096, 1)), F["broadcast"](0.0, (1, 4096))), "would make"),
    (lambda: F["scatter_add"](cell("bool", 3), cell("i32", 2), cell("bool", 2)), "scatter_add takes a number"),
    (lambda: F["scatter_set"](cell("f32"), cell("i32", 2), 1.0), "takes a base of rank 1 or more"),
    (lambda: F["scatter_set"](cell("f32", 3), cell("i32", 2, 2), 1.0), "scatter_set takes a vector of indices"),
    (lambda: F["scatter_set"](cell("f32", 3), cell("i32", 2), cell("f32", 3)), r"takes the values f32\[2\], got f32\[3\]"),
    (lambda: cell("f32", 4)[9], r"index 9 is out of range for f32\[4\]"),
    (lambda: cell("f32", 4)[3:1], r"x\[a:b\] takes Python ints and keeps one row or more"),
    (lambda: cell("f32", 4)[::2], r"x\[a:b\] takes Python ints"),
    (lambda: cell("f32", 4)[cell("i32") :], r"x\[a:b\] takes Python ints"),
    (lambda: cell("f32", 4)[cell("bool", 4)], r"x\[mask\] would have an unknown length"),
    (lambda: cell("f32", 4)[1, 2], "indexed along its first axis, by an int, a slice or a Tensor of indices, got tuple"),
    (lambda: len(cell("f32")), "a scalar Tensor has no length"),
    (lambda: 3.0 in cell("f32", 4), "`in` needs a value now"),
    (lambda: cell("f32", 4) ** 2, r"\*\* is not there: x \* x squares"),
    (lambda: cell("f32", 4) ^ cell("f32", 4), r"\^ takes bool"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "message"), REFUSED)
def test_misuse_is_told_with_shapes_and_a_fix(fn: Callable[[], Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_epilogue(fn, Model(8, 8))


def test_outputs_are_all_rows_of_the_pass() -> None:
    traced = trace_epilogue(lambda: (F["reduce_argmax"](intrinsics.outputs()), intrinsics.output(1, "hidden")), Model(5, 4), rows=3)
    assert traced.program.reads == traced.program.rows == 3 and traced.program.width("logits") == 5
    assert traced.program.out_types == (("i32", (3,)), ("f32", (4,)))
    assert trace_epilogue(lambda: intrinsics.output(2), Model(5, 4), rows=3).program.rows is None
    for fn, message, rows in (
        (lambda: intrinsics.output(3), "this pass has 3 read-outs", 3),
        (intrinsics.outputs, "this pass reads nothing out", 0),
        (lambda: intrinsics.outputs("weights"), "knows the names logits, hidden", 3),
    ):
        with pytest.raises(TraceError, match=message):
            trace_epilogue(fn, Model(5, 4), rows=rows)
    assert trace_epilogue(intrinsics.outputs, Model(49152, 4), rows=85).program.rows == 85
    with pytest.raises(TraceError, match=r"86 read-outs of 49152 numbers .* the 4194304 elements .*; 85 fit: .read\(\) fewer positions"):
        trace_epilogue(intrinsics.outputs, Model(49152, 4), rows=86)


def test_len_is_the_first_extent() -> None:
    seen = []
    trace_epilogue(lambda: seen.append(len(cell("f32", 4, 3))), Model(8, 8))
    assert seen == [4]


def test_the_table_says_which_dtypes_an_op_takes() -> None:
    for row in OPS.values():
        assert row.dtypes and set(row.dtypes) <= set(DTYPES), row.name
        if row.kind in ("elementwise", "reduce") and "" not in row.wgsl:
            assert set(row.dtypes) == {key.partition(">")[0] for key in row.wgsl}, row.name
    multiple = {row.name for row in OPS.values() if row.results > 1}
    assert multiple == {"sort_desc", "top_k"}
