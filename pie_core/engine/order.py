"""Orders operations on one object against the passes that use it, without a queue when nothing is outstanding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Ordered:
    """Passes `enter` at acceptance and `leave` when done; an operation runs once every pass that entered before it has
    left, and a pass that entered after it may run only then (`may_run`)."""

    __slots__ = ("_counts", "_ops", "_phase")

    def __init__(self) -> None:
        self._phase = 0
        self._counts: deque[int] = deque((0,))  # outstanding passes, by phase from the current one on
        self._ops: deque[Callable[[], None]] = deque()  # op i ends phase (current + i)

    def enter(self) -> int:
        """A ticket: the phase in which the pass belongs."""
        self._counts[-1] += 1
        return self._phase + len(self._counts) - 1

    def may_run(self, ticket: int) -> bool:
        """Whether all operations accepted before the ticket have run."""
        return ticket == self._phase

    def leave(self, ticket: int) -> None:
        """The pass with `ticket` is done; operations that waited only for it run now."""
        if ticket < self._phase:
            return  # all was over before
        self._counts[ticket - self._phase] -= 1
        self._advance()

    def run(self, op: Callable[[], None]) -> None:
        """Run `op` now, or as soon as the passes accepted before it have left."""
        if not self._ops and not self._counts[0]:
            op()
            return
        self._ops.append(op)
        self._counts.append(0)

    def end(self) -> None:
        """The object is gone with whatever used it: the operations that wait run now, and nobody needs to leave any more."""
        ops, self._ops = self._ops, deque()
        self._phase += len(self._counts)
        self._counts = deque((0,))
        for op in ops:
            op()

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding and no operation waits."""
        return not self._ops and not self._counts[0]

    @property
    def outstanding(self) -> int:
        """Passes that entered and have not left."""
        return sum(self._counts)

    def _advance(self) -> None:
        while self._ops and not self._counts[0]:
            op = self._ops.popleft()
            self._counts.popleft()
            self._phase += 1
            op()
