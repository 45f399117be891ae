"""Shape and dtype rules of the op table: each maps operand types, attributes and the declared result to the result type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pie_core.eta.dtypes import DTYPES, INTEGER, NUMERIC

Shape = tuple[int, ...]
Type = tuple[str, Shape]
Attr = int | str
Attrs = Mapping[str, Attr]
Rule = Callable[[Sequence[Type], Attrs, Type | None], Type]

MAX_RANK = 4
MAX_ELEMENTS = 1 << 22  # elements of one value


class RuleError(Exception):
    """What a rule found wrong; the caller adds the op's name and raises its own error."""


def show(type_: Type) -> str:
    """A type as authors read it: `f32[49152]`, `u32[]`."""
    return f"{type_[0]}[{', '.join(map(str, type_[1]))}]"


def elements(shape: Shape) -> int:
    """Number of elements of a shape; 1 for a scalar."""
    n = 1
    for extent in shape:
        n *= extent
    return n


def _declared(declared: Type | None) -> Type:
    if declared is None:
        raise RuleError("needs its result dtype and shape")
    return declared


def _join(a: Shape, b: Shape) -> Shape:
    if a == b or not b:
        return a
    if not a:
        return b
    raise RuleError(f"operand shapes {list(a)} and {list(b)} differ; they must be equal or one of them a scalar: broadcast(x, shape) first")


