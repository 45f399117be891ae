"""`Tensor`: a symbolic value of a trace, with Python's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pie_core.eta.advice import attribute_advice
from pie_core.eta.dtypes import DTYPES
from pie_core.eta.errors import TraceError
from pie_core.eta.rules import Shape, Type, show

if TYPE_CHECKING:
    from pie_core.eta.trace import Trace

Scalar = int | float | bool


class Tensor:
    """Value `id` of `trace`: `dtype` f32, i32, u32 or bool, static `shape`. Made by intrinsics, channels and ops, never by hand."""

    __slots__ = ("dtype", "id", "shape", "trace")

    def __init__(self, trace: Trace, id: int, dtype: str, shape: Shape) -> None:
        self.trace = trace
        self.id = id
        self.dtype = dtype
        self.shape = shape

    @property
    def type(self) -> Type:
        """(dtype, shape)."""
        return self.dtype, self.shape

    def __repr__(self) -> str:
        return f"Tensor(%{self.id}: {show((self.dtype, self.shape))})"

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("add", self, other)

    def __radd__(self, other: Scalar) -> Tensor:
        return self.trace.op("add", other, self)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("sub", self, other)

    def __rsub__(self, other: Scalar) -> Tensor:
        return self.trace.op("sub", other, self)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("mul", self, other)

    def __rmul__(self, other: Scalar) -> Tensor:
        return self.trace.op("mul", other, self)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return self._true_divide(self, other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return self._true_divide(other, self)

    def _true_divide(self, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
        if self.dtype != "f32":
            raise TraceError(f"/ divides f32, got {show(self.type)}; use // for integers or cast(x, 'f32')")
        return self.trace.op("div", a, b)

    def __floordiv__(self, other: Tensor | Scalar) -> Tensor:
        return self._integer_divide(self, other)

    def __rfloordiv__(self, other: Scalar) -> Tensor:
        return self._integer_divide(other, self)

    def _integer_divide(self, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
        if self.dtype not in ("i32", "u32"):
            raise TraceError(f"// divides integers (truncating), got {show(self.type)}; use / for f32")
        return self.trace.op("div", a, b)

    def __mod__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("rem", self, other)

    def __rmod__(self, other: Scalar) -> Tensor:
        return self.trace.op("rem", other, self)

    def __neg__(self) -> Tensor:
        return self.trace.op("neg", self)

    def __abs__(self) -> Tensor:
        return self.trace.op("abs", self)

    def __gt__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("gt", self, other)

    def __ge__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("ge", self, other)

    def __lt__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("lt", self, other)

    def __le__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("le", self, other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return self.trace.op("eq", self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return self.trace.op("ne", self, other)

    __hash__ = object.__hash__

    def __and__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("and", self, other)

    def __rand__(self, other: Scalar) -> Tensor:
        return self.trace.op("and", other, self)

    def __or__(self, other: Tensor | Scalar) -> Tensor:
        return self.trace.op("or", self, other)

    def __ror__(self, other: Scalar) -> Tensor:
        return self.trace.op("or", other, self)

    def __xor__(self, other: Tensor | Scalar) -> Tensor:
        return self._exclusive(other)

    def __rxor__(self, other: Scalar) -> Tensor:
        return self._exclusive(other)

    def _exclusive(self, other: Tensor | Scalar) -> Tensor:
        if self.dtype != "bool":
            raise TraceError(f"^ takes bool, got {show(self.type)}")
        return self.trace.op("ne", self.cast("u32"), other.cast("u32") if isinstance(other, Tensor) else int(other))

    def __lshift__(self, other: object) -> NoReturn:
        raise TraceError("<< and >> are not there: x * 2 and x // 2 on u32 do what a shift by one does")

    __rlshift__ = __rshift__ = __rrshift__ = __lshift__

    def __divmod__(self, other: object) -> NoReturn:
        raise TraceError("divmod is not there: x // y and x % y on integers")

    __rdivmod__ = __divmod__

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.trace.op("matmul", self, other)

    def __pos__(self) -> Tensor:
        return self

    def __pow__(self, other: object) -> NoReturn:
        raise TraceError("** is not there: x * x squares, exp(y * log(x)) is x to the y for x > 0")

    __rpow__ = __pow__

    def __invert__(self) -> Tensor:
        return self.trace.op("not", self)

    def cast(self, dtype: str) -> Tensor:
        """This tensor as f32, i32, u32 or bool; f32 to integers truncates and saturates."""
        if not isinstance(dtype, str):
            raise TraceError(f"cast takes a dtype by name, {', '.join(map(repr, DTYPES))}, got {type(dtype).__name__}")
        return self.trace.add("cast", (self,), {}, (dtype, self.shape))

    def __bool__(self) -> NoReturn:
        raise TraceError(
            "a Tensor has no value while it is traced: use select(cond, a, b) instead of if, & | ~ instead of and, or, not, "
            "(0 < x) & (x < 1) instead of 0 < x < 1, maximum(a, b) and minimum(a, b) instead of max(a, b) and min(a, b); "
            "await the output of the pass to branch in the program"
        )

    def __int__(self) -> NoReturn:
        raise TraceError("a Tensor has no value while it is traced; cast(x, 'i32') converts, awaiting the output gives the number")

    __index__ = __int__

    def __float__(self) -> NoReturn:
        raise TraceError(
            "a Tensor has no value while it is traced; cast(x, 'f32') converts, exp(x), log(x) and so on of this language take Tensors "
            "where those of math take numbers, awaiting the output gives the number"
        )

    def __round__(self, digits: object = None) -> NoReturn:
        raise TraceError("a Tensor is not rounded by Python: x.cast('i32') cuts off towards 0, (x + 0.5).cast('i32') rounds what is over 0")

    __floor__ = __ceil__ = __trunc__ = __round__

    def __format__(self, spec: str) -> NoReturn:
        raise TraceError(
            "a Tensor has no value while it is traced, so there is nothing to format: await the output and format that; "
            "{x!r} shows dtype and shape"
        )

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TraceError(
            "NumPy computes with values, and a Tensor has none while it is traced: use the functions of this language, "
            "and x.item() for a number that NumPy made"
        )

    __array_ufunc__ = __array__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Tensor has no attribute {name!r}{attribute_advice(name)}", name=name, obj=self)

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError("a scalar Tensor has no length")
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TraceError(
            f"a Tensor cannot be looped over: ops work on all of {show(self.type)} at once, reduce_max(x), reduce_min(x) and "
            "reduce_sum(x) stand for max(x), min(x) and sum(x); x[i] takes one row"
        )

    def __contains__(self, item: object) -> NoReturn:
        raise TraceError("`in` needs a value now, and a Tensor has none while it is traced: reduce_max((x == item).cast('i32')) tells")

    def __getitem__(self, key: Tensor | int | slice) -> Tensor:
        """Along the first axis: x[i] a row (an element of a vector), x[a:b] rows a to b - 1, x[indices] = gather(x, indices)."""
        if isinstance(key, Tensor):
            if key.dtype == "bool":
                raise TraceError("x[mask] would have an unknown length: use select(mask, x, other), or top_k of what the mask keeps")
            return self.trace.op("gather", self, key)
        if not self.shape:
            raise TraceError(f"a scalar cannot be indexed: {show(self.type)}")
        n = self.shape[0]
        if isinstance(key, slice):
            start, stop, step = key.indices(n) if _static(key) else (0, 0, 0)
            if step != 1 or stop <= start:
                raise TraceError(
                    f"x[a:b] takes Python ints and keeps one row or more, got [{key.start!r}:{key.stop!r}:{key.step!r}] of {n} rows"
                )
            index = self.trace.add("iota", (), {}, ("u32", (stop - start,)))
            return self.trace.op("gather", self, index + start if start else index)
        if type(key) is not int:
            raise TraceError(
                f"a Tensor is indexed along its first axis, by an int, a slice or a Tensor of indices, got {type(key).__name__}"
            )
        if not -n <= key < n:
            raise TraceError(f"index {key} is out of range for {show(self.type)}, which has {n} rows")
        return self.trace.op("gather", self, key % n)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TraceError(
            "a Tensor never changes: x = scatter_set(x, index, values) gives one with rows replaced, "
            "x = select(iota(n) == i, value, x) a vector with element i replaced"
        )

    __delitem__ = __setitem__


def _static(key: slice) -> bool:
    return all(part is None or type(part) is int for part in (key.start, key.stop, key.step))
