"""Stands in for Hypothesis's compiled module inside Pyodide, where its wheel does not exist: bits of floats, in plain Python."""

from __future__ import annotations

import math
import struct
import sys
from types import ModuleType
from typing import Literal

Width = Literal[16, 32, 64]
FORMATS = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}
SMALLEST = {16: 2.0**-14, 32: 2.0**-126, 64: 2.0**-1022}


def width_smallest_normals(width: Width) -> float:
    """The smallest normal float."""
    return SMALLEST[width]


def float_of(x: float, width: Width) -> float:
    """`x` rounded to a float of `width` bits."""
    code = FORMATS[width][0]
    return float(struct.unpack(f"!{code}", struct.pack(f"!{code}", float(x)))[0])


def float_to_int(value: float, width: Width = 64) -> int:
    """The bits of `value`."""
    code, word = FORMATS[width]
    return int(struct.unpack(f"!{word}", struct.pack(f"!{code}", value))[0])


def int_to_float(value: int, width: Width = 64) -> float:
    """The float of these bits."""
    code, word = FORMATS[width]
    return float(struct.unpack(f"!{code}", struct.pack(f"!{word}", value))[0])


def is_negative(x: float) -> bool:
    """Whether the sign bit is set."""
    return math.copysign(1.0, x) < 0


def count_between_floats(x: float, y: float, width: Width = 64) -> int:
    """How many floats lie in [x, y]."""
    if is_negative(x):
        if is_negative(y):
            return float_to_int(x, width) - float_to_int(y, width) + 1
        return count_between_floats(x, -0.0, width) + count_between_floats(0.0, y, width)
    return float_to_int(y, width) - float_to_int(x, width) + 1


def next_up(value: float, width: Width = 64) -> float:
    """The next larger float."""
    if math.isnan(value) or (math.isinf(value) and value > 0):
        return value
    if value == 0.0 and is_negative(value):
        return 0.0
    bits = float_to_int(value, width)
    return int_to_float(bits - 1 if is_negative(value) else bits + 1, width)


def next_down(value: float, width: Width = 64) -> float:
    """The next smaller float."""
    return -next_up(-value, width)


def next_up_normal(value: float, width: Width, *, allow_subnormal: bool) -> float:
    """The same, past subnormal numbers unless they are allowed."""
    found = next_up(value, width)
    if not allow_subnormal and 0 < abs(found) < SMALLEST[width]:
        return -0.0 if found < 0 else SMALLEST[width]
    return found


def next_down_normal(value: float, width: Width, *, allow_subnormal: bool) -> float:
    """The same downwards."""
    return -next_up_normal(-value, width, allow_subnormal=allow_subnormal)


def cathetus(h: float, a: float) -> float:
    """The third side of a right triangle with hypotenuse `h`."""
    return math.sqrt((h - a) * (h + a)) if abs(h) >= abs(a) else math.nan


def install(version: str) -> None:
    """Put this module where `hypothesis` imports its own."""
    here = sys.modules[__name__]
    root, internal = ModuleType("hypothesis._native"), ModuleType("hypothesis._native.internal")
    triangle = ModuleType("hypothesis._native.internal.cathetus")
    root.__version__ = version  # type: ignore[attr-defined]
    triangle.cathetus = cathetus  # type: ignore[attr-defined]
    names = {"": root, ".internal": internal, ".internal.floats": here, ".internal.cathetus": triangle}
    sys.modules.update({f"hypothesis._native{name}": module for name, module in names.items()})
