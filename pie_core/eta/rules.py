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
    raise RuleError(f"operand shapes {list(a)} and {list(b)} differ; they must be equal or one of them a scalar")


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
    """A scalar to the declared shape."""
    if args[0][1]:
        raise RuleError(f"takes a scalar, got {show(args[0])}")
    return args[0][0], _declared(declared)[1]


def reshape(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared shape with as many elements."""
    shape = _declared(declared)[1]
    if elements(shape) != elements(args[0][1]):
        raise RuleError(f"keeps the number of elements: {show(args[0])} has {elements(args[0][1])}, {list(shape)} has {elements(shape)}")
    return args[0][0], shape


def reduce_same(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A numeric vector to its scalar."""
    return numeric(args, attrs, declared)[0], _vector(args[0])


def reduce_index(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """A numeric vector to an i32 index."""
    numeric(args, attrs, declared)
    return "i32", _vector(args[0])


def _vector(arg: Type) -> Shape:
    if len(arg[1]) != 1:
        raise RuleError(f"takes a vector (rank 1), got {show(arg)}")
    return ()


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


def scalar(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The declared type, which must be a scalar."""
    type_ = _declared(declared)
    if type_[1]:
        raise RuleError(f"is a scalar, declared {show(type_)}")
    return type_


def same(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """The operand's type."""
    return args[0]


__all__ = ["INTEGER", "MAX_RANK", "Attr", "Attrs", "Rule", "RuleError", "Shape", "Type", "elements", "show"]
