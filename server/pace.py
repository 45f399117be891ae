"""When what is going on is expected to end, from how far it has come so far."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class _Count:
    """Where a count stood when it was seen first, at `began_s` of the monotonic clock, and where it stands."""

    began_s: float
    first: int
    last: int
    total: int


class Paces:
    """Counts of several parts; each goes from its first report to its total at the pace that it has shown."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def ends_at(self, part: str, done: int, total: int) -> float | None:
        """Unix time at which `part`, now at `done` of `total` (0 = unknown), is expected to end; None before it has moved. A count that
        goes back, or has another total, is a new one."""
        now, count = time.monotonic(), self._counts.get(part)
        if count is None or count.total != total or done < count.last:
            count = self._counts[part] = _Count(now, done, done, total)
        count.last = done
        if not total or done <= count.first:
            return None
        return time.time() + (now - count.began_s) * max(0, total - done) / (done - count.first)

    def forget(self, part: str) -> None:
        """`part` has ended; what it reports next is a new count."""
        self._counts.pop(part, None)
