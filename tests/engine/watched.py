"""An engine that checks itself for lost wake-ups: whenever it has found nothing to do, looking again must find nothing either."""

from __future__ import annotations

from typing import Any

from pie_core.engine.loop import Engine
from pie_core.engine.runner import Runner


class Watched(Engine):
    """Raises AssertionError in its step loop (`lost` then says so) when a fill that made nothing leaves something for the next one."""

    def __init__(self, runner: Runner, **more: Any) -> None:
        super().__init__(runner, **more)
        self.looks = 0  # that were checked

    def _fill(self) -> bool:
        made = super()._fill()
        if not made:
            self._look_again("the fill before it made nothing")
        return made

    def check_asleep(self) -> None:
        """Between calls: what sleeps with work waiting, nothing in flight, no poke on its way and no timer, has nothing to do. Nor may
        the step loop have failed."""
        assert self.lost is None, self.lost
        if not self._dirty:
            self._look_again("nothing poked the engine")

    def _look_again(self, why: str) -> None:
        if self._flights or self._wait > 0 or self._linger.expected or self._stopping or not self.scheduler.instances:
            return
        before, waiting, promise = self._done(), [(w.instance.age, n) for w, n in self.scheduler.waiting], self.scheduler.promise
        made = super()._fill()
        self.looks += 1
        assert not made and not self._wait and self._done() == before, (
            f"a lost wake-up: {why}, and there is work to do; (age, pages) of those that wait: {waiting}, promised: {promise}"
        )

    def _done(self) -> tuple[int, ...]:
        metrics = self.metrics
        return self._number, metrics.paused, metrics.revived, metrics.passes, metrics.failed_passes, self.pool.free