def floating(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """One f32 operand, same shape."""
    if args[0][0] != "f32":
        raise RuleError(f"takes f32, got {show(args[0])}; cast(x, 'f32') first")
    return args[0]


def numeric(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """One numeric operand, same type."""
    if args[0][0] not in NUMERIC:
        raise RuleError(f"takes a number, got {show(args[0])}; cast(x, 'i32') first")
    return args[0]


def boolean(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """One or two bool operands of equal shape (or one scalar)."""
    for arg in args:
        if arg[0] != "bool":
            raise RuleError(f"takes bool, got {show(arg)}; compare it first, for example x != 0")
    return "bool", args[0][1] if len(args) == 1 else _join(args[0][1], args[1][1])


def _same_dtype(a: Type, b: Type) -> None:
    if a[0] != b[0]:
        raise RuleError(f"operand dtypes differ: {show(a)} and {show(b)}; cast one of them")


def arithmetic(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """Two operands of one numeric dtype, equal shapes or one scalar."""
    a, b = args
    _same_dtype(a, b)
    if a[0] not in NUMERIC:
        raise RuleError(f"takes numbers, got {show(a)}; cast(x, 'i32') first")
    return a[0], _join(a[1], b[1])


def compare(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """Like `arithmetic`; the result is bool."""
    return "bool", arithmetic(args, attrs, declared)[1]


def select(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """cond bool, a and b of one dtype; equal shapes or scalars."""
    cond, a, b = args
    if cond[0] != "bool":
        raise RuleError(f"takes a bool condition, got {show(cond)}")
    _same_dtype(a, b)
    return a[0], _join(_join(cond[1], a[1]), b[1])


def cast(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """Any operand to the declared dtype, same shape."""
    dtype, shape = _declared(declared)
    if dtype not in DTYPES:
        raise RuleError(f"knows the dtypes {', '.join(DTYPES)}, not {dtype!r}")
    if shape != args[0][1]:
        raise RuleError(f"keeps the shape {list(args[0][1])}, declared {list(shape)}")
    return dtype, shape


def broadcast(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """To the declared shape: the operand's extents, left-aligned with it, are 1 or equal; missing ones are 1."""
    source, shape = args[0][1], _declared(declared)[1]
    if len(source) > len(shape) or any(have not in (1, want) for have, want in zip(source, shape, strict=False)):
        raise RuleError(
            f"repeats {show(args[0])} over {list(shape)}: extents are compared from the left, and each is 1 or equal; "
            "reshape(x, shape) puts extents of 1 where others are missing"
        )
    return args[0][0], shape


def reshape(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared shape with as many elements."""
    shape = _declared(declared)[1]
    if elements(shape) != elements(args[0][1]):
        raise RuleError(f"keeps the number of elements: {show(args[0])} has {elements(args[0][1])}, {list(shape)} has {elements(shape)}")
    return args[0][0], shape


def transpose(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A matrix [m, n] to [n, m], any dtype."""
    return args[0][0], _matrix(args[0])[::-1]


def reduce_same(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A number of rank 1 to 4 without its last axis."""
    return numeric(args, attrs, declared)[0], _rows(args[0])


def reduce_index(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A number of rank 1 to 4 to i32 indices along its last axis."""
    numeric(args, attrs, declared)
    return "i32", _rows(args[0])


def _rows(arg: Type) -> Shape:
    if not arg[1]:
        raise RuleError(f"works along the last axis, got the scalar {show(arg)}")
    return arg[1][:-1]


def _matrix(arg: Type) -> Shape:
    if len(arg[1]) != 2:
        raise RuleError(f"takes a matrix (rank 2), got {show(arg)}")
    return arg[1]


def _vector_or_matrix(arg: Type) -> Shape:
    if len(arg[1]) not in (1, 2):
        raise RuleError(f"takes a vector or a matrix (rank 1 or 2), got {show(arg)}")
    return arg[1]


def _index(arg: Type, what: str = "indices") -> Shape:
    if arg[0] not in INTEGER:
        raise RuleError(f"takes {what} of i32 or u32, got {show(arg)}; cast(x, 'i32') first")
    return arg[1]


def _bounded(dtype: str, shape: Shape) -> Type:
    if len(shape) > MAX_RANK or elements(shape) > MAX_ELEMENTS:
        raise RuleError(f"would make {show((dtype, shape))}; a value has at most rank {MAX_RANK} and {MAX_ELEMENTS} elements")
    return dtype, shape


def gather(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A table [n, ...] of any dtype and indices of any shape to indices.shape + table.shape[1:]."""
    table, index = args
    if not table[1]:
        raise RuleError(f"takes a table of rank 1 or more, got the scalar {show(table)}")
    return _bounded(table[0], _index(index) + table[1][1:])


def gather_row(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """x [m, n] of any dtype and an index a row, [m], to [m]."""
    x, index = args
    rows = _matrix(x)[0]
    if _index(index) != (rows,):
        raise RuleError(f"takes one index a row: x is {show(x)}, the indices are {show(index)}, not [{rows}]")
    return x[0], (rows,)


def mask_apply(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """x f32 [n] or [m, n] and a mask of bits, u32 [ceil(n / 32)], to x's type."""
    x, packed = args
    width = _vector_or_matrix(floating([x], attrs, declared))[-1]
    words = -(-width // 32)
    if packed != ("u32", (words,)):
        raise RuleError(f"takes a mask of {width} bits, u32[{words}], got {show(packed)}")
    return x


def pivot_rank(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """x f32 [n] or [m, n] and k, a u32 scalar, to a bool mask of x's shape."""
    return _pivot(args, "u32")


def pivot_mass(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """An order and probabilities, both f32 [n] or [m, n] of one shape, and p, an f32 scalar, to a bool mask of their shape."""
    order, x, p = args
    if x != order:
        raise RuleError(f"takes an order and probabilities of one shape, got {show(order)} and {show(x)}")
    return _pivot((order, p), "f32")


def _pivot(args: Sequence[Type], dtype: str) -> Type:
    x, threshold = args
    shape = _vector_or_matrix(floating([x], {}, None))
    if threshold != (dtype, ()):
        raise RuleError(f"takes a threshold {dtype}[], got {show(threshold)}")
    return "bool", shape


def cumulative(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A number of rank 1 to 4, same type."""
    _rows(args[0])
    return numeric(args, attrs, declared)


def sort(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A number of rank 1 or 2, same type."""
    _vector_or_matrix(args[0])
    return numeric(args, attrs, declared)


def top_k(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A number of rank 1 or 2; the last axis becomes attribute k, 1 to its length."""
    dtype, shape = sort(args, attrs, declared)
    k = attrs["k"]
    if type(k) is not int or not 1 <= k <= shape[-1]:
        raise RuleError(f"takes k from 1 to {shape[-1]}, the length of the last axis of {show(args[0])}; got {k!r:.20}")
    return dtype, (*shape[:-1], k)


def matmul(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """f32 [m, k] and f32 [k, n] to f32 [m, n]."""
    a, b = args
    for arg in args:
        _matrix(floating([arg], attrs, declared))
    if a[1][1] != b[1][0]:
        raise RuleError(f"takes [m, k] and [k, n], got {show(a)} and {show(b)}")
    return _bounded("f32", (a[1][0], b[1][1]))


def scatter_add(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A numeric base [n, ...], indices [m] and values [m, ...] of base's dtype to base's type."""
    numeric([args[0]], attrs, declared)
    return scatter_set(args, attrs, declared)


def scatter_set(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A base [n, ...] of any dtype, indices [m] and values [m, ...] of base's dtype to base's type."""
    base, index, values = args
    if not base[1]:
        raise RuleError(f"takes a base of rank 1 or more, got the scalar {show(base)}")
    if len(_index(index)) != 1:
        raise RuleError(f"takes a vector of indices, got {show(index)}")
    if values != (base[0], index[1] + base[1][1:]):
        want = show((base[0], index[1] + base[1][1:]))
        raise RuleError(f"of {show(base)} at {show(index)} takes the values {want}, got {show(values)}")
    return base


def pick(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The indices beside the values of sort_desc or top_k: u32 of their shape."""
    if attrs["i"] != 1:
        raise RuleError(f"takes i = 1, got {attrs['i']!r:.20}; result 0 is the op itself")
    return "u32", args[0][1]


def iota(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """u32 [n]."""
    shape = _declared(declared)[1]
    if len(shape) != 1:
        raise RuleError(f"makes a vector, got the shape {list(shape)}")
    return "u32", shape


def random(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A u32[2] state to f32 of the declared shape."""
    if args[0] != ("u32", (2,)):
        raise RuleError(f"takes a state u32[2] = [key, counter], got {show(args[0])}; use Channel.counter(seed).take()")
    return "f32", _declared(declared)[1]


def source(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared type, any dtype."""
    return _declared(declared)


def f32_vector(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared type, which must be f32 [n]."""
    type_ = _declared(declared)
    if type_[0] != "f32" or len(type_[1]) != 1:
        raise RuleError(f"is a vector of f32, declared {show(type_)}")
    return type_


def f32_rows(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared type, which must be f32 [rows, n]."""
    type_ = _declared(declared)
    if type_[0] != "f32" or len(type_[1]) != 2:
        raise RuleError(f"is a matrix of f32, declared {show(type_)}")
    return _bounded(*type_)


def scalar(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared type, which must be a scalar."""
    type_ = _declared(declared)
    if type_[1]:
        raise RuleError(f"is a scalar, declared {show(type_)}")
    return type_


def same(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The operand's type."""
    return args[0]


__all__ = ["INTEGER", "MAX_ELEMENTS", "MAX_RANK", "Attr", "Attrs", "Rule", "RuleError", "Shape", "Type", "elements", "show"]
