"""Values between the author and the wire: nested lists of numbers, 32-bit words, base64 cells."""

from __future__ import annotations

import base64
import math
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from pie_core.eta import Tensor
from pie_core.eta.json_text import MAX_NESTING as _HOST_NESTING

from ._call import Call
from .errors import UsageError

DTYPES = ("f32", "i32", "u32", "bool")
_ARRAY = {"f32": "f", "i32": "i", "u32": "I", "bool": "I"}
_INT = {int}
_MAX_RANK = 4
_VALUES = "a number, a bool, or lists of them (list(…) makes one of a generator, a set or bytes)"
MAX_NESTING = _HOST_NESTING - 1  # levels of a value sent or returned: what carries it is one more
_MAX_BITS = 14_283  # of an integer in JSON: Python reads and writes at most 4,300 digits
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_RANGE = {"i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1)}


def decode(value: Any) -> Any:
    """A wire value as plain Python: numbers and bools as they are, {"b64", "dtype", "shape"} as nested lists."""
    if type(value) is not dict or "b64" not in value:
        return value
    flat = array(_ARRAY[value["dtype"]])
    flat.frombytes(base64.b64decode(value["b64"]))
    items: list[Any] = [x != 0 for x in flat] if value["dtype"] == "bool" else flat.tolist()
    shape = value["shape"]
    if not shape:
        return items[0]
    for extent in reversed(shape[1:]):
        items = [items[k : k + extent] for k in range(0, len(items), extent)]
    return items


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a sequence of values: list, tuple, range, array, deque; not text or bytes, whose parts are characters."""
    return isinstance(value, (list, tuple)) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)))


def shape_of(field: str, values: Any, depth: int = 0) -> tuple[int, ...]:
    """The shape of nested sequences of numbers; raises UsageError where they are ragged, empty or too deep, or are no numbers."""
    if isinstance(values, (int, float)):
        return ()
    if not is_list(values):
        raise UsageError(f"{field} {'has' if depth else 'is'} {_short(values)}; use {_VALUES}")
    if depth == _MAX_RANK:
        raise UsageError(f"{field} is nested more than {_MAX_RANK} levels deep; a cell has at most {_MAX_RANK} extents")
    if not len(values):
        raise UsageError(f"{field} has an empty list; every extent must be at least 1")
    shapes = {shape_of(field, v, depth + 1) for v in values}
    if len(shapes) > 1:
        raise UsageError(f"{field} is ragged: rows of shapes {sorted(shapes)}; make all rows equally long")
    return (len(values), *shapes.pop())


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, (int, float)):
        yield values
    else:
        for v in values:
            yield from _leaves(v)


def infer_dtype(field: str, values: Any) -> str:
    """bool, i32 (u32 where a value needs it) or f32 (a mix of int and float, too), of values that have a shape. Token ids are i32
    everywhere in eta."""
    leaves = list(_leaves(values))
    kinds = {next(base for base in (bool, int, float) if issubclass(kind, base)) for kind in set(map(type, leaves))}
    if kinds == {bool}:
        return "bool"
    if bool in kinds:
        raise UsageError(f"{field} mixes bools and numbers; use one kind, int(flag) for example")
    if kinds != _INT:
        return "f32"
    low, high = min(leaves), max(leaves)
    if low < -(2**31) or high > 2**32 - 1 or (low < 0 and high > 2**31 - 1):
        raise UsageError(f"{field} has integers from {_short(low)} to {_short(high)}; an i32 ends at +-2^31, a u32 is from 0 to 2^32 - 1")
    return "u32" if high > 2**31 - 1 else "i32"


def to_words(field: str, values: Any, dtype: str, shape: Sequence[int]) -> list[int]:
    """Flat 32-bit words of nested lists of numbers that must have exactly `shape`."""
    got = shape_of(field, values)
    if got != tuple(shape):
        raise UsageError(f"{field} has shape {list(got)}, the channel's cells have shape {list(shape)}")
    words = []
    for v in _leaves(values):
        if dtype == "bool":
            if not isinstance(v, bool):
                raise UsageError(f"{field} has {_short(v)}; a bool cell takes True or False")
            words.append(int(v))
        elif dtype == "f32":
            if isinstance(v, bool):
                raise UsageError(f"{field} has {_short(v)}; an f32 cell takes numbers")
            words.append(_f32_word(field, v))
        else:
            low, high = _RANGE[dtype]
            if isinstance(v, bool) or not isinstance(v, int) or not low <= v <= high:
                raise UsageError(f"{field} has {_short(v)}; an {dtype} cell takes integers from {low} to {high}")
            words.append(int(v) & 0xFFFFFFFF)
    return words


def _f32_word(field: str, v: float) -> int:
    try:
        return int.from_bytes(struct.pack("<f", v), "little")
    except (OverflowError, struct.error):  # the latter of an int that no double holds
        raise UsageError(f"{field} has {_short(v)}; the largest f32 is 3.4028235e38 (use math.inf for infinity)") from None


def check_int(field: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int within [low, high]; UsageError naming the field, the value and the range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{field} is {_short(value)}; use an integer")
    if value < low or (high is not None and value > high):
        raise UsageError(f"{field} is {_short(value)}; use an integer {f'>= {low}' if high is None else f'from {low} to {high}'}")
    return int(value)  # of an IntEnum, whose repr is no number


def check_tokens(field: str, tokens: Any) -> list[int]:
    """A list of token ids (ints >= 0); the vocabulary is checked by the host."""
    if not is_list(tokens):
        raise UsageError(f"{field} is {_short(tokens)}; use a list of token ids, for example model.encode(text)")
    ids = list(tokens)
    if not ids or (set(map(type, ids)) == _INT and min(ids) >= 0):
        return ids
    for k, t in enumerate(ids):
        if type(t) is not int or t < 0:
            raise UsageError(f"{field}[{k}] is {_short(t)}; token ids are integers >= 0")
    return ids


def _hint(value: Any) -> str:
    """What to do first with something that is not a value yet."""
    if hasattr(type(value), "__await__"):
        return " (await it first)"
    return " (return it from the epilogue, and await what epilogue() gave)" if isinstance(value, Tensor) else ""


def type_name(value: Any) -> str:
    """The name of its type, and of a call what was called."""
    return f"{value.told.name}()" if isinstance(value, Call) else type(value).__name__


def _short(value: Any) -> str:
    """`value` in an error message: short, without addresses, and with what to do first where it is not a value yet."""
    if hasattr(type(value), "__await__"):
        return f"an un-awaited {type_name(value)}{_hint(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge integer"
    try:
        text = _ADDRESS.sub("", repr(value))
    except Exception:  # the author's own __repr__ may raise, and nesting exhaust the stack
        text = f"a {type(value).__name__}"
    return (text if len(text) <= 60 else text[:57] + "...") + _hint(value)


def nested_over(value: Any, most: int) -> bool:
    """Whether lists and dicts lie within one another more than `most` deep. A walk by levels: depth costs no stack, sharing no time."""
    level = [value] if isinstance(value, (dict, list, tuple)) else []
    for _ in range(most):
        if not level:
            return False
        inner = (v for x in level for v in (x.values() if isinstance(x, dict) else x))
        level = list({id(v): v for v in inner if isinstance(v, (dict, list, tuple))}.values())
    return bool(level)


def _surrogate(text: str, path: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{path} holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), which is no Unicode text"
    return None


def json_fault(value: Any, path: str) -> str | None:
    """Where and why `value` is not JSON, in words; None when it is."""
    if isinstance(value, str):
        return _surrogate(value, path)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"{path} is an integer of more than 4,300 digits"
    if value is None or isinstance(value, int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{path} is {value!r}, which JSON cannot hold"
    if isinstance(value, (list, tuple)):
        return next((f for k, v in enumerate(value) if (f := json_fault(v, f"{path}[{k}]"))), None)
    if isinstance(value, dict):
        for k, v in value.items():
            if k is not None and not isinstance(k, (str, bool, int, float)):
                return f"{path} has the key {_short(k)} of type {type(k).__name__}; JSON keys are strings"
            if fault := json_fault(k, f"a key of {path}"):
                return fault
            if fault := json_fault(v, f"{path}[{k!r}]"):
                return fault
        return None
    return f"{path} is of type {type_name(value)}{_hint(value)}"
