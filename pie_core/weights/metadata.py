"""Typed access to a checkpoint's metadata; arrays stay undecoded in the file until they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pie_core.weights.errors import BadMetadata, MissingKey

# Metadata's getters are named after the types they return, so the class body needs other names for the types themselves.
Text = str
Integer = int
Real = float
Flag = bool
T = TypeVar("T")


@dataclass(frozen=True)
class StringArray:
    """`count` strings in `data`, each after its length (u64); the reader has checked that they fill it exactly."""

    data: memoryview
    count: int

    def decode(self, key: str) -> list[str]:
        """All strings. Raises BadMetadata when one is not UTF-8."""
        data, at, out = self.data, 0, []
        try:
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                out.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except UnicodeDecodeError as error:
            raise BadMetadata(f"string {len(out)} of metadata key {key!r} is not UTF-8: {error.reason} at byte {error.start}") from None
        return out


@dataclass(frozen=True)
class NumberArray:
    """Little-endian numbers of struct code `code` that fill `data`."""

    data: memoryview
    code: str

    def decode(self) -> list[int | float | bool]:
        """All numbers as Python values."""
        # A cast needs the machine's byte order, which is little endian on every platform that runs this.
        return list(self.data.cast("B").cast(self.code))  # type: ignore[call-overload]


Value = str | int | float | bool | StringArray | NumberArray
_KINDS: Final = {
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "a bool",
    StringArray: "a list of strings",
    NumberArray: "a list of numbers",
}


class Metadata(Mapping[Text, Value]):
    """Key to value. `str`, `int`, `float`, `bool`, `strings`, `numbers` raise MissingKey or BadMetadata naming the key; the
    `optional_*` forms return `default` for an absent key and still raise for a wrong type."""

    def __init__(self, values: Mapping[Text, Value], source: Text) -> None:
        self._values = dict(values)
        self._source = source

    def __getitem__(self, key: Text) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[Text]:
        return iter(self._values)

    def __len__(self) -> Integer:
        return len(self._values)

    def detach(self) -> None:
        """Copy what undecoded arrays still need, so that the file behind them can be unmapped."""
        for key, value in self._values.items():
            if isinstance(value, StringArray | NumberArray):
                self._values[key] = replace(value, data=memoryview(bytes(value.data)))

    def _get(self, key: Text) -> Value:
        if key not in self._values:
            raise MissingKey(f"{self._source} has no metadata key {key!r}")
        return self._values[key]

    def _wrong(self, key: Text, wanted: Text) -> BadMetadata:
        return BadMetadata(f"metadata key {key!r} of {self._source} is {_KINDS[type(self._values[key])]}, not {wanted}")

    def str(self, key: Text) -> Text:
        """The string at `key`."""
        value = self._get(key)
        if not isinstance(value, Text):
            raise self._wrong(key, "a string")
        return value

    def int(self, key: Text, *, low: Integer | None = None, high: Integer | None = None) -> Integer:
        """The integer at `key`, of any width, within [low, high] where given."""
        value = self._get(key)
        if not isinstance(value, Integer) or isinstance(value, Flag):
            raise self._wrong(key, "an integer")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise BadMetadata(f"metadata key {key!r} of {self._source} is {value}, it must be {bounds}")
        return value

    def size(self, key: Text, *, divides: tuple[Text, Integer] | None = None) -> Integer:
        """An extent of the model: from 1 to 2^31 - 1, and a divisor of `divides` = (what that is, its value) where given."""
        value = self.int(key, low=1, high=2**31 - 1)
        if divides is not None and divides[1] % value:
            raise BadMetadata(f"metadata key {key!r} of {self._source} is {value}, it must divide {divides[0]}, which is {divides[1]}")
        return value

    def positive(self, key: Text) -> Real:
        """The finite number above 0 at `key`."""
        value = self.float(key)
        if value <= 0:
            raise BadMetadata(f"metadata key {key!r} of {self._source} is {value}, it must be above 0")
        return value

    def float(self, key: Text) -> Real:
        """The finite number at `key`; an integer is converted."""
        value = self._get(key)
        if not isinstance(value, Real | Integer) or isinstance(value, Flag):
            raise self._wrong(key, "a float")
        if not math.isfinite(value):
            raise BadMetadata(f"metadata key {key!r} of {self._source} is {value}, it must be finite")
        return Real(value)

    def bool(self, key: Text) -> Flag:
        """The bool at `key`."""
        value = self._get(key)
        if not isinstance(value, Flag):
            raise self._wrong(key, "a bool")
        return value

    def strings(self, key: Text) -> list[Text]:
        """The list of strings at `key`, decoded anew at each call."""
        value = self._get(key)
        if not isinstance(value, StringArray):
            raise self._wrong(key, "a list of strings")
        return value.decode(key)

    def integers(self, key: Text) -> list[Integer]:
        """The list of integers at `key`, decoded anew at each call."""
        value = self._get(key)
        if not isinstance(value, NumberArray) or value.code in "fd?":
            raise self._wrong(key, "a list of integers")
        return [Integer(item) for item in value.decode()]

    def floats(self, key: Text) -> list[Real]:
        """The list of floats at `key`, decoded anew at each call."""
        value = self._get(key)
        if not isinstance(value, NumberArray) or value.code not in "fd":
            raise self._wrong(key, "a list of floats")
        return [Real(item) for item in value.decode()]

    def optional_str(self, key: Text, default: T) -> Text | T:
        """`str`, or `default` when the key is absent."""
        return self.str(key) if key in self._values else default

    def optional_int(self, key: Text, default: T, *, low: Integer | None = None, high: Integer | None = None) -> Integer | T:
        """`int`, or `default` when the key is absent."""
        return self.int(key, low=low, high=high) if key in self._values else default

    def optional_float(self, key: Text, default: T) -> Real | T:
        """`float`, or `default` when the key is absent."""
        return self.float(key) if key in self._values else default

    def optional_bool(self, key: Text, default: T) -> Flag | T:
        """`bool`, or `default` when the key is absent."""
        return self.bool(key) if key in self._values else default
