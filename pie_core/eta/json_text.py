"""JSON text of a guest: as `json.loads`, but strict, and with a cap on nesting that holds on every host."""

from __future__ import annotations

import json
import math
import re
from array import array
from itertools import accumulate
from typing import Any

MAX_NESTING = 200
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OTHERS = re.compile(r"[^\[\]{}]+")
_DEPTH = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str, *, unique: bool = False) -> Any:
    """The value. `unique` refuses an object that names a key twice. Raises ValueError for broken text; for NaN, infinities and numbers too
    large, which are no JSON; for lone surrogates, which no UTF-8 can carry on; and over MAX_NESTING: in a browser deep recursion is no
    exception but the end of the interpreter, and with it of every other inferlet."""
    if text.count("[") + text.count("{") > MAX_NESTING and _too_deep(text):
        raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")
    value = (_decode_unique if unique else _decode)(text)
    if "\\u" in text and _SURROGATE.search(text):
        _check_text(value)
    return value


def _too_deep(text: str) -> bool:
    brackets = _OTHERS.sub("", _STRINGS.sub("", text)).encode("ascii")
    return max(accumulate(array("b", brackets.translate(_DEPTH))), default=0) > MAX_NESTING


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds a lone surrogate (U+{ord(error.object[error.start]):04X})") from None


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds {digits[:40]}, which is too large for a number")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant).decode
_decode_unique = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_unique).decode
