"""Constants that leave nothing of a tensor but zeros, NaN or infinities: refused at the author's line, since no device would tell."""

from __future__ import annotations

import math

from pie_core.eta.dtypes import bits_f32

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "rem"})
SMALLEST_NORMAL = 2.0**-126  # devices may take what is smaller as 0


def constant_fault(op: str, position: int, dtype: str, word: int) -> str:
    """What is wrong with the constant `word` as operand `position` of the arithmetic op `op`; "" where nothing is."""
    if dtype != "f32":
        zero = position == 1 and op in ("div", "rem") and word == 0
        return "a division of integers by 0 gives nothing but 0; divide by another number" if zero else ""
    value = bits_f32(word)
    if math.isnan(value):
        return "a constant is NaN, which makes every element NaN; the largest of a row of NaN is taken to be element 0"
    if position == 1 and op in ("div", "rem") and abs(value) < SMALLEST_NORMAL:
        small = "0" if value == 0 else f"{value:.2g}, which devices may take as 0,"
        return f"a division by {small} gives infinities or NaN; for a temperature of 0 take reduce_argmax(logits)"
    return ""
