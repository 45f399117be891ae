"""What an instance asks of a working set besides passes: edits and questions, in their place behind the passes accepted before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import DeviceError
from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidState, PassFailed, PassSkipped
from pie_core.engine.set_edits import ShortOfPages
from pie_core.engine.slack import Deferred, Slack
from pie_core.engine.values import Value, committed
from pie_core.engine.waiting_edit import WaitingEdit
from pie_core.engine.working_set import EDIT, PASS, WorkingSet

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance


class Edit:
    """A change of a working set in its place in the order. A call makes it, or lets it wait for pages; made once, it is let go."""

    __slots__ = ("_change", "_instance", "_seq", "_what", "_ws")

    def __init__(self, instance: Instance, ws: WorkingSet, change: Callable[[], None], what: str) -> None:
        self._instance, self._ws = instance, ws
        self._change: Callable[[], None] | None = change
        self._what = what
        self._seq = instance.engine.accept()

    def __call__(self) -> None:
        ws, change = self._ws, self._change
        try:
            if change is not None and not ws.dropped and ws.failure(self._seq) is None:
                change()
            self._change = None  # it may hold what holds this
        except ShortOfPages as short:
            WaitingEdit(self._instance, ws, short.places, again=self, refuse=self.refuse)
        except EngineError as error:
            self.refuse(error)
            self._change = None
        except DeviceError as error:
            ws.fail(PassFailed(f"the device reported {type(error).__name__}: {error}"), self._what, self._seq)
        self._instance.engine.poke()

    def refuse(self, error: EngineError) -> None:
        """It cannot be made. Nobody awaits an edit: every later use of the set raises the error."""
        self._ws.fail(error, self._what, self._seq, (self._ws.length, self._ws.frozen))


def edit(instance: Instance, ws: WorkingSet, change: Callable[[], None], what: str = EDIT) -> Edit:
    """Let `change` happen to `ws` after the passes accepted so far; nobody awaits it, so that a fault fails the set, as `what`. One that
    finds too few pages waits for them, and what comes behind it waits for it. Returns what was put in the order."""
    instance.touch(ws)
    made = Edit(instance, ws, change, what)
    ws.order.run(made)
    return made


def truncate(instance: Instance, ws: WorkingSet, length: int) -> None:
    """Cut back to `length`, after the passes accepted so far. Of a failed set: to what it was before, if it had so much, and then it has
    not failed any more."""
    instance.touch(ws)

    def mend() -> None:
        if not ws.dropped and ws.failure(instance.engine.accepted) is not None:
            ws.mend(length)

    ws.order.run(mend)
    edit(instance, ws, lambda: ws.truncate(length))


def refuse(instance: Instance, ws: WorkingSet, error: EngineError) -> None:
    """What a pass on `ws` that was refused by `error` means for what comes behind it."""

    def change() -> None:
        raise error.again()

    edit(instance, ws, change, PASS)


def ask(instance: Instance, ws: WorkingSet, answer: Callable[[int], None], sink: Callable[[int | None, EngineError | None], None]) -> None:
    """Call `answer` with the place of this call in the order of acceptance, after the passes on `ws` accepted so far; where the set
    has failed by then, or the instance was closed, `sink` gets the cause instead."""
    instance.touch(ws)
    seq = instance.engine.accept()

    def run() -> None:
        cause = instance.cause or ws.failure(seq)
        if cause is not None:
            sink(None, cause)
        else:
            answer(seq)

    ws.order.run(run)


def commit(instance: Instance, ws: WorkingSet, what: int | Sequence[int]) -> None:
    """Freeze the first tokens of the buffer, or a path through it. Now: whoever calls it is ordered. Raises InvalidState, OutOfPages,
    ShortOfPages."""
    if isinstance(what, int):
        ws.commit(what)
    else:
        runner = instance.engine.runner
        ws.commit_path(what, runner.copy_page, runner.move_slots)


class LateCommit:
    """A commit by a value that is on its way. It happens when the value is there (`settle`) and the passes before it have ended; one by a
    count in a channel, with the discard of the rest behind it, as soon as they are scheduled, where the set allows it (see slack.py).
    The value of a pass that a stop cancelled commits nothing: the pass added nothing to the buffer either."""

    __slots__ = ("_deferred", "_drops", "_early", "_fault", "_instance", "_run", "_seq", "_ticket", "_value", "_ws")

    def __init__(self, instance: Instance, ws: WorkingSet, counts: Channel | None = None) -> None:
        """`counts`: the host-reader channel whose next cell is the value."""
        instance.touch(ws)
        self._instance, self._ws = instance, ws
        self._value: int | Sequence[int] | None = None
        self._fault: EngineError | None = None  # why there is none
        self._seq = instance.engine.accept()
        self._deferred = Deferred(counts, counts.next_take()) if counts is not None else None
        self._drops = False  # what the value leaves over is discarded
        self._early = False
        self._ticket = ws.order.enter(value=True)
        self._run: Edit | None = edit(instance, ws, self._happen)  # until it is settled
        ws.last_commit = self

    def discard(self) -> bool:
        """Drop the rest of the buffer with the commit. False: something else has come in between, or the value is no count."""
        ws, deferred = self._ws, self._deferred
        if self._run is None or deferred is None or deferred.channel.shape or deferred.channel.dtype not in ("u32", "i32"):
            return False
        if ws.slack is None:
            ws.slack = Slack(self._instance.engine.arena)
        before, self._drops = self._drops, True  # it may happen in the next call
        if not ws.order.amend(self._run, self._run, self._defer):
            self._drops = before
            return False
        return True

    def settle(self, value: Value | None, error: EngineError | None) -> None:
        """The value is there, or will never be. To be called once."""
        ws, deferred = self._ws, self._deferred
        pending = self._early and ws.slack is not None and deferred in ws.slack.pending
        if error is None:
            try:
                what = committed(value)
                if not self._early:
                    self._value = what
                elif pending and deferred is not None and isinstance(what, int):
                    ws.settle_commit(deferred, what)
            except EngineError as fault:
                error = fault.again()
        if isinstance(error, PassSkipped):  # the pass that counts was cancelled
            if deferred is not None:
                ws.cancel_commit(deferred)
        elif error is not None and not self._early:
            self._fault = error
        elif error is not None and pending and deferred is not None and ws.slack is not None:  # else it was cut with its pass
            ws.fail(error, EDIT, self._seq)
            ws.slack.remove(deferred)
        if ws.last_commit is self:
            ws.last_commit = None
        self._run = None
        ws.order.leave(self._ticket, queued=False)

    def _happen(self) -> None:
        if self._fault is not None:
            raise self._fault.again()
        if self._value is not None:
            commit(self._instance, self._ws, self._value)
            if self._drops:
                self._ws.discard()

    def _defer(self) -> bool:
        ws = self._ws
        assert ws.slack is not None and self._deferred is not None  # `discard`
        self._early = ws.slack.defer(ws, self._deferred)
        return self._early


def discard(instance: Instance, ws: WorkingSet, n: int | None) -> None:
    """Drop the last `n` buffered tokens, or all of them, after the passes accepted so far."""
    instance.touch(ws)
    if n is None and ws.last_commit is not None and ws.last_commit.discard():
        return
    edit(instance, ws, lambda: ws.discard(n))


def check_owned(instance: Instance, ws: WorkingSet) -> None:
    """Raises why the instance cannot use the set: InvalidState, or the cause of its end."""
    instance.check_open()
    if ws.leaving or ws not in instance.working_sets:
        raise InvalidState("the working set was dropped, or belongs to another instance")
