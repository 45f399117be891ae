"""Allocates words of the device arena for channel rings: first fit over a sorted free list, neighbours merged."""

from __future__ import annotations

from bisect import bisect_left

from pie_core.engine.errors import ArenaFull


class Arena:
    """Word ranges of the arena. Freed words may be reused at once: the device runs in order."""

    __slots__ = ("_sizes", "_starts", "total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._starts = [0] if total else []
        self._sizes = [total] if total else []

    def allocate(self, words: int) -> int:
        """Offset of `words` >= 1 free words. Raises ArenaFull."""
        for i, size in enumerate(self._sizes):
            if size >= words:
                start = self._starts[i]
                if size == words:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i] += words
                    self._sizes[i] -= words
                self.used += words
                return start
        raise ArenaFull(
            f"a channel needs {words} words of device memory in one piece; {self.total - self.used} of {self.total} are free: "
            "use a smaller capacity or close what is no longer needed",
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
