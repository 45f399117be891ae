"""`Tensor`: a symbolic value of a trace, with Python's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

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

    def __invert__(self) -> Tensor:
        return self.trace.op("not", self)

    def cast(self, dtype: str) -> Tensor:
        """This tensor as f32, i32, u32 or bool; f32 to integers truncates and saturates."""
        return self.trace.add("cast", (self,), {}, (dtype, self.shape))

    def __bool__(self) -> NoReturn:
        raise TraceError(
            "a Tensor has no value while it is traced: use select(cond, a, b) instead of if, and & | ~ instead of and, or, not; "
            "await the output of the pass to branch in the program"
        )

    def __int__(self) -> NoReturn:
        raise TraceError("a Tensor has no value while it is traced; cast(x, 'i32') converts, awaiting the output gives the number")

    __index__ = __int__

    def __float__(self) -> NoReturn:
        raise TraceError("a Tensor has no value while it is traced; cast(x, 'f32') converts, awaiting the output gives the number")

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError("a scalar Tensor has no length")
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TraceError(f"a Tensor cannot be looped over: ops work on all of {show(self.type)} at once")

    def __getitem__(self, key: object) -> NoReturn:
        raise TraceError(f"a Tensor cannot be indexed: {show(self.type)}; select and the reductions work on whole vectors")
