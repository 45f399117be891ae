"""The four dtypes of tensor programs and their 32-bit words."""

from __future__ import annotations

import math
import struct

from pie_core.eta.errors import TraceError

DTYPES = ("f32", "i32", "u32", "bool")
NUMERIC = ("f32", "i32", "u32")
INTEGER = ("i32", "u32")
F32_MAX = 3.4028234663852886e38

_F32 = struct.Struct("<f")
_U32 = struct.Struct("<I")


def f32_bits(value: float) -> int:
    """The 32-bit word of `value` rounded to f32 (nearest even); a NaN becomes the quiet NaN, too large becomes infinity."""
    if math.isnan(value):
        return 0x7FC00000
    try:
        return int(_U32.unpack(_F32.pack(value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def bits_f32(word: int) -> float:
    """The f32 value of a 32-bit word."""
    return float(_F32.unpack(_U32.pack(word & 0xFFFFFFFF))[0])


def is_finite_bits(word: int) -> bool:
    """Whether a 32-bit word read as f32 is neither infinite nor NaN."""
    return (word & 0x7F800000) != 0x7F800000


def to_word(value: object, dtype: str) -> int:
    """The 32-bit word of a Python scalar as `dtype`. Raises TraceError when the value cannot be that dtype exactly in kind or range."""
    if dtype == "f32":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            word = f32_bits(math.inf if isinstance(value, int) and abs(value) >= 1 << 128 else value)
            if not is_finite_bits(word) and (isinstance(value, int) or math.isfinite(value)):
                raise TraceError(f"constant {value!r:.40} does not fit f32, whose largest number is 3.4028235e38; float('inf') is infinity")
            return word
    elif dtype == "bool":
        if isinstance(value, bool):
            return int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        low, high = (0, 0xFFFFFFFF) if dtype == "u32" else (-0x80000000, 0x7FFFFFFF)
        if not low <= value <= high:
            raise TraceError(f"constant {value} does not fit {dtype} ({low} to {high})")
        return value & 0xFFFFFFFF
    kind = type(value).__name__
    advice = " (use cast(x, 'f32') for fractions)" if isinstance(value, float) else ""
    raise TraceError(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} constant cannot be combined with a {dtype} tensor{advice}")


def from_word(word: int, dtype: str) -> int | float | bool:
    """The Python scalar of a 32-bit word."""
    if dtype == "f32":
        return bits_f32(word)
    if dtype == "bool":
        return word != 0
    if dtype == "i32":
        return word - 0x100000000 if word & 0x80000000 else word
    return word
