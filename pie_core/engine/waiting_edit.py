"""An edit that waits for pages, as a pass does: it keeps its place in the order of its set, and everything behind it waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pie_core.engine.errors import EngineError
from pie_core.engine.pipeline import Pipeline

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.working_set import WorkingSet


class WaitingEdit:
    """In a pipeline of its own. To who makes room it looks like a pass of no tokens that has not started.

    `places`: entries of the page table that have to be copied while others hold them too: fewer pages are needed when a fork goes.
    `again` makes the edit, `refuse` fails it; one of them is called once, unless nobody needs the set any more.
    """

    __slots__ = ("_again", "_over", "_places", "_refuse", "_ticket", "instance", "pipe", "ws")

    revives: WorkingSet | None = None
    started = False
    to_compute = 0

    def __init__(
        self,
        instance: Instance,
        ws: WorkingSet,
        places: Sequence[int],
        *,
        again: Callable[[], None],
        refuse: Callable[[EngineError], None],
    ) -> None:
        self.instance = instance
        self.ws = ws
        self._places = places
        self._again = again
        self._refuse = refuse
        self._over = False
        self._ticket = ws.order.hold()
        ws.writing = True  # no pass, no fork
        self.pipe = Pipeline(instance)
        self.pipe.closed = True  # nobody waits for more of it
        self.pipe.queue.append(self)
        instance.activate(self.pipe)

    @property
    def ended(self) -> bool:
        """Whether it was made or refused, or its set is gone."""
        return self._over or self.ws.dropped

    @property
    def useless(self) -> bool:
        """Whether the set was dropped by its owner, and only that waits behind this."""
        return self.ws.leaving and self.ws.order.outstanding == 1

    def shared(self) -> list[int]:
        """Pages to be copied, as it is now."""
        return self.ws.shared_at(self._places)

    def make(self) -> None:
        """There is room. It must have left its queue."""
        self._end(self._again)

    def give_up(self) -> None:
        """Nobody needs it. It must have left its queue."""
        self._end(lambda: None)

    def fail(self, cause: EngineError) -> None:
        """There will never be room. It must have left its queue."""
        self._end(lambda: self._refuse(cause))

    def _end(self, how: Callable[[], None]) -> None:
        if not self.ended:
            self._over = True
            self.ws.writing = False
            how()
            self.ws.order.leave(self._ticket)
