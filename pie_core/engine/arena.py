"""Allocates words of the device arena for channel rings: first fit over a sorted free list, neighbours merged; it grows on demand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from pie_core.engine.errors import ArenaFull


class Arena:
    """Word ranges of the arena. Freed words may be reused at once: the device runs in order.

    `total`: the most words that it may have; `there`: those that the device has now (None: all). Where more are needed, `grow` is called
    with a number of words that the device has to have from then on; what it raises, `allocate` raises, and nothing has changed."""

    __slots__ = ("_grow", "_sizes", "_starts", "there", "total", "used")

    def __init__(self, total: int, there: int | None = None, grow: Callable[[int], None] | None = None) -> None:
        self.total = total
        self.there = total if there is None or grow is None else min(there, total)
        self.used = 0
        self._grow = grow
        self._starts = [0] if total else []
        self._sizes = [total] if total else []

    def allocate(self, words: int) -> int:
        """Offset of `words` >= 1 free words. Raises ArenaFull."""
        for i, size in enumerate(self._sizes):
            if size >= words:
                start = self._starts[i]
                if self._grow is not None and start + words > self.there:
                    there = self.there
                    while there < start + words:
                        there *= 2  # rarely: what is there is copied, and plans are built again
                    there = min(there, self.total)
                    self._grow(there)
                    self.there = there
                if size == words:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i] += words
                    self._sizes[i] -= words
                self.used += words
                return start
        raise ArenaFull(
            f"a channel needs {words} words of device memory in one piece (a word an element, capacity + 1 cells), and "
            f"{self.total - self.used} of {self.total}, which all inferlets share, are free: use smaller cells or a smaller capacity, let "
            "go of channels, or try again when other inferlets have ended",
            words=words,
            free=self.total - self.used,
            total=self.total,
        )

    def release(self, start: int, words: int) -> None:
        """Give back what `allocate` returned."""
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, start)
        self.used -= words
        if i > 0 and starts[i - 1] + sizes[i - 1] == start:
            i -= 1
            sizes[i] += words
        else:
            starts.insert(i, start)
            sizes.insert(i, words)
        if i + 1 < len(starts) and starts[i] + sizes[i] == starts[i + 1]:
            sizes[i] += sizes[i + 1]
            del starts[i + 1], sizes[i + 1]
