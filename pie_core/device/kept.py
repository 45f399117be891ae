"""Kept: what is remembered of the programs used lately, bounded by their number and by their ops in all, which is what costs memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_OPS = 1 << 17  # of kept programs, all together: some 65 MB where each is its own; or lines of kernels


class Kept(Generic[T]):
    """Values by key, the one used longest ago goes first. `most`: values, `most_ops`: their sizes in all; the last one stays."""

    __slots__ = ("_ops", "_values", "most", "most_ops")

    def __init__(self, most: int, most_ops: int = MOST_OPS) -> None:
        self.most, self.most_ops = most, most_ops
        self._values: OrderedDict[object, tuple[T, int]] = OrderedDict()
        self._ops = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def find(self, key: object) -> T | None:
        """The value of `key`, which counts as used now."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def keep(self, key: object, value: T, ops: int) -> None:
        """Remember a value of `ops` ops."""
        self._ops -= self._values.pop(key, (value, 0))[1]
        self._values[key] = value, ops
        self._ops += ops
        while len(self._values) > 1 and (len(self._values) > self.most or self._ops > self.most_ops):
            self._ops -= self._values.popitem(last=False)[1][1]
