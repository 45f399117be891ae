"""The author's functions, one a row of the op table (`exp`, `maximum`, `reduce_argmax`, …) and the few that need more than operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie_core.eta.dtypes import DTYPES
from pie_core.eta.errors import TraceError
from pie_core.eta.ops import OPS, Op
from pie_core.eta.program import MAX_ELEMENTS
from pie_core.eta.rules import MAX_RANK, Shape, elements
from pie_core.eta.tensor import Scalar, Tensor
from pie_core.eta.trace import NO_ATTRS, active_trace


def _function(row: Op) -> Callable[..., Tensor]:
    name, label, arity = row.name, row.py, row.arity

    def function(*operands: Tensor | Scalar) -> Tensor:
        if len(operands) != arity:
            raise TraceError(f"{label} takes {arity} operand{'s' if arity > 1 else ''}, got {len(operands)}")
        return active_trace(label).op(name, *operands)

    function.__name__ = function.__qualname__ = label
    function.__doc__ = row.doc
    return function


TABLE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {row.py: _function(row) for row in OPS.values() if row.py}
globals().update(TABLE_FUNCTIONS)  # importable by name, for authors


def _shape(shape: int | Sequence[int], what: str) -> Shape:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(dims) > MAX_RANK or any(type(d) is not int or d < 1 for d in dims) or elements(dims) > MAX_ELEMENTS:
        raise TraceError(f"{what}: a shape has at most {MAX_RANK} extents of 1 or more and {MAX_ELEMENTS} elements, got {shape!r}")
    return dims


def cast(x: Tensor, dtype: str) -> Tensor:
    """x as f32, i32, u32 or bool; f32 to integers truncates and saturates, NaN is 0; to bool is x != 0."""
    return x.cast(dtype)


def constant(value: Scalar, dtype: str) -> Tensor:
    """A scalar of a stated dtype."""
    if dtype not in DTYPES:
        raise TraceError(f"constant knows the dtypes {', '.join(DTYPES)}, not {dtype!r}")
    return active_trace("constant").constant(value, dtype)


def broadcast(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """A scalar repeated over a shape."""
    return x.trace.add("broadcast", (x,), NO_ATTRS, (x.dtype, _shape(shape, "broadcast")))


def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return x.trace.add("reshape", (x,), NO_ATTRS, (x.dtype, _shape(shape, "reshape")))


def iota(n: int) -> Tensor:
    """0, 1, … n - 1 as u32 [n]."""
    return active_trace("iota").add("iota", (), NO_ATTRS, ("u32", _shape(n, "iota")))


def rng_uniform(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Uniform f32 in (0, 1) of `shape`, from a state u32[2]; the same state gives the same numbers on every device."""
    return state.trace.add("rng_uniform", (state,), NO_ATTRS, ("f32", _shape(shape, "rng_uniform")))


def rng_gumbel(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Standard Gumbel noise of `shape` from a state u32[2]; always finite."""
    return state.trace.add("rng_gumbel", (state,), NO_ATTRS, ("f32", _shape(shape, "rng_gumbel")))


def rng_normal(state: Tensor, shape: int | Sequence[int] = ()) -> Tensor:
    """Standard normal noise of `shape` from a state u32[2]."""
    return state.trace.add("rng_normal", (state,), NO_ATTRS, ("f32", _shape(shape, "rng_normal")))
