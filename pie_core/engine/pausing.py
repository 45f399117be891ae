"""Memory pressure: pages of working sets that can be computed again are given back, and computed again when they are needed.

Who is asked first: sets that nobody has used for a moment, the longest unused first; then, when nothing can run at all, sets of the
youngest that wait themselves. Passes keep their places in the queues; a set without a recipe is never paused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pie_core.engine.errors import EngineError, OutOfPages, OutOfSlots, PassSkipped
from pie_core.engine.forward import FOLDING, Part, Pass
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.recurrent import slots_needed
from pie_core.engine.values import Value
from pie_core.engine.waiting_edit import WaitingEdit
from pie_core.engine.working_set import WorkingSet

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.metrics import Metrics
    from pie_core.engine.pages import PagePool
    from pie_core.engine.predict import Predictor
    from pie_core.engine.scheduler import Scheduler, Waiter

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
            ws.fail(error, "this working set had to be computed again, and could not")
        self.copy.drop()
        self.copy.let_go()
        self.work.instance.engine.poke()


def _sets(work: Waiter) -> list[WorkingSet]:
    return [work.ws] if isinstance(work, WaitingEdit) else [part.ws for part in work.parts]


class Relief(NamedTuple):
    """What became of those who wait. `again`: somebody may find room now, look at once; `wait`: seconds until it pays to ask again, 0
    for not by itself."""

    again: bool
    wait: float


class Pressure:
    """Makes room for passes that wait for pages or for slots of recurrent state."""

    __slots__ = ("_instances", "_metrics", "_pool", "_predictor", "_scheduler")

    def __init__(
        self, scheduler: Scheduler, pool: PagePool, predictor: Predictor, metrics: Metrics, instances: dict[Instance, None]
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._instances = instances
        self._predictor = predictor
        self._metrics = metrics

    def relieve(self, now: float, granted: set[Waiter], *, halted: bool) -> Relief:
        """Make room for the oldest waiting pass or edit by pausing others, if that can be reached at all: nobody is paused in vain.

        `halted`: nothing runs and nothing can. Then, in this order: sets that are in use are paused too; who fits into what is free goes
        past the oldest, if it holds pages (it gives them back once it is through); the youngest holder fails where everybody who holds
        pages waits; newcomers go past, since a silent holder is all that the oldest waits for.
        `granted`: who was promised room since the last step; nobody is twice, so that this comes to an end."""
        waiting = sorted(self._scheduler.waiting, key=lambda w: (w[0].instance.age, min(ws.number for ws in _sets(w[0]))))
        if not waiting:
            return Relief(False, 0.0)
        work, need = waiting[0]
        asker = work.instance.revivals[work.revives].asker if work.revives is not None else work
        kept = {*_sets(work), *_sets(asker)}
        sets = [ws for instance in self._instances for ws in instance.working_sets if ws.pages and ws not in kept]
        for ws in sets:
            if ws.guess is not None and ws.used_at + PATIENCE <= now:
                self._predictor.drop(ws.guess)
        unused = [ws for ws in sets if ws.order.idle and ws.may_pause()]
        victims = self._in_order(sorted((ws for ws in unused if ws.used_at + PATIENCE <= now), key=lambda ws: ws.used_at))
        # one sum for both: rounded differently, a set could be neither cold nor about to be, and nobody would ask again
        fresh = [*unused, *(ws for ws in sets if ws.guess is not None)]
        soon = min((due - now for ws in fresh if (due := ws.used_at + PATIENCE) > now), default=0.0)
        if halted and not soon:  # the youngest first: both tables are in order
            victims += self._in_order(ws for ws in reversed(sets) if not ws.order.idle and ws.may_pause())
        if self._pause(victims, work, need):
            self._scheduler.promise = (work, need)
            return Relief(True, 0.0)
        if not halted or soon:
            return Relief(False, soon)
        return Relief(self._promise(waiting[:1], granted) or self._go_past(waiting[1:], granted), 0.0)

    def _go_past(self, younger: list[tuple[Waiter, int]], granted: set[Waiter]) -> bool:
        """The oldest cannot be helped: whether somebody else may run, or failed so that others can."""
        scheduler = self._scheduler
        if self._promise([(work, need) for work, need in younger if work.instance.pages], granted):
            return True
        holders = {instance for instance in self._instances if instance.pages}
        stuck = {work.instance: (work, need) for work, need in scheduler.waiting if work.instance.pages}
        if stuck and len(stuck) == len(holders):
            victim, need = stuck[max(stuck, key=lambda instance: instance.age)]
            self._give_way(victim, need, alone=len(holders) == 1)
            return True
        # who was let past does not count: the next one behind it could hide for ever that all others are stuck
        if not any(instance not in stuck and instance not in scheduler.let_past for instance in holders):
            return False
        if not self._promise(younger, granted):
            return False
        assert scheduler.promise is not None
        scheduler.let_past.add(scheduler.promise[0].instance)
        return True

    def _promise(self, waiting: Iterable[tuple[Waiter, int]], granted: set[Waiter]) -> bool:
        """Keep what is free for the first of `waiting` whom it suffices, of those who were not `granted` it before."""
        for work, need in waiting:
            if work not in granted and self._enough(work, need):
                self._scheduler.promise = (work, need)
                granted.add(work)
                return True
        return False

    def _enough(self, work: Waiter, need: int) -> bool:
        """Whether `need` pages are free, and slots for the recurrent states of a pass. An edit needs less once a fork was paused."""
        states = work.instance.engine.states
        if isinstance(work, WaitingEdit):
            return self._pool.free >= len(work.shared())
        return self._pool.free >= need and (states is None or states.free >= slots_needed(work))

    def _in_order(self, sets: Iterable[WorkingSet]) -> list[WorkingSet]:
        """Sets whose pages all have other holders too go last."""
        refs = self._pool.refs
        return sorted(sets, key=lambda ws: all(refs(page) > 1 for page in ws.pages))

    def _pause(self, sets: list[WorkingSet], work: Waiter, need: int) -> bool:
        """Pause the first of `sets` until `need` pages are free for `work`, and its slots. False: there is enough already, or all of
        them together would not do; then nothing has changed."""
        if not sets or self._enough(work, need) or not self._would_do(sets, work, need):
            return False
        for ws in sets:
            ws.pause()
            self._metrics.paused += 1
            if self._enough(work, need):
                break
        return True

    def _would_do(self, sets: list[WorkingSet], work: Waiter, need: int) -> bool:
        """Whether there would be enough for `work` if all of `sets` were paused: what has other holders too stays."""
        pool, states = self._pool, work.instance.engine.states
        if pool.free + sum(len(ws.pages) for ws in sets) < need:
            return False
        pages = Counter(page for ws in sets for page in ws.pages)
        if isinstance(work, WaitingEdit):  # who holds a page alone need not copy it
            need = sum(1 for page in work.shared() if pages[page] + 1 < pool.refs(page))
        if pool.free + sum(1 for page, n in pages.items() if n == pool.refs(page)) < need:
            return False
        if states is None or isinstance(work, WaitingEdit):
            return True
        slots = Counter(ws.state.slot for ws in sets if ws.state is not None and ws.state.slot is not None)
        return states.free + sum(1 for slot, n in slots.items() if n == states.refs(slot)) >= slots_needed(work)

    def _give_way(self, victim: Waiter, need: int, *, alone: bool) -> None:
        """Fail a pass or an edit that waits for `need` pages, so that others can go on. `alone`: nobody else holds any."""
        pool, owner, states = self._pool, victim.instance, victim.instance.engine.states
        victim.pipe.queue.remove(victim)
        if not victim.pipe.queue:
            owner.idle(victim.pipe)
        self._metrics.failed_passes += 1
        if states is not None and isinstance(victim, Pass) and (slots := slots_needed(victim)) > states.free:
            victim.fail(
                OutOfSlots(
                    f"the pass needs {slots} slots of recurrent state, {states.free} of {states.total} are free, and everybody who holds "
                    "some waits for more; this, the youngest instance, gives way: drop working sets, or commit their buffers",
                    needed=slots,
                    free=states.free,
                    total=states.total,
                )
            )
            return
        if isinstance(victim, WaitingEdit):
            what = "the edit"
        else:
            what = "the pass" if victim.revives is None else "a working set that is computed again"
        if alone:
            why = f"the instance's own working sets hold the other {owner.pages}: drop or truncate some, or feed fewer sequences at once"
        else:
            why = (
                "everybody who holds some waits for more; this, the youngest instance, gives way: "
                f"its working sets hold {owner.pages}, drop or truncate some"
            )
        victim.fail(
            OutOfPages(
                f"{what} needs {need} more KV pages, {pool.free} of {pool.total} are free, and {why}",
                needed=need,
                free=pool.free,
                total=pool.total,
                held=owner.pages,
            )
        )
