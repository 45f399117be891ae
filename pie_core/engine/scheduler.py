"""The scheduler: fills one step with ready passes. Decode first, prefill in chunks, fair between instances and pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import ContextLengthExceeded, EngineError, InvalidPass, InvalidState, OutOfPages
from pie_core.engine.forward import SHORT_PASS, Pass
from pie_core.engine.geometry import check_fit
from pie_core.engine.pages import PagePool
from pie_core.engine.pausing import Revival
from pie_core.engine.pipeline import ForkEntry, Pipeline
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.recurrent import StatePool, fold_before, slots_free, slots_needed
from pie_core.engine.reuse import attach_pages, claim_pages, find_pages
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.step import Step
from pie_core.engine.waiting_edit import WaitingEdit
from pie_core.engine.working_set import pages_for

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance


def _in_turn(lists: list[list[Pipeline]]) -> list[Pipeline]:
    """The first of each list, then the second of each, and so on."""
    if len(lists) == 1:
        return lists[0]
    depth = max(map(len, lists), default=0)
    if depth == 1:
        return [pipes[0] for pipes in lists]
    return [pipes[k] for k in range(depth) for pipes in lists if k < len(pipes)]


Waiter = Pass | WaitingEdit


class Scheduler:
    """Fills steps. It keeps nothing between steps but the order of turns and who waits for pages.

    Nothing that waits is forgotten. `fill` is a function of the state that it finds, and after a step without rows the engine sleeps,
    so that two things must hold:
    - Looking again at once would find nothing: what a fill leaves behind that the next one decides by (an entry that left its queue, a
      fork that ran, a paused set that comes back, the reserve, a pass that goes first) sets `changed`, and the engine fills again.
    - Whatever else a pass may wait for ends with `Engine.poke`, or with a step that lands, which pokes: submits, puts, takes, closes and
      edits poke behind the call (`Instance`), what waited for passes runs when they settle, in a step that landed; saves, opens and
      revivals poke at their end. What only time brings (a linger, sets that become cold) has a timer (`Engine._wait`).
    """

    def __init__(
        self,
        limits: RunnerLimits,
        pool: PagePool,
        cache: PrefixCache,
        copy_page: Callable[[int, int], None],
        prefill_rows: Callable[[int], int],
        *,
        states: StatePool | None = None,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._cache = cache
        self._copy_page = copy_page
        self._prefill_rows = prefill_rows
        self._states = states
        self._short = min(SHORT_PASS, limits.max_tokens)
        self.instances: dict[Instance, None] = {}  # those with queued entries, in the order of their turns
        self.waiting: list[tuple[Waiter, int]] = []  # passes and edits that found too few free pages in the last fill, with their need
        self.promise: tuple[Waiter, int] | None = None  # the one of them that pages were made free for, with its need
        self._tenants: dict[str, None] = {}  # those with queued entries, in the order of their turns, where there are several
        self._need = 0  # pages that the pass which was looked at last takes from the pool
        self._overdue: Pass | None = None  # a ready pass whose last tokens need more room than decode left: first in the next step
        self.changed = False  # whether the last fill left anything behind by which another one may find more
        self.let_past: set[Instance] = set()  # newcomers that took what was too little for the oldest, while it still waits
        self._reserve: tuple[int, int, int] | None = None  # (age, pages, slots) of the oldest instance that waited in the last fill

    def fill(self, number: int) -> Step:
        """A step with everything that is ready and fits; maybe empty. Passes that can never run are failed on the way."""
        step = Step(number, self._limits)
        self._reserve = self._oldest()
        self.waiting = []
        self.changed = False
        if self.promise is not None and (self.promise[0].ended or self.promise[0].started):
            self.promise = None
        long: list[tuple[Pipeline, Pass]] = []
        limited = False
        first, self._overdue = self._overdue, None
        if first is not None and not first.ended and first.pipe.queue and first.pipe.queue[0] is first and self._admit(first, step) is None:
            self._take(first.pipe, first, step, step.chunk_for(first))
        for pipe in self._turns():
            queue = pipe.queue
            while queue:
                entry = queue[0]
                if isinstance(entry, ForkEntry):
                    if not entry.ready():
                        break
                    queue.popleft()
                    entry.run()
                    self.changed = True
                    pipe.instance.moved()
                    continue
                if isinstance(entry, WaitingEdit):
                    if not self._edit(entry):
                        break
                    continue
                if entry.size > self._short and (entry.started or not self._mostly_there(entry)):  # the rest of a prompt too is prefill
                    long.append((pipe, entry))
                    break
                state = self._admit(entry, step)
                if state is None:
                    count = step.chunk_for(entry)
                    if count == entry.to_compute or (count and not step.batch.rows):  # what is replayed in front of it may leave less room
                        self._take(pipe, entry, step, count)
                        if pipe.stop_channel is not None:
                            break
                        continue
                    limited = True
                elif state:
                    continue  # it failed and left the queue
                break
            if not queue:
                pipe.instance.idle(pipe)
        step.decode_tokens = step.n_tokens
        if long:
            step.prefill_room = self._prefill_rows(step.decode_tokens)
        for pipe, work in long:
            state = self._admit(work, step)
            if state is None:
                count = step.chunk_for(work)
                limited = limited or count < work.to_compute
                if count:
                    self._take(pipe, work, step, count)
                elif self._overdue is None and step.n_tokens == step.decode_tokens:
                    self._overdue = work  # beside decode it never fits; others that found the room taken have their turn next
            if not pipe.queue:
                pipe.instance.idle(pipe)
        if limited:
            self._rotate(step)
        if not self.waiting:
            self.let_past.clear()
        if not step.batch.rows and (self._overdue not in (None, first) or self._reserve != self._oldest()):
            self.changed = True
        return step

    def _oldest(self) -> tuple[int, int, int] | None:
        """(age, pages, slots) of the oldest instance that waits and the first of its passes that do."""
        waiting = ((work, need) for work, need in self.waiting if not work.ended and not work.started)
        first = min(waiting, key=lambda w: w[0].instance.age, default=None)
        return (first[0].instance.age, first[1], self._slots(first[0])) if first is not None else None

    def _slots(self, work: Waiter) -> int:
        return slots_needed(work) if self._states is not None and isinstance(work, Pass) else 0

    def _mostly_there(self, work: Pass) -> bool:
        """Whether shared pages leave so few tokens of a long pass that it counts as a short one."""
        return work.reuse and find_pages(work, self._cache) and work.to_compute <= self._short

    def prefill_waits(self) -> bool:
        """Whether a pass that is more than a few tokens is next in its pipeline."""
        entries = (pipe.queue[0] for instance in self.instances for pipe in instance.active)
        return any(isinstance(entry, Pass) and entry.size > self._short for entry in entries)

    def _turns(self) -> list[Pipeline]:
        """Every pipeline with entries: one of each instance, then the second of each, and so on; the same between tenants."""
        by_tenant: dict[str, list[list[Pipeline]]] = {}
        for instance in self.instances:
            by_tenant.setdefault(instance.tenant, []).append(list(instance.active))
        if len(by_tenant) == 1:
            return _in_turn(next(iter(by_tenant.values())))
        self._tenants = {t: None for t in (*self._tenants, *by_tenant) if t in by_tenant}
        return _in_turn([_in_turn(by_tenant[tenant]) for tenant in self._tenants])

    def _rotate(self, step: Step) -> None:
        """Who was served in a step that could not take everything goes to the back."""
        for work in step.touched:
            instance = work.instance
            if instance.tenant in self._tenants:
                del self._tenants[instance.tenant]
                self._tenants[instance.tenant] = None
            if instance in self.instances:
                del self.instances[instance]
                self.instances[instance] = None
            if work.pipe in instance.active:
                del instance.active[work.pipe]
                instance.active[work.pipe] = None

    def _take(self, pipe: Pipeline, work: Pass, step: Step, count: int) -> None:
        if not work.started:
            for part in work.parts:
                part.undo = (part.ws.length, part.ws.frozen)
                part.keep_state()
                if not work.reuse:
                    part.ws.public = min(part.ws.public, part.ws.length)
            if work.size > len(work.parts):
                claim_pages(work, self._cache)
                step.reused_tokens += work.skip
                attach_pages(work)
            for part in work.parts:
                part.ws.reserve(part.n - part.done, self._copy_page)
                part.ws.written_by(work)
        step.add(work, count)
        if work.final:
            pipe.queue.popleft()
            pipe.flying.append(work)

    def _admit(self, work: Pass, step: Step) -> bool | None:
        """None: may run in `step`. False: not yet. True: it can never run, was failed and left its queue."""
        error: EngineError | None = None
        try:
            if not self._ready(work, step.number) or (self._states is not None and not self._state_ready(work, step, self._states)):
                return False
        except EngineError as cause:
            error = cause.kept()
        if error is None:
            return None
        work.pipe.queue.popleft()
        work.fail(error)
        self.changed = True
        return True

    def _ready(self, work: Pass, number: int) -> bool:
        """Raises the EngineError for which the pass can never run."""
        asleep = False  # a set that was paused has to come back first
        for part in work.parts:
            ws = part.ws
            if not ws.order.may_run(part.ticket) or not ws.born:
                return False
            if (ws.error is not None or ws.inherited) and (cause := ws.failure(work.seq)) is not None:
                raise cause
            if ws.last_step == number or not ws.next_is(work):
                return False
            asleep = asleep or ws.paused
        for use in work.uses:
            channel = use.channel
            cell = channel.head if use.uses_front else channel.tail
            if channel.poison is not None and (poison := channel.refusal(cell)) is not None:
                raise poison
            if use.ticket >= 0 and not channel.order.may_run(use.ticket):
                return False
            if use.uses_front and not channel.full_for(number):
                return False
            if use.puts and not use.takes and not channel.room():
                return False
        if not work.pipe.may_run(work, number):
            return False
        if asleep:
            self._revive(work)
            return False
        return work.started or ((work.size == len(work.parts) or find_pages(work, self._cache)) and self._pages(work))

    def _revive(self, work: Pass) -> None:
        """Compute the paused sets of a pass again, which nothing else holds up. Raises what `_check` raises: then they stay as they are."""
        self._check(work)
        for part in work.parts:
            ws = part.ws
            if ws.paused and ws not in work.instance.revivals:
                Revival(ws, work)
                self.changed = True

    def _state_ready(self, work: Pass, step: Step, states: StatePool) -> bool:
        """Whether there are slots for the states of the pass, and its replayed tokens fit. Raises OutOfSlots, InvalidState."""
        if work.started:
            return True
        kept, promise, reserve = 0, self.promise, self._reserve  # for whom others make room, as with pages
        if promise is None or promise[0] is not work:
            kept = self._slots(promise[0]) if promise is not None else 0
            if reserve is not None and work.instance.age > reserve[0]:
                kept += reserve[2]
        if not slots_free(work, states, kept):
            self.waiting.append((work, self._need))
            return False
        first = fold_before(work, self._limits)
        if not all(step.fold(work, part) for part in first) and self._overdue is None:
            self._overdue = work  # at the head of the next step there is room
        return not first

    def _check(self, work: Pass) -> None:
        """What is wrong with a pass for good, as its sets are now. Raises ContextLengthExceeded, OutOfPages, InvalidState, InvalidPass."""
        limits = self._limits
        most = min(self._pool.total, work.instance.max_pages)
        tables = 0
        for part in work.parts:
            ws = part.ws
            total = ws.length + part.n
            if total > limits.context:
                raise ContextLengthExceeded(
                    f"the sequence holds {ws.length} tokens and the pass adds {part.n}: {total} exceed the context of "
                    f"{limits.context_text}",
                    length=ws.length,
                    tokens=part.n,
                    context=limits.context,
                )
            if ws.buffered and work.geometry.mode == "folding":
                raise InvalidState(f"a folding pass on a working set with {ws.buffered} buffered tokens: commit or discard them first")
            if work.geometry.shaped or ws.parents is not None:
                check_fit(work.geometry, ws, part.n, part.n if work.embed is not None else part.tail, limits)
            pages = pages_for(total)
            tables += pages
            if pages > most:
                raise OutOfPages(
                    f"the sequence needs {pages} KV pages, more than the {most} that it could ever have", needed=pages, total=most
                )
        if tables > limits.table_words:
            raise InvalidPass(f"the page tables of {len(work.parts)} working sets take {tables} words, a step has {limits.table_words}")

    def _pages(self, work: Pass) -> bool:
        """Whether the pages of a whole pass are free for it. Raises what `_check` raises, and OutOfPages."""
        self._check(work)
        pool, owner = self._pool, work.instance
        need = mine = 0  # pages to take from the pool, and those new to the instance
        for part, found in zip(work.parts, work.found, strict=True):
            ws = part.ws
            if found:
                pages = pages_for(ws.length + part.n)
                fresh = pages - ws.length // PAGE_TOKENS - len(found)
                need += fresh + sum(1 for page in found if not pool.refs(page))
                mine += fresh + sum(1 for page in found if page not in owner.held)
            else:
                fresh = ws.pages_needed(part.n)
                need += fresh
                mine += fresh
        self._need = need
        if not mine and not need:
            return True
        if owner.max_pages < pool.total and (held := owner.pages + owner.set_aside(work.revives)) + mine > owner.max_pages:
            raise OutOfPages(
                f"the instance holds {held} KV pages and the pass needs {mine} more; its limit is {owner.max_pages}",
                needed=mine,
                held=held,
                limit=owner.max_pages,
            )
        if need > pool.total:
            raise OutOfPages(f"the pass needs {need} KV pages at once, the pool has {pool.total}", needed=need, total=pool.total)
        if self._free_for(owner, work) >= need:
            return True
        self.waiting.append((work, need))
        return False

    def _edit(self, edit: WaitingEdit) -> bool:
        """Make an edit that waited for pages, if it can be; whether it has left its queue."""
        need = 0 if edit.useless else len(edit.shared())
        if self._free_for(edit.instance, edit) < need:
            self.waiting.append((edit, need))
            return False
        edit.pipe.queue.popleft()
        if edit.useless:
            edit.give_up()
        else:
            edit.make()
        self.changed = True
        edit.instance.moved()
        return True

    def _free_for(self, owner: Instance, work: Waiter) -> int:
        """Free pages less what others come first for: the pass that pages were made free for, the oldest instance that waits, and,
        for a newcomer, one page for each instance at work, so that those who started can finish."""
        free = self._pool.free
        promise = self.promise
        if promise is not None:
            if promise[0] is work:
                return free
            free -= promise[1]
        if work.revives is not None:  # not to be paused again at once
            free -= sum(len(other.active) for other in self.instances)
        if self._reserve is not None and owner.age > self._reserve[0]:
            free -= self._reserve[1]
        if not owner.pages and work.to_compute > 1:
            free -= sum(1 for other in self.instances if other.pages)
        return free
