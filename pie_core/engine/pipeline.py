"""Pipeline: an ordering domain. Its entries (passes and forks) run in submission order; `stop_when` cuts it short."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pie_core.device.protocol import NONE
from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidState, PassSkipped
from pie_core.engine.forward import Pass
from pie_core.engine.predict import Habit
from pie_core.engine.runner import Gate, Shift
from pie_core.engine.working_set import WorkingSet

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.waiting_edit import WaitingEdit


class ForkEntry:
    """A fork that runs when its pipeline reaches it, which alone has used its parent so far."""

    __slots__ = ("buffer", "child", "parent", "pipe", "seq", "ticket")

    def __init__(self, pipe: Pipeline, parent: WorkingSet, child: WorkingSet, buffer: bool) -> None:
        self.pipe = pipe
        self.seq = pipe.instance.engine.accept()
        self.parent = parent
        self.child = child
        self.buffer = buffer
        self.ticket = parent.order.enter()
        parent.forks.append(self)

    def ready(self) -> bool:
        """Whether the parent holds what was accepted before the fork, and keeps it: a pass scheduled ahead of a stop may not."""
        parent = self.parent
        if not parent.born or parent.writing or parent.pending or not parent.order.may_run(self.ticket):
            return False
        return all(w.ended or w.pipe.stop_channel is None for w in parent.writers)

    def run(self) -> None:
        """Share the pages, or pass on why the parent has none."""
        self.parent.forks.remove(self)
        if not self.child.dropped:
            if self.parent.failure(self.seq) is not None:
                self.child.fail_as(self.parent)
                self.child.be_born()
            else:
                self.parent.fork_into(self.child, buffer=self.buffer)
        self.parent.order.leave(self.ticket)


class Pipeline:
    """`queue`: accepted and not (wholly) scheduled. `flying`: scheduled for the last time and not settled."""

    __slots__ = ("answered_at", "closed", "expected", "flying", "habit", "instance", "landed", "queue", "silent", "stop_channel", "stopped")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.queue: deque[Pass | ForkEntry | WaitingEdit] = deque()
        self.flying: deque[Pass] = deque()
        self.closed = False
        self.stop_channel: Channel | None = None
        self.stopped = False
        self.landed = False  # whether a pass of it was read
        # the linger's view: when it was last answered, whether a return is awaited now, whether it failed to return lately
        self.answered_at = 0.0
        self.expected = False
        self.silent = False
        self.habit = Habit()

    def close(self) -> None:
        """No more submits; what was accepted still settles. Twice is harmless."""
        self.closed = True
        self.instance.engine.forget_return(self)
        self.retire()

    def retire(self) -> None:
        """Forget a closed pipeline once everything it accepted has ended."""
        if self.closed and not self.queue and not self.flying:
            self.instance.pipelines.pop(self, None)
            self.instance.stopping.pop(self, None)
            stop = self.stop_channel
            if stop is not None:
                self.instance.free_channel(stop)

    def stop_when(self, channel: Channel) -> None:
        """End this pipeline at the first true value that a pass puts into `channel` (bool, one element). Raises InvalidState, ArenaFull,
        and why the instance was closed, if it was."""
        if channel.dtype != "bool" or channel.cell_words != 1:
            raise InvalidState(f"stop_when needs a channel of one bool, this is a {channel.describe()}")
        self.instance.check_open()
        if channel.host == "writer":
            raise InvalidState("stop_when needs a channel that passes put into, this one is host-written")
        if self.stop_channel is not None or channel.stops is not None:
            raise InvalidState("stop_when: the pipeline has a stop channel already, or the channel ends another pipeline")
        if channel.tail or channel.pending:
            raise InvalidState("stop_when must be called before the first submit that puts into the channel (and on one without a seed)")
        self.instance.engine.predictor.drop(self.habit.guess)
        channel.add_gate()
        self.instance.stopping[self] = None
        self.stop_channel = channel
        channel.stops = self

    def stop(self, cause: EngineError | None = None) -> None:
        """Cancel every later pass whole: passes in flight found their gate shut. Forks keep their place. `cause` of the pass that put
        true and failed; later ones end with it."""
        self.stopped = True
        cause = cause or PassSkipped("the pipeline stopped before this pass: its stop channel received true")
        self.cancel_queue(cause)
        for later in reversed(self.flying):  # the newest first: each gives tokens and cells back to where it found them
            later.undo(cause)

    def gate(self) -> Gate | None:
        """The gate of the next pass, scheduled now: None when the host knows that it runs, since no stop is on its way, and where."""
        stop, shift = self.stop_channel, self._shift()
        if stop is None or not self.flying or not any(use.puts and use.channel is stop for work in self.flying for use in work.uses):
            return Gate(NONE, NONE, range(0), range(0), None, shift) if shift is not None else None
        # the cells of passes further back were looked at by the gates of those behind them
        return Gate(stop.gate_word, stop.offset(stop.tail - 1), range(0), range(0), None, shift)

    def _shift(self) -> Shift | None:
        """How the rows of the next pass move behind counts that the host has not read."""
        work = self.queue[0]
        assert isinstance(work, Pass)  # it is being scheduled
        part = work.parts[0]  # a pass on several sets waits for the counts
        slack = part.ws.slack
        if slack is None or not slack.pending:
            return None
        return slack.shift(len(part.ws.state.replay) if part.ws.state is not None else 0)

    def may_run(self, work: Pass, number: int) -> bool:
        """Whether `work` may go into step `number`, if nothing else is in its way: with a stop channel, behind the step of the pass
        before it; and so that nobody is left with what a cancelled pass has done. A pass that another pipeline may build on is not
        scheduled ahead of a stop, and none is that would build on one."""
        if self.stop_channel is not None and self.flying and self.flying[-1].parts[0].ws.last_step == number:
            return False
        stopping = self.instance.stopping
        if not stopping or not work.shares():
            return True
        if self.stop_channel is not None and self.flying:
            return False
        return not any(pipe is not self and pipe.could_cancel(work) for pipe in stopping)

    def could_cancel(self, work: Pass) -> bool:
        """Whether a pass that may still be cancelled uses a working set or channel of `work`."""
        if self.stop_channel is None or len(self.flying) < 2:
            return False
        sets, channels = {part.ws for part in work.parts}, {use.channel for use in work.uses}
        later = list(self.flying)[1:]  # no pass is in flight before the first, so it stays
        return any(any(part.ws in sets for part in other.parts) or any(use.channel in channels for use in other.uses) for other in later)

    def cancel_queue(self, cause: EngineError) -> None:
        """End the accepted passes that have not been scheduled for the last time."""
        entries = list(self.queue)
        self.queue.clear()
        self.queue.extend(e for e in entries if isinstance(e, ForkEntry))
        for entry in reversed(entries):
            if isinstance(entry, Pass):
                entry.undo(cause)
        if not self.queue:
            self.instance.idle(self)
