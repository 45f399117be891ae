"""Values of pass outputs and channel cells: Python scalars, or `Cell` for anything with a shape."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pie_core.engine.errors import ChannelError, InvalidState

DTYPES = ("f32", "i32", "u32", "bool")


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor's value: `data` holds one little-endian u32 word an element (bool as 0 or 1)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tolist(self) -> list[int | float | bool]:
        """The elements in row-major order, flat."""
        words = memoryview(self.data).cast("I")
        convert = _SCALARS[self.dtype]
        return [convert(w) for w in words]


Value = int | float | bool | Cell


def _f32(word: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return value


_SCALARS: dict[str, Callable[[int], int | float | bool]] = {
    "f32": _f32,
    "i32": lambda w: w - (1 << 32) if w >> 31 else w,
    "u32": int,
    "bool": bool,
}


def decode(dtype: str, shape: tuple[int, ...], words: memoryview) -> Value:
    """The value in `words` (u32, one an element): a Python scalar for shape (), else a Cell with its own copy."""
    if not shape:
        return _SCALARS[dtype](words[0])
    return Cell(dtype, shape, words.tobytes())


def committed(value: Value | None) -> int | list[int]:
    """What a value of the device says to commit: a count, or a path of indices that ends before the first negative one. Raises
    InvalidState."""
    if type(value) is int:
        return value
    if isinstance(value, Cell) and len(value.shape) == 1 and value.dtype in ("i32", "u32"):
        path = memoryview(value.data).cast("i").tolist()  # a u32 of 2^31 and more ends it too
        return path[: next((k for k, at in enumerate(path) if at < 0), len(path))]
    got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Cell) else repr(value)
    raise InvalidState(f"commit: the value {got:.60} says neither how many tokens nor which: use a whole number, or a vector of i32 or u32")


def pack_words(words: Iterable[int], count: int, what: str) -> bytes:
    """`count` u32 words as little-endian bytes. Raises ChannelError when their number or a value is wrong."""
    values = list(words)
    if len(values) != count:
        raise ChannelError(f"{what} takes {count} words, got {len(values)}", expected=count, got=len(values))
    try:
        return struct.pack(f"<{count}I", *values)
    except struct.error as error:
        raise ChannelError(f"{what} takes words in 0 .. 2^32-1: {error}") from None


def elements(shape: Sequence[int]) -> int:
    """Elements of a tensor of `shape`."""
    return prod(shape)
