"""JSON text of a guest: as `json.loads`, but strict, and with caps on nesting and size that are checked before anything is built."""

from __future__ import annotations

import json
import re
from array import array
from itertools import accumulate
from typing import Any, Final

MAX_NESTING: Final = 200
_WINDOW: Final = 1 << 16  # characters looked at between two offers of the interpreter's lock to other threads
_LONG: Final = 1 << 20  # characters from which on the digits count, too
_DIGITS: Final = 24  # of a value, on average: turning decimal digits into a number takes quadratic time
_DEPTH: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_NO_DIGITS: Final = bytes(set(range(256)) - set(b"0123456789"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class TooLarge(ValueError):
    """A text holds more values than its reader takes, or longer numbers."""


def loads(text: str, *, unique: bool = False, values: int | None = None, lists: int | None = None) -> Any:
    """The value. `unique` refuses an object that names a key twice. `values` is the most that a text of someone unknown may hold, where
    lists, objects and keys count two and everything else one, and `lists` the most lists and objects. Raises TooLarge over them, before
    anything is built, since a megabyte of text can become a hundred of objects; ValueError for broken text; for NaN, infinities and
    numbers too large, which are no JSON; for lone surrogates, which no UTF-8 can carry on; and over MAX_NESTING: in a browser deep
    recursion is no exception but the end of the interpreter, and with it of every other inferlet."""
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_NESTING or (values is not None and len(text) > min(values, _LONG)):
        _measure(text, brackets, values, brackets if lists is None else lists)
    value = (_decode_unique if unique else _decode)(text)
    if "\\u" in text and _SURROGATE.search(text):
        _check_text(value)
    return value


def _measure(text: str, brackets: int, values: int | None, lists: int) -> None:
    """Raises for a text that nests too deeply or holds too much. Counts everything first; where that is too much, only what is outside
    of strings, window by window, up to the first fault. One pass: neither quotes, escapes nor an end that is missing make it slower."""
    if values is not None and brackets <= MAX_NESTING and len(text) <= _LONG and _marks(text) <= values:
        return
    at = depth = seen = listed = digits = 0
    inside = False  # a string
    while at < len(text):
        window = text[at : at + _WINDOW]
        at += _WINDOW
        if "\\" in window:
            if (len(window) - len(window.rstrip("\\"))) % 2:  # the last one escapes what follows
                window += text[at : at + 1]
                at += 1
            window = window.replace("\\\\", "").replace('\\"', "")
        parts = window.split('"')
        plain = "".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        ascii = plain.encode("ascii", "replace")
        levels = list(accumulate(array("b", ascii.translate(_DEPTH, _NO_BRACKETS)), initial=depth))
        if max(levels) > MAX_NESTING:
            raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")
        depth = levels[-1]
        if values is not None:
            seen += _marks(plain)
            digits += len(ascii.translate(None, _NO_DIGITS))
            listed += plain.count("[") + plain.count("{")
            if listed > lists:
                raise TooLarge(f"it holds more than {lists} lists and objects")
            if seen > values:
                raise TooLarge(f"it holds more than {values} values, where a list, an object and a key count two")
            if digits > _DIGITS * seen + _LONG:
                raise TooLarge(f"it holds numbers of more than {_DIGITS} digits on average")


def _marks(text: str) -> int:
    """What `values` counts, strings included."""
    return 2 * (text.count("[") + text.count("{") + text.count(":")) + text.count(",")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds a lone surrogate (U+{ord(error.object[error.start]):04X})") from None


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number:  # NaN where it is infinite
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
