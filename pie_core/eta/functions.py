"""The author's functions, one a row of the op table (`exp`, `maximum`, `reduce_argmax`, …) and the few that need more than operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pie_core.eta.advice import operand_advice
from pie_core.eta.dtypes import DTYPES, INTEGER
from pie_core.eta.errors import TraceError
from pie_core.eta.ops import OPS, Op
from pie_core.eta.rules import MAX_ELEMENTS, MAX_RANK, Attrs, Shape, elements, show
from pie_core.eta.tensor import Scalar, Tensor
from pie_core.eta.trace import NO_ATTRS
from pie_core.eta.tracing import active_trace


def _function(row: Op) -> Callable[..., Tensor]:
    name, label, arity = row.name, row.py, row.arity

    def function(*operands: Tensor | Scalar, **named: object) -> Tensor:
        if named:
            last = "; it works along the last axis" if row.kind == "reduce" else ""
            raise TraceError(f"{label} takes operands by position alone, got {', '.join(named)}={last}")
        if len(operands) != arity:
            raise TraceError(f"{label} takes {arity} operand{'s' if arity > 1 else ''}, got {len(operands)}")
        return active_trace(label).op(name, *operands)

    function.__name__ = function.__qualname__ = label
    function.__doc__ = row.doc
    return function


TABLE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {row.py: _function(row) for row in OPS.values() if row.py}
globals().update(TABLE_FUNCTIONS)  # importable by name, for authors


def _shape(shape: int | Sequence[int], what: str) -> Shape:
    if isinstance(shape, Tensor):
        raise TraceError(f"{what}: shapes are fixed while a program is traced, so extents are Python ints, not Tensors")
    if not isinstance(shape, (int, tuple, list)):
        raise TraceError(f"{what} takes a shape as an int or a tuple of ints, got {type(shape).__name__}")
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(dims) > MAX_RANK or any(type(d) is not int or d < 1 for d in dims) or elements(dims) > MAX_ELEMENTS:
        raise TraceError(f"{what}: a shape has at most {MAX_RANK} extents of 1 or more and {MAX_ELEMENTS} elements, got {shape!r}")
    return dims


def cast(x: Tensor, dtype: str) -> Tensor:
    """x as f32, i32, u32 or bool; f32 to integers truncates and saturates, NaN is 0; to bool is x != 0."""
    return _only(x, "cast").cast(dtype)


def constant(value: Scalar, dtype: str) -> Tensor:
    """A scalar of a stated dtype."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TraceError(f"constant knows the dtypes {', '.join(DTYPES)}, not {dtype!r}")
    trace = active_trace("constant")
    try:
        return trace.constant(value, dtype)
    except TraceError:
        raise TraceError(f"constant: {value!r:.40} ({type(value).__name__}) is not {dtype}; cast(x, dtype) converts a Tensor") from None


def broadcast(x: Tensor | Scalar, shape: int | Sequence[int]) -> Tensor:
    """x repeated over a shape: its extents, left-aligned with the shape's, are 1 or equal, missing ones 1. So [m] fills the rows of
    [m, n]; reshape(x, (1, n)) first to fill its columns."""
    x = _tensor(x, "broadcast")
    return x.trace.add("broadcast", (x,), NO_ATTRS, (x.dtype, _shape(shape, "broadcast")))


