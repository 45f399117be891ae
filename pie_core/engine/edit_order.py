"""Orders the edits of a working set against its passes; an edit by a value that is on its way need not hold up the passes behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pie_core.engine.order import Ordered


class EditOrder(Ordered):
    """`Ordered`, with edits that may happen early: once every pass accepted before them is wholly scheduled (`scheduled`), if they can be
    (`early` says so). Passes behind one may run then, while those before it are in flight; whatever else comes behind waits for all."""

    __slots__ = ("_carried", "_earlies", "_floor", "_queued")

    def __init__(self) -> None:
        super().__init__()
        self._earlies: deque[Callable[[], bool] | None] = deque()  # of the operation in the same place
        self._queued: deque[int] = deque((0,))  # of `_counts`, the passes that are not wholly scheduled
        self._carried = 0  # outstanding ones of phases that ended early
        self._floor = 0  # the phase in which the object was alive first (see `end`)

    @property
    def early(self) -> bool:
        """Whether an edit happened early and may still be corrected, or one waits that may happen early."""
        return self._carried > 0 or any(early is not None for early in self._earlies)

    def enter(self, *, value: bool = False) -> int:
        """A ticket: the phase in which the pass belongs. `value`: not of a pass, but of what an edit waits for."""
        if not value:
            self._queued[-1] += 1
        return super().enter()

    def hold(self) -> int:
        """A ticket of the present phase: the operation that runs now is not over before it leaves, and nothing happens early meanwhile."""
        self._counts[0] += 1
        self._queued[0] += 1
        return self._phase

    def scheduled(self, ticket: int) -> None:
        """The pass with `ticket` is wholly in steps that were, or are about to be, submitted."""
        if ticket >= self._phase:
            self._queued[ticket - self._phase] -= 1
            self._advance()

    def leave(self, ticket: int, *, queued: bool = True) -> None:
        """The pass with `ticket` is done; `queued`: it was never wholly scheduled (False for values too)."""
        if ticket < self._floor:
            return  # all was over before
        if ticket < self._phase:
            self._carried -= 1
        else:
            self._counts[ticket - self._phase] -= 1
            self._queued[ticket - self._phase] -= queued
        self._advance()

    def run(self, op: Callable[[], None]) -> None:
        """Run `op` now, or as soon as everything accepted before it has left."""
        if self.idle:
            op()
            return
        self._ops.append(op)
        self._earlies.append(None)
        self._counts.append(0)
        self._queued.append(0)

    def amend(self, last: Callable[[], None], op: Callable[[], None], early: Callable[[], bool] | None) -> bool:
        """Let `op` take the place of `last`, if that waits and nothing has come behind it. `early` does the same ahead of time and gives
        whether it could; it must not use the order."""
        if not self._ops or self._ops[-1] is not last or self._counts[-1]:
            return False
        self._ops[-1], self._earlies[-1] = op, early
        self._advance()
        return True

    def barrier(self) -> None:
        """Passes accepted from now on run only when nothing is left that happened early."""
        self.run(lambda: None)

    def end(self) -> None:
        """The object is gone with whatever used it: the operations that wait run now, and nobody needs to leave any more."""
        self._earlies.clear()
        self._queued = deque((0,))
        self._carried = 0
        super().end()
        self._floor = self._phase

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding and no operation waits."""
        return not self._ops and not self._counts[0] and not self._carried  # asked for each token

    @property
    def outstanding(self) -> int:
        """What entered and has not left."""
        return super().outstanding + self._carried

    def _advance(self) -> None:
        while self._ops:
            early = self._earlies[0]
            if self._counts[0] or self._carried:
                if early is None or self._queued[0] or not early():
                    return
                self._carried += self._counts[0]
                op = None
            else:
                op = self._ops[0]
            self._ops.popleft()
            self._earlies.popleft()
            self._counts.popleft()
            self._queued.popleft()
            self._phase += 1
            if op is not None:
                op()
