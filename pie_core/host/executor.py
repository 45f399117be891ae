"""Executor: carries out the posts of one inferlet on the engine's loop and collects the events that answer them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidState
from pie_core.engine.forward import Pass, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.values import Value
from pie_core.engine.working_set import EDIT, WorkingSet
from pie_core.host.deadlock import NOBODY_SENDS, Deadlock, blocked, deadlock
from pie_core.host.handles import Handles
from pie_core.host.ops import OPS, Payload
from pie_core.host.port import GuestPort
from pie_core.host.services import LogSink
from pie_core.host.table import ChannelEntry
from pie_core.host.wire import rejected, settled, value_json

_logger = logging.getLogger(__name__)

SLICE = 0.005  # seconds of one inferlet's posts in a turn of the loop: others have theirs in between

Sink = Callable[[Value | None, EngineError | None], None]


class Executor:
    """Everything runs on the engine's loop. `poke` is called when something settled, `sent` with each value for the client.

    Posts are carried out in their order, in slices: a submit whose program has to be compiled, and what was posted behind it, waits for its
    turn (`engine.turns`)."""

    def __init__(
        self,
        instance: Instance,
        port: GuestPort,
        poke: Callable[[], None],
        sent: Callable[[Any, int], None],
        on_log: LogSink | None,
        *,
        receives: bool = True,
    ) -> None:
        self._instance = instance
        self._port = port
        self._poke = poke
        self._sent = sent
        self._on_log = on_log
        self._receives = receives
        self._handles = Handles()
        self._outputs: dict[int, list[Sink]] = {}  # outputs of passes in flight, with the commits that wait for each
        self._fresh: dict[int, tuple[Value | None, EngineError | None]] = {}  # settled outputs that the guest has not heard of
        self._events: list[str] = []
        self._settled: set[int] = set()  # ids of the events that were not taken yet
        self._awaited: dict[int, str] = {}  # what futures in flight, other than outputs, bring
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._receivers: OrderedDict[int, None] = OrderedDict()  # in the order of their calls
        self.inbox: deque[str] = deque()
        self._closed = False
        self.behind = False  # posts wait for a later turn of the loop
        self._loop = asyncio.get_running_loop()
        instance.moved = poke
        self.fault: Exception | None = None
        port.working_set = self._handles.sets.get

    # --- for the process

    def drain(self) -> None:
        """Carry out what was posted: as much as one turn of the loop has room for. `behind` says that the rest follows by itself."""
        posts = self._port.take_posts()
        if self.behind or not posts:
            return
        until = time.perf_counter() + SLICE
        try:
            while posts:
                name, fields = posts[0]
                if name == "submit" and not self._knows(fields) and not self._instance.engine.turns.ask(self._go_on):
                    self.behind = True
                    return
                posts.popleft()
                _OPS[name](self, fields)
                self._port.carried_out += 1
                if posts and time.perf_counter() >= until:
                    self.behind = True
                    self._loop.call_soon(self._go_on)
                    return
        except Exception as error:  # a fault of the host's own: the inferlet must end, not wait for an answer that was lost
            _logger.exception("a posted op failed")
            self.fault = error.with_traceback(None)  # whose frames hold this
            posts.clear()
            self._poke()

    def _go_on(self) -> None:
        """It is the turn of the posts that waited."""
        self.behind = False
        if not self._closed:
            self.drain()
            if not self.behind:
                self._poke()  # who waits looks again: now it can be said what may settle

    def _knows(self, fields: Payload) -> bool:
        """Whether a submit finds its program compiled, or refused before."""
        program = self._handles.programs.get(fields["prog"])
        return program is None or self._instance.closed or self._instance.engine.knows(program)

    def finish(self) -> None:
        """The inferlet has ended: carry out what it posted last, since what was sent belongs to the output, but run no program that has yet
        to be compiled. What is posted behind one counts on its pass, and goes with it."""
        posts = self._port.take_posts()
        self.behind = False
        skipped = False
        try:
            while posts:
                name, fields = posts.popleft()
                skipped = skipped or (name == "submit" and not self._knows(fields))
                if not skipped or name in ("send", "log"):
                    _OPS[name](self, fields)
        except Exception:  # a fault of the host's own; the rest of the end has to happen
            _logger.exception("a posted op failed")
            posts.clear()

    def in_flight(self, named: set[int]) -> set[int]:
        """Of the futures that the guest says it waits for those that there are, or that settled and are not told yet: what it makes up
        would be looked for at each event."""
        if len(named) == 1:
            return named
        outstanding, settled = self._port.table.outstanding, self._settled
        return {future for future in named if future in settled or outstanding(future)}

    def has_any(self, awaited: set[int]) -> bool:
        """Whether an awaited future has settled."""
        return not self._settled.isdisjoint(awaited)

    def tell_deadlock(self, awaited: set[int]) -> bool:
        """Nothing that is awaited can settle: raise Deadlock at the awaits, in the inferlet's own code, where the line is known and it
        may go on. `receive`s go first: what else is awaited may follow from what the program does then. The futures stay in flight, since
        that may also bring their values. False when nothing that is awaited is in flight."""
        outstanding = self._port.table.outstanding
        told = [future for future in self._receivers if future in awaited] or sorted(filter(outstanding, awaited))
        why = blocked(self._instance)
        for future in told:
            if future in self._receivers:
                error = Deadlock(NOBODY_SENDS)
            else:
                awaited_text = "the output of a pass" if future in self._outputs else self._awaited.get(future, "what is awaited")
                error = deadlock(awaited_text, why)
            self._events.append(rejected(future, error))
            self._settled.add(future)
        return bool(told)

    def may_settle(self, awaited: set[int]) -> bool:
        """Whether an awaited future can still settle without the inferlet doing something."""
        outstanding = self._port.table.outstanding
        waiting = [f for f in awaited if outstanding(f) and (self._receives or f not in self._receivers)]
        if not waiting:
            return False
        if self.behind or any(f in self._timers or f in self._receivers for f in waiting):
            return True
        return not self._instance.stuck()

    def take_events(self) -> str:
        """All events so far as the JSON text of a resume."""
        events, self._events = self._events, []
        self._settled.clear()
        if not self.behind:  # else a commit that waits may still name one
            self._fresh.clear()
        return f"[{','.join(events)}]"

    def deliver(self, value: str) -> None:
        """JSON text of a value of the client."""
        if self._receivers:
            self._port.settled_futures += 1
            self._resolve(self._receivers.popitem(last=False)[0], value)
        else:
            self.inbox.append(value)

    def close(self) -> None:
        """Stop timers; nothing settles any more."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._receivers.clear()
        self._fresh.clear()
        self._instance.moved = _nobody
        self._poke, self._sent, self._on_log = _nobody, _nobody, None  # they hold the process, which holds this

    # --- events

    def _resolve(self, future: int, value: str) -> None:
        self._settle(future, settled(future, value))

    def _reject(self, future: int, error: EngineError) -> None:
        self._settle(future, rejected(future, error))

    def _settle(self, future: int, event: str) -> None:
        if self._closed:
            return
        self._port.table.settle(future)
        self._events.append(event)
        self._settled.add(future)
        self._poke()

    def _sink(self, future: int, value: Value | None, error: EngineError | None) -> None:
        """Settle one future that is not a pass output."""
        self._port.settled_futures += 1
        self._awaited.pop(future, None)
        if error is not None:
            self._reject(future, error)
        else:
            self._resolve(future, "null" if value is None else value_json(value))

    # --- working sets

    def _ws_new(self, p: Payload) -> None:
        try:
            self._handles.sets[p["ws"]] = self._instance.working_set(reuse=p["reuse"])
        except EngineError as error:
            self._handles.refuse(p["ws"], error)

    def _ws_fork(self, p: Payload) -> None:
        try:
            pipe = self._handles.pipe(p["pipe"]) if p["pipe"] is not None else None
            self._handles.sets[p["ws"]] = self._instance.fork(self._handles.set(p["of"]), pipe, buffer=p["buffer"])
        except EngineError as error:
            self._handles.refuse(p["ws"], error)

    def _ws_drop(self, p: Payload) -> None:
        ws = self._handles.drop(p["ws"])
        if ws is not None and not self._instance.closed:  # else it is free already
            self._instance.drop(ws)

    def _edit(self, p: Payload, edit: Callable[[WorkingSet], None]) -> None:
        """Change a set. What refuses it has nobody to tell now and is told by the next use, like why a set could not be made."""
        ws = self._handles.sets.get(p["ws"])
        if ws is not None:
            try:
                edit(ws)
            except EngineError as error:
                ws.fail(error, EDIT, self._instance.engine.accept())

    def _ws_commit(self, p: Payload) -> None:
        self._edit(p, partial(self._commit, p["n"]))

    def _commit(self, what: Any, ws: WorkingSet) -> None:
        if not isinstance(what, dict):
            self._instance.commit(ws, what)
            return
        if "ch" in what:
            self._instance.commit(ws, self._handles.channel(what["ch"]))
            return
        settle = self._instance.commit_later(ws)
        try:
            if what["out"] in self._fresh:
                settle(*self._fresh[what["out"]])
            elif what["out"] in self._outputs:
                self._outputs[what["out"]].append(settle)
            else:
                raise InvalidState(f"ws.commit: {what['out']} is no output of a submitted pass that has not been delivered yet")
        except EngineError as error:
            settle(None, error)

    def _ws_discard(self, p: Payload) -> None:
        self._edit(p, lambda ws: self._instance.discard(ws, p["n"]))

    def _ws_truncate(self, p: Payload) -> None:
        self._edit(p, lambda ws: self._instance.truncate(ws, p["n"]))

    def _ws_save(self, p: Payload) -> None:
        self._awaited[p["f"]] = "the saved working set"
        try:
            self._instance.save(self._handles.set(p["ws"]), p["name"], partial(self._sink, p["f"]))
        except EngineError as error:
            self._sink(p["f"], None, error)

    def _ws_open(self, p: Payload) -> None:
        try:
            self._handles.sets[p["ws"]] = self._instance.open(p["name"], partial(self._sink, p["f"]))
        except EngineError as error:
            self._handles.refuse(p["ws"], error)
            self._sink(p["f"], None, error)

    def _ws_length(self, p: Payload) -> None:
        self._ask(p, "the length of the working set", self._instance.length)

    def _ws_cached(self, p: Payload) -> None:
        self._ask(p, "the number of cached tokens of the working set", self._instance.cached)

    def _ask(self, p: Payload, what: str, ask: Callable[[WorkingSet, Sink], None]) -> None:
        self._awaited[p["f"]] = what
        try:
            ask(self._handles.set(p["ws"]), partial(self._sink, p["f"]))
        except EngineError as error:
            self._sink(p["f"], None, error)

    def _prewarm(self, p: Payload) -> None:
        self._awaited[p["f"]] = "prewarm()"

        def sink(n: int | None, error: EngineError | None) -> None:
            self._port.settled_passes += 1
            self._sink(p["f"], n, error)

        try:
            self._instance.prewarm(p["ids"], sink)
        except EngineError as error:
            sink(None, error)

    # --- pipelines and channels

    def _pipe_new(self, p: Payload) -> None:
        try:
            self._handles.pipes[p["pipe"]] = self._instance.pipeline()
        except EngineError as error:
            self._handles.refuse(p["pipe"], error)

    def _pipe_close(self, p: Payload) -> None:
        pipe = self._handles.pipes.pop(p["pipe"], None)
        if pipe is not None:
            self._instance.close_pipeline(pipe)

    def _pipe_stop_when(self, p: Payload) -> None:
        try:
            self._handles.pipe(p["pipe"]).stop_when(self._handles.channel(p["ch"]))
        except EngineError as error:  # a pipeline that does not stop where it should must not run at all
            self._handles.refuse(p["pipe"], error)
            self._pipe_close(p)

    def _ch_new(self, p: Payload) -> None:
        try:
            self._handles.channels[p["ch"]] = self._instance.channel(p["dtype"], p["shape"], p["capacity"], seed=p["seed"], host=p["host"])
        except EngineError as error:
            self._handles.refuse(p["ch"], error)

    def _ch_drop(self, p: Payload) -> None:
        channel = self._handles.drop_channel(p["ch"])
        if channel is not None:
            self._instance.drop_channel(channel)

    def _ch_put(self, p: Payload) -> None:
        self._write(p, self._instance.put)

    def _ch_set(self, p: Payload) -> None:
        self._write(p, self._instance.set)

    def _write(self, p: Payload, write: Callable[[Channel, Sequence[int]], None]) -> None:
        """Write a cell. What refuses it is told by the next use of the channel."""
        channel = self._handles.channels.get(p["ch"])
        if channel is not None:
            try:
                write(channel, p["words"])
            except EngineError as error:
                self._ch_drop(p)
                self._handles.refuse(p["ch"], error)

    def _ch_take(self, p: Payload) -> None:
        self._receive_from(p, True)

    def _ch_read(self, p: Payload) -> None:
        self._receive_from(p, False)

    def _receive_from(self, p: Payload, take: bool) -> None:
        try:
            channel = self._handles.channel(p["ch"])
            self._awaited[p["f"]] = f"{'take()' if take else 'read()'} of the {channel.describe()}"
            self._instance.receive(channel, take, partial(self._sink, p["f"]))
        except EngineError as error:
            self._sink(p["f"], None, error)

    # --- passes

    def _program(self, p: Payload) -> None:
        self._handles.programs[p["prog"]] = p["program"]

    def _program_drop(self, p: Payload) -> None:
        del self._handles.programs[p["prog"]]

    def _submit(self, p: Payload) -> None:
        outs: list[int] = p["outs"]
        entries: list[ChannelEntry] = []

        def sink(work: Pass | None, values: list[Value] | None, error: EngineError | None) -> None:
            self._port.settled_passes += 1
            for entry in entries:
                if work is None or work.undone:
                    entry.returned += 1
                else:
                    entry.consumed += 1
            got: Sequence[Value | None] = values or [None] * len(outs)
            for future, value in zip(outs, got, strict=True):
                if error is not None:
                    self._reject(future, error)
                else:  # null: the end of a pass without outputs
                    self._resolve(future, "null" if value is None else value_json(value))
                self._fresh[future] = (value, error)
                for settle in self._outputs.pop(future, ()):
                    settle(value, error)
            self._poke()

        try:
            first, like = p.get("first"), p.get("spec")
            if like is not None:  # the same pass as before with another token: its handles stand for the same
                spec = PassSpec(p["tokens"], like.state, like.geometry, like.reads, like.program, like.params, like.channels)
            else:
                spec, entries = self._spec(p)
                if first is not None and not entries:
                    first["spec"] = spec
            self._outputs.update((future, []) for future in outs)
            self._instance.submit_with(self._handles.pipe(p["pipe"]), spec, sink)
        except EngineError as error:
            refusal = error.kept()
        else:
            return
        for ws in filter(None, map(self._handles.sets.get, p["ws"])):  # what is posted already counts on the pass
            if not self._instance.closed:
                self._instance.refused(ws, refusal)
        sink(None, None, refusal)

    def _spec(self, p: Payload) -> tuple[PassSpec, list[ChannelEntry]]:
        channels = [self._handles.channel(key) for key in p["chans"]]
        tokens: Any = p["tokens"]
        program = self._handles.programs[p["prog"]] if p["prog"] is not None else None
        if isinstance(tokens, dict):
            tokens = self._handles.channel(tokens["ch"])
        entries: list[ChannelEntry] = p["written"]
        spec = PassSpec(tokens, [self._handles.set(key) for key in p["ws"]], p["geo"], p["reads"], program, p["params"], channels)
        return spec, entries

    # --- the rest

    def _send(self, p: Payload) -> None:
        self._sent(p["value"], p["size"])

    def _log(self, p: Payload) -> None:
        if self._on_log is not None:
            self._on_log(p["level"], p["text"])

    def _sleep(self, p: Payload) -> None:
        future = p["f"]

        def wake() -> None:
            del self._timers[future]
            self._sink(future, None, None)

        self._timers[future] = asyncio.get_running_loop().call_later(p["ms"] / 1000, wake)

    def _receive(self, p: Payload) -> None:
        self._receivers[p["f"]] = None
        if self.inbox:
            self.deliver(self.inbox.popleft())


def _nobody(*_: object) -> None:
    """Hears nothing."""


# By op, for all executors: functions, since bound methods that an executor kept would be a cycle for each inferlet.
_OPS: dict[str, Callable[[Executor, Payload], None]] = {
    name: getattr(Executor, f"_{name.replace('.', '_')}") for name, op in OPS.items() if op.kind != "sync" or name == "log"
}