def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """The same elements in another shape, in row-major order; one extent may be -1, which is what the others leave."""
    x = _only(x, "reshape")
    given = (shape,) if isinstance(shape, int) else shape
    if isinstance(given, (tuple, list)) and [d for d in given if type(d) is int and d == -1] == [-1]:
        others = math.prod(d for d in given if type(d) is int and d > 0)
        shape = [max(elements(x.shape) // others, 1) if type(d) is int and d == -1 else d for d in given]
    return x.trace.add("reshape", (x,), NO_ATTRS, (x.dtype, _shape(shape, "reshape")))


def iota(n: int) -> Tensor:
    """0, 1, … n - 1 as u32 [n]."""
    return active_trace("iota").add("iota", (), NO_ATTRS, ("u32", _shape(n, "iota")))


def rng_uniform(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Uniform f32 in (0, 1) of `shape`, from a state u32[2]; the same state gives the same numbers on every device."""
    return _random("rng_uniform", state, shape)


def rng_gumbel(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Standard Gumbel noise of `shape` from a state u32[2]; always finite."""
    return _random("rng_gumbel", state, shape)


def rng_normal(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Standard normal noise of `shape` from a state u32[2]."""
    return _random("rng_normal", state, shape)


def _random(name: str, state: Tensor, shape: int | Sequence[int]) -> Tensor:
    if not isinstance(state, Tensor):
        raise TraceError(f"{name} takes a state u32[2], got {type(state).__name__}; Channel.counter(seed).take() gives one")
    return state.trace.add(name, (state,), NO_ATTRS, ("f32", _shape(shape, name)))


def sort_desc(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, u32 indices) of each row of x (a number of rank 1 or 2) in descending order: ties by lower index, NaN last."""
    values = _only(x, "sort_desc").trace.add("sort_desc", (x,))
    return values, values.trace.add("pick", (values,), _SECOND)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, u32 indices), k a row: the first k of sort_desc. k is a Python int, 1 to the length of the last axis."""
    if type(k) is not int:
        raise TraceError(f"top_k takes k as a Python int, got {type(k).__name__}; pivot_threshold(x, rank=k) takes a tensor")
    values = _only(x, "top_k").trace.add("top_k", (x,), {"k": k})
    return values, values.trace.add("pick", (values,), _SECOND)


def scatter_add(base: Tensor, index: Tensor, values: Tensor | Scalar) -> Tensor:
    """base [n, …] with values [m, …] (or one scalar) added at rows index [m] (i32 or u32), in index order; out of range is skipped."""
    return _scatter("scatter_add", base, index, values)


def scatter_set(base: Tensor, index: Tensor, values: Tensor | Scalar) -> Tensor:
    """base [n, …] with values [m, …] (or one scalar) stored at rows index [m] (i32 or u32); the last of equal indices wins, out of range
    is skipped."""
    return _scatter("scatter_set", base, index, values)


def _scatter(name: str, base: Tensor, index: Tensor, values: Tensor | Scalar) -> Tensor:
    trace = _only(base, name).trace
    _only(index, name)
    if not isinstance(values, Tensor):
        values = trace.constant(values, base.dtype)
    if not values.shape and base.shape:
        values = broadcast(values, index.shape + base.shape[1:])
    return trace.add(name, (base, index, values))


def pivot_threshold(
    x: Tensor, *, rank: Tensor | int | None = None, mass: Tensor | float | None = None, probability: Tensor | float | None = None,
    order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bool keep-mask of x f32 [n] or [m, n] by exactly one of: `rank` (fewer than rank elements of the row are strictly greater; ties may
    keep more), `mass` (x are probabilities: walked descending, kept while those before sum to less than mass), `probability` (x >= it).
    With `mass`, `order` (of x's shape) walks the probabilities in descending order of its own elements instead."""
    _only(x, "pivot_threshold")
    given = [(name, value) for name, value in (("pivot_rank", rank), ("pivot_mass", mass), ("ge", probability)) if value is not None]
    if len(given) != 1:
        raise TraceError("pivot_threshold takes exactly one of rank=, mass= and probability=")
    name, value = given[0]
    if order is not None and name != "pivot_mass":
        raise TraceError("pivot_threshold takes order= with mass= only: what to walk while the mass lasts")
    if name == "pivot_mass":
        return x.trace.op(name, x if order is None else _only(order, "pivot_threshold"), x, value)
    if name == "pivot_rank" and isinstance(value, Tensor) and (value.shape or value.dtype not in INTEGER):
        raise TraceError(f"pivot_threshold takes rank= as an int or a scalar Tensor of i32 or u32, got {show(value.type)}")
    if name == "pivot_rank" and isinstance(value, Tensor) and value.dtype == "i32":
        value = maximum(value, 0).cast("u32")
    return x.trace.op(name, x, value)


def _tensor(x: Tensor | Scalar, what: str) -> Tensor:
    return x if isinstance(x, Tensor) else active_trace(what).constant(x, _natural(x))


def _only(x: object, what: str) -> Tensor:
    if not isinstance(x, Tensor):
        advice = operand_advice(x) or "; constant(x, dtype) makes a scalar one"
        raise TraceError(f"{what} takes a Tensor, got {type(x).__name__}{advice}")
    return x


def _natural(x: Scalar) -> str:
    return "bool" if isinstance(x, bool) else "i32" if isinstance(x, int) else "f32"


_SECOND: Attrs = {"i": 1}
maximum = TABLE_FUNCTIONS["maximum"]
OTHER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        broadcast, cast, constant, iota, pivot_threshold, reshape, rng_gumbel, rng_normal, rng_uniform, scatter_add, scatter_set, sort_desc,
        top_k,
    )
}  # fmt: skip
