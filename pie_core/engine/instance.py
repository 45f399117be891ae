"""Instance: what one request owns in the engine (working sets, pipelines, channels), freed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pie_core.engine.channel import Channel, HostRole, check_channel
from pie_core.engine.channel_uses import waits_for_its_own
from pie_core.engine.errors import BudgetExceeded, EngineError, InstanceClosed, InvalidState
from pie_core.engine.forward import Pass, PassSink, PassSpec
from pie_core.engine.pages import PageOwner
from pie_core.engine.pipeline import ForkEntry, Pipeline
from pie_core.engine.recurrent import RecurrentState
from pie_core.engine.reuse import prewarm
from pie_core.engine.saved_sets import check_name
from pie_core.engine.set_requests import LateCommit, ask, check_owned, commit, discard, edit, refuse, truncate
from pie_core.engine.submission import accept
from pie_core.engine.values import Value, elements
from pie_core.engine.working_set import WorkingSet, pages_for

if TYPE_CHECKING:
    from pie_core.engine.loop import Engine
    from pie_core.engine.pausing import Revival


def _nobody() -> None:
    """Hears nothing."""


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """Caps of one instance. `pages` None: the whole pool."""

    pages: int | None = None
    outstanding: int = 1024  # passes accepted and not ended
    handles: int = 8192  # working sets, pipelines and channels alive
    cell_words: int | None = None  # arena words of all channels; None: the whole arena


class Instance(PageOwner):
    """Every method runs on the engine's loop. `age` grows with each instance opened. `reuse`: whether its passes share pages with
    other passes of its tenant (a pass can refuse by itself)."""

    __slots__ = (
        "active", "age", "busy", "cause", "cell_words", "channels", "closed", "engine", "limits", "moved", "name",
        "outstanding", "pipelines", "reuse", "revivals", "root", "stopping", "tenant", "working_sets",
    )  # fmt: skip

    def __init__(self, engine: Engine, name: str, tenant: str, limits: InstanceLimits, age: int, *, reuse: bool = True) -> None:
        super().__init__(engine.pool.total if limits.pages is None else limits.pages)
        self.engine = engine
        self.name = name
        self.tenant = tenant
        self.limits = limits
        self.moved: Callable[[], None] = _nobody  # called when a fork or an edit ran that waited: what else waits may be stuck now
        self.age = age
        self.closed = False
        self.cause: EngineError | None = None  # why it was closed
        self.outstanding = 0
        self.busy = 0  # saves and opens that go on
        self.root = engine.cache.root(tenant)  # where the names of its pages start
        self.reuse = reuse and engine.states is None  # pages of a prefix do not bring its recurrent state
        self.revivals: dict[WorkingSet, Revival] = {}  # paused sets that are computed again now
        self.active: dict[Pipeline, None] = {}  # pipelines with queued entries
        self.pipelines: dict[Pipeline, None] = {}
        self.stopping: dict[Pipeline, None] = {}  # those of them that have a stop channel
        self.working_sets: dict[WorkingSet, None] = {}
        self.channels: dict[Channel, None] = {}
        self.cell_words = 0  # of their rings

    # --- handles

    def working_set(self, *, reuse: bool = True) -> WorkingSet:
        """A new, empty working set. Without `reuse` it neither takes pages from the cache nor leaves any there, nor do its forks."""
        self._room()
        ws = self.new_set(reuse=reuse)
        self.working_sets[ws] = None
        return ws

    def fork(self, ws: WorkingSet, pipe: Pipeline | None = None, *, buffer: bool = False) -> WorkingSet:
        """A working set that shares the frozen prefix of `ws` (and its buffer when asked), after the passes on `ws` that were accepted
        so far, and after what `pipe` has accepted. No tokens are copied. Raises InvalidState."""
        self.touch(ws)
        self._room()
        if pipe is not None:
            self.engine.predictor.drop(pipe.habit.guess)
        child = self.new_set(born=False, reuse=ws.reuse)
        self.working_sets[child] = None
        if pipe is not None and not ws.shared and ws.pipe in (None, pipe):  # else its order is not that of the passes
            entry = ForkEntry(pipe, ws, child, buffer)
            if not pipe.queue and entry.ready():
                entry.run()
            else:
                self.enqueue(pipe, entry)
            return child

        seq = self.engine.accept()

        def run() -> None:
            if not child.dropped:
                if ws.failure(seq) is not None:
                    child.fail_as(ws)
                    child.be_born()
                else:
                    ws.fork_into(child, buffer=buffer)

        ws.order.run(run)
        return child

    def commit(self, ws: WorkingSet, what: int | Sequence[int] | Channel) -> None:
        """Freeze buffered tokens, after the passes accepted so far. `what`: how many of the first; or their indices in the buffer from
        the root of a tree to a leaf, then the rest is dropped; or a host-reader channel whose next cell, which is taken, says either: a
        whole number, or indices that end where the cell does or before a negative one. Passes on `ws` accepted later
        wait for the cell; those behind a count and a `discard()` of the rest need not (see slack.py)."""
        if isinstance(what, Channel):
            late = LateCommit(self, ws, what)
            try:
                self.receive(what, True, late.settle)
            except EngineError as error:
                late.settle(None, error)
                raise
        else:
            edit(self, ws, lambda: commit(self, ws, what))

    def refused(self, ws: WorkingSet, error: EngineError) -> None:
        """A pass on `ws` was refused by `error`, and whoever submits what comes behind it may not have heard. Raises InvalidState."""
        refuse(self, ws, error)

    def commit_later(self, ws: WorkingSet) -> Callable[[Value | None, EngineError | None], None]:
        """`commit` by a value that is not known yet: call what this returns, once, with the value or an error."""
        return LateCommit(self, ws).settle

    def save(self, ws: WorkingSet, name: str, sink: Callable[[int | None, EngineError | None], None]) -> None:
        """Keep the set under `name` for this tenant, as it is after the passes accepted so far; `sink` gets its tokens, or the error.
        The save asked for last wins. Raises InvalidState for a bad name."""
        check_name(name)
        self.engine.saved.save(self, ws, name, sink)

    def open(self, name: str, sink: Callable[[int | None, EngineError | None], None]) -> WorkingSet:
        """The set that was saved as `name`; it can be used at once, `sink` gets its tokens when it is there, or the error.
        Raises InvalidState for a bad name."""
        check_name(name)
        self._room()
        ws = self.new_set(born=False)
        self.working_sets[ws] = None
        self.engine.saved.open(self, ws, name, sink)
        return ws

    def discard(self, ws: WorkingSet, n: int | None = None) -> None:
        """Drop the last `n` buffered tokens, or all of them, after the passes accepted so far."""
        discard(self, ws, n)

    def truncate(self, ws: WorkingSet, length: int) -> None:
        """Cut back to `length`, after the passes accepted so far; a failed set goes on so, from what it was before."""
        truncate(self, ws, length)

    def length(self, ws: WorkingSet, sink: Callable[[Value | None, EngineError | None], None]) -> None:
        """Tell `sink` the length, after the passes accepted so far."""
        self.ask(ws, lambda _: sink(ws.length, None), sink)

    def cached(self, ws: WorkingSet, sink: Callable[[Value | None, EngineError | None], None]) -> None:
        """Tell `sink` how many of its tokens came out of the cache, after the passes accepted so far."""
        self.ask(ws, lambda _: sink(ws.cached, None), sink)

    def prewarm(self, ids: Sequence[int], sink: Callable[[int | None, EngineError | None], None]) -> None:
        """Compute and cache the full pages of `ids` that are not cached yet, for whatever of this tenant begins with them later (see
        `reuse.prewarm`); `sink` gets how many of the tokens are cached then. Raises InvalidPass, ContextLengthExceeded, BudgetExceeded."""
        prewarm(self, ids, sink)

    def drop(self, ws: WorkingSet) -> None:
        """Free the pages, after the passes accepted so far; the handle is gone at once."""
        self.touch(ws)
        ws.leaving = True

        def run() -> None:
            if ws in self.working_sets:  # else the instance was closed
                if ws in self.revivals:
                    self.revivals[ws].cancel()
                del self.working_sets[ws]
                ws.drop()
                ws.let_go()

        ws.order.run(run)
        self.engine.poke()  # an edit that waits for pages is not needed any more, if it was the last

    def pipeline(self) -> Pipeline:
        """A new pipeline."""
        self._room()
        pipe = Pipeline(self)
        self.pipelines[pipe] = None
        return pipe

    def close_pipeline(self, pipe: Pipeline) -> None:
        """No more submits to `pipe`; what it accepted still settles."""
        pipe.close()

    def channel(
        self, dtype: str, shape: Sequence[int] = (), capacity: int = 1, *, seed: Iterable[int] | None = None, host: HostRole = None
    ) -> Channel:
        """A new channel. `seed`: words of its first cell; `host`: "reader", "writer" or None. Raises ChannelError, BudgetExceeded,
        ArenaFull."""
        self._room()
        check_channel(dtype, tuple(shape), capacity, host)
        self._room_for_cells(elements(shape) * (capacity + 1))
        engine = self.engine
        channel = Channel(engine.arena, engine.runner.write_arena, dtype, tuple(shape), capacity, seed=seed, host=host)
        self.channels[channel] = None
        self.cell_words += channel.words
        return channel

    def drop_channel(self, channel: Channel) -> None:
        """Let go of a channel: no more uses. What was accepted goes on; then the cells are free. Twice is harmless."""
        if channel.dropped or channel not in self.channels:
            return
        guess = channel.pipe.habit.guess if channel.pipe is not None else None
        if guess is not None and any(use.channel is channel for use in guess.lane_uses):
            self.engine.predictor.drop(guess)
        channel.drop()
        self.free_channel(channel)
        self.engine.poke()  # a pass may wait for the room

    def free_channel(self, channel: Channel) -> None:
        """Give the cells of a dropped channel back, if nothing needs them any more."""
        if channel.dropped and not channel.needed and channel in self.channels:
            del self.channels[channel]
            self.cell_words -= channel.words
            channel.close(InvalidState("the channel was dropped"))

    def put(self, channel: Channel, words: Iterable[int]) -> None:
        """Put one cell of u32 words. Raises ChannelFull, ChannelError."""
        self.check_open()
        channel.put(words)
        self.engine.poke()

    def set(self, channel: Channel, words: Iterable[int]) -> None:
        """Replace the committed front. Raises ChannelError."""
        self.check_open()
        channel.set(words)
        self.engine.poke()

    def take(self, channel: Channel) -> asyncio.Future[Value]:
        """The next value of a host-reader channel, removed."""
        return self._receive(channel, True)

    def read(self, channel: Channel) -> asyncio.Future[Value]:
        """The next value of a host-reader channel, left in place."""
        return self._receive(channel, False)

    def receive(self, channel: Channel, take: bool, sink: Callable[[Value | None, EngineError | None], None]) -> None:
        """`take` or `read` with a callback. Raises ChannelError."""
        self.check_open()

        def settle(value: Value | None, error: EngineError | None) -> None:
            self.engine.poke()  # a pass may wait for the room
            sink(value, error)

        channel.receive(take, settle)

    # --- passes

    def submit(self, pipe: Pipeline, spec: PassSpec) -> list[asyncio.Future[Value]]:
        """Hand a pass over; one future for each returned output (one of None when the pass has no epilogue).
        Raises InvalidPass, InvalidState, ChannelError, BudgetExceeded, EngineLost at once; other errors reject the futures."""
        loop = asyncio.get_running_loop()
        count = max(1, len(spec.program.outs)) if spec.program is not None else 1
        futures: list[asyncio.Future[Value]] = [loop.create_future() for _ in range(count)]

        def sink(_: Pass, values: list[Value] | None, error: EngineError | None) -> None:
            for k, future in enumerate(futures):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error.again())
                    future.exception()  # an output that nobody awaits is no fault of its own
                else:
                    future.set_result(values[k] if values else True)

        self.submit_with(pipe, spec, sink)
        return futures

    def submit_with(self, pipe: Pipeline, spec: PassSpec, sink: PassSink) -> Pass:
        """`submit` with one callback for the whole pass, called on the loop when it ends; it must not call the engine."""
        return accept(self, pipe, spec, sink)

    def idle(self, pipe: Pipeline) -> None:
        """The queue of `pipe` ran empty."""
        self.active.pop(pipe, None)
        pipe.retire()
        if not self.active:
            self.engine.scheduler.instances.pop(self, None)

    def stuck(self) -> bool:
        """Whether no queued pass can ever run unless this instance itself does something: nothing is in flight, and every
        pipeline's next entry waits for a cell or a working set, not for pages or a turn."""
        if not self.active or self.busy or any(pipe.flying for pipe in self.pipelines):
            return False
        return all(waits_for_its_own(pipe.queue[0]) for pipe in self.active)

    def close(self, cause: EngineError | None = None) -> None:
        """End everything: queued passes are cancelled, every page, cell and handle is free at once, results of passes in
        flight are dropped when they land. Who still waits gets `cause` (default: InstanceClosed). Twice is harmless."""
        if self.closed:
            return
        self.closed = True
        self.cause = cause = cause or InstanceClosed(f"instance {self.name!r} was closed")
        engine = self.engine
        for pipe in self.pipelines:
            pipe.closed = True
            engine.forget_return(pipe)
            for work in [*pipe.flying, *pipe.queue]:
                if isinstance(work, Pass):
                    work.abandon(cause)
            pipe.queue.clear()
        sets = list(self.working_sets)
        for ws in sets:
            ws.drop()
        for channel in self.channels:
            channel.close(cause)
        for pipe in self.active:  # of edits that wait for pages
            pipe.queue.clear()
        self.active.clear()
        self.working_sets.clear()
        for ws in sets:
            ws.order.end()
            ws.let_go()
        self.revivals.clear()
        self.pipelines.clear()
        self.stopping.clear()
        self.channels.clear()
        self.cell_words = 0
        engine.closed_instance(self)

    def check_open(self) -> None:
        """Raises why the instance was closed, if it was: EngineLost, EngineStopped, InstanceClosed."""
        if self.cause is not None:
            raise self.cause.again()

    # --- inside

    def _room(self) -> None:
        self.engine.check_alive()
        if self.closed:
            raise InstanceClosed(f"instance {self.name!r} is closed")
        handles = len(self.working_sets) + len(self.pipelines) - len(self.revivals) + len(self.channels)
        if handles >= self.limits.handles:
            raise BudgetExceeded(f"the instance holds {handles} handles, the most is {self.limits.handles}: drop some")

    def _room_for_cells(self, words: int) -> None:
        most = self.limits.cell_words
        if most is None or self.cell_words + words <= most:
            return
        leaving = sum(channel.words for channel in self.channels if channel.dropped)
        text = f"; {leaving} of them are of channels that were let go and that passes still use: await those first" if leaving else ""
        raise BudgetExceeded(
            f"a channel needs {words} words (a word an element, capacity + 1 cells), and {self.cell_words} of the {most} that one inferlet "
            f"may have are in use: use smaller cells or a smaller capacity, or let go of channels{text}",
            words=words,
            used=self.cell_words,
            cap=most,
        )

    def new_set(self, *, born: bool = True, reuse: bool = True) -> WorkingSet:
        """A set that is charged to this instance and is not in its table."""
        engine = self.engine
        state = RecurrentState(engine.states) if engine.states is not None else None
        return WorkingSet(engine.pool, engine.cache, self, self.root, engine.accept(), born=born, state=state, reuse=reuse)

    def touch(self, ws: WorkingSet) -> None:
        """`ws` is about to be looked at or changed by other than a pass."""
        check_owned(self, ws)
        self.engine.predictor.drop(ws.guess)

    def ask(self, ws: WorkingSet, answer: Callable[[int], None], sink: Callable[[int | None, EngineError | None], None]) -> None:
        """Call `answer` with the place of this call in the order of acceptance, after the passes on `ws` accepted so far; where the set
        has failed by then, or the instance was closed, `sink` gets the cause instead."""
        ask(self, ws, answer, sink)

    def _receive(self, channel: Channel, take: bool) -> asyncio.Future[Value]:
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()

        def sink(value: Value | None, error: EngineError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error.again())
                future.exception()
            elif value is not None:
                future.set_result(value)

        self.receive(channel, take, sink)
        return future

    def activate(self, pipe: Pipeline) -> None:
        """The queue of `pipe` has something in it."""
        self.active[pipe] = None
        self.engine.scheduler.instances[self] = None

    def set_aside(self, but: WorkingSet | None = None) -> int:
        """Pages that paused sets will need again; those of `but` not counted."""
        return sum(pages_for(ws.length) for ws in self.working_sets if ws.paused and ws is not but)

    def enqueue(self, pipe: Pipeline, entry: Pass | ForkEntry) -> None:
        """Put an accepted pass or fork at the end of its pipeline's queue."""
        pipe.queue.append(entry)
        self.activate(pipe)
        engine = self.engine
        engine.returned(pipe)
        engine.poke()
