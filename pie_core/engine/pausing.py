"""Memory pressure: pages of working sets that can be computed again are given back, and computed again when they are needed.

Who is asked first: sets that nobody has used for a moment, the longest unused first; then, when nothing can run at all, sets of the
youngest that wait themselves. Passes keep their places in the queues; a set without a recipe is never paused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pie_core.engine.errors import EngineError, PassSkipped
from pie_core.engine.forward import FOLDING, Part, Pass
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.recurrent import slots_needed
from pie_core.engine.values import Value
from pie_core.engine.working_set import WorkingSet

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.metrics import Metrics
    from pie_core.engine.pages import PagePool
    from pie_core.engine.predict import Predictor
    from pie_core.engine.scheduler import Scheduler

PATIENCE = 0.05  # seconds; a set that nobody used for so long may be paused while others wait


class Revival:
    """Computes a paused set again, in a set of its own whose pages `ws` takes over, when `asker` waits for it."""

    __slots__ = ("asker", "copy", "work", "ws")

    def __init__(self, ws: WorkingSet, asker: Pass) -> None:
        instance = asker.instance
        self.ws = ws
        self.asker = asker
        self.copy = instance.new_set(reuse=ws.reuse)
        self.copy.number = ws.number
        self.copy.public = min(ws.public, ws.frozen)
        pipe = Pipeline(instance)
        pipe.closed = True  # nobody waits for more of it
        part = Part(self.copy, ws.recipe.ids[: ws.length], ws.length, ())
        part.ticket = self.copy.order.enter()
        self.work = Pass(
            instance, pipe, parts=[part], geometry=FOLDING, info=None, params=(), uses=[], lane_uses=[], embed=None,
            sink=self._ended, seq=asker.seq, accepted_at=instance.engine.now(), reuse=instance.reuse,
        )  # fmt: skip
        self.work.revives = ws
        instance.outstanding += 1
        instance.pipelines[pipe] = None
        instance.revivals[ws] = self
        pipe.queue.append(self.work)
        instance.activate(pipe)
        instance.engine.metrics.revived += 1

    def cancel(self) -> None:
        """Nobody needs the set any more."""
        work = self.work
        if not work.ended:
            if not work.final:
                work.pipe.queue.clear()
            work.undo(PassSkipped("the working set was dropped"))
            if not work.pipe.queue:
                work.instance.idle(work.pipe)

    def _ended(self, _: Pass, values: list[Value] | None, error: EngineError | None) -> None:
        ws = self.ws
        self.work.instance.revivals.pop(ws, None)
        if error is None and ws.paused and not ws.dropped:
            ws.resume(self.copy)
        elif error is not None and not isinstance(error, PassSkipped):
            ws.fail(error, None)
        self.copy.drop()
        self.work.instance.engine.poke()


class Pressure:
    """Makes room for passes that wait for pages."""

    __slots__ = ("_instances", "_metrics", "_pool", "_predictor", "_scheduler")

    def __init__(
        self, scheduler: Scheduler, pool: PagePool, predictor: Predictor, metrics: Metrics, instances: dict[Instance, None]
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._instances = instances
        self._predictor = predictor
        self._metrics = metrics

    def relieve(self, now: float, *, halted: bool) -> tuple[bool, float]:
        """(whether the oldest waiting pass may find room now, seconds until it pays to ask again, 0 for not by itself).
        `halted`: nothing runs and nothing can."""
        waiting = self._scheduler.waiting
        if not waiting:
            return False, 0.0
        work, need = min(waiting, key=lambda w: (w[0].instance.age, min(part.ws.number for part in w[0].parts)))
        asker = work.instance.revivals[work.revives].asker if work.revives is not None else work
        kept = {part.ws for part in (*work.parts, *asker.parts)}
        sets = [ws for instance in self._instances for ws in instance.working_sets if ws.pages and ws not in kept]
        for ws in sets:
            if ws.guess is not None and ws.used_at + PATIENCE <= now:
                self._predictor.drop(ws.guess)
        unused = [ws for ws in sets if ws.order.idle and ws.may_pause()]
        cold = sorted((ws for ws in unused if ws.used_at + PATIENCE <= now), key=lambda ws: ws.used_at)
        # one sum for both: rounded differently, a set could be neither cold nor about to be, and nobody would ask again
        soon = min((due - now for ws in unused if (due := ws.used_at + PATIENCE) > now), default=0.0)
        if self._pause(cold, work, need):
            return self._promised(work, need), 0.0
        if not halted or soon:
            return False, soon
        stuck = [ws for ws in reversed(sets) if not ws.order.idle and ws.may_pause()]  # the youngest first: both tables are in order
        if self._pause(stuck, work, need) or self._enough(work, need):
            return self._promised(work, need), 0.0
        return False, 0.0

    def _enough(self, work: Pass, need: int) -> bool:
        """Whether `need` pages are free, and slots for the recurrent states of `work`."""
        states = work.instance.engine.states
        return self._pool.free >= need and (states is None or states.free >= slots_needed(work))

    def _pause(self, sets: Iterable[WorkingSet], work: Pass, need: int) -> bool:
        """Pause some of `sets` until `need` pages are free for `work`; whether that was reached by pausing. Sets whose pages all have
        other holders too go last."""
        pool = self._pool
        order = sorted(sets, key=lambda ws: all(pool.refs(page) > 1 for page in ws.pages))
        gone = 0
        for ws in order:
            if self._enough(work, need):
                break
            ws.pause()
            gone += 1
        self._metrics.paused += gone
        return gone > 0 and self._enough(work, need)

    def _promised(self, work: Pass, need: int) -> bool:
        if self._scheduler.promise is not None and self._scheduler.promise[0] is work:
            return False
        self._scheduler.promise = (work, need)
        return True
