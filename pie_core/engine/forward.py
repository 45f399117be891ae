"""Forward passes: the author's `PassSpec`, checked at submit, and the engine's `Pass` that moves through the queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidPass
from pie_core.engine.geometry import Geometry, check_shape
from pie_core.engine.pass_checks import check_reads, check_tokens
from pie_core.engine.program_info import ProgramInfo
from pie_core.engine.recurrent import RecurrentState
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.values import Value
from pie_core.engine.working_set import PASS, WorkingSet
from pie_core.eta.program import Program

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.pipeline import Pipeline

__all__ = ["BUFFERED", "FOLDING", "ChannelUse", "Geometry", "Part", "Pass", "PassSink", "PassSpec", "check_parts"]

SHORT_PASS = 16  # tokens; a pass of at most this many counts as decode and goes before prefill


FOLDING = Geometry()
BUFFERED = Geometry("buffered")


@dataclass(slots=True)
class PassSpec:
    """One forward pass, as an author asks for it.

    tokens: ids of one working set, a list of ids a working set, or a Channel whose cell holds them (i32 or u32; divided
        evenly among the working sets; the cell is taken).
    state: the working sets to extend, each once.
    reads: token indices within this pass, a list a working set; None reads the last token of each.
    reuse: whether pages of earlier passes with the same tokens may be shared, and these with later ones.
    program, params, channels: the epilogue, the 32-bit words of its parameters, the channels it touches in its order.
    """

    tokens: Sequence[int] | Sequence[Sequence[int]] | Channel
    state: Sequence[WorkingSet]
    geometry: Geometry = FOLDING
    reads: Sequence[Sequence[int]] | None = None
    program: Program | None = None
    params: Sequence[int] = ()
    channels: Sequence[Channel] = ()
    reuse: bool = True


class Part:
    """The tokens of a pass that go to one working set, and how far they have been scheduled."""

    __slots__ = ("before", "done", "ids", "n", "named_for", "names", "reads", "tail", "ticket", "undo", "ws")

    def __init__(self, ws: WorkingSet, ids: Sequence[int] | None, n: int, reads: tuple[int, ...]) -> None:
        self.ws = ws
        self.ids = ids  # None: the device reads them from the arena
        self.n = n
        self.reads = reads
        self.tail = n - min(reads) if reads else 0  # tokens that must run in the pass's last step
        self.done = 0
        self.ticket = -1
        self.undo = (0, 0)  # (length, frozen) before the first token
        self.before: RecurrentState | None = None  # the set's, held until the pass ends
        self.names: list[bytes] = []  # of the full pages that the set will have (see reuse.py), worked out for this state of it
        self.named_for: tuple[int, int] | None = None

    def keep_state(self) -> None:
        """The recurrent state of the set is about to change: hold what it was before the pass, if nothing is held yet."""
        if self.ws.state is not None and self.before is None:
            self.before = self.ws.state.copy()

    def forget_state(self) -> None:
        """The pass has ended."""
        if self.before is not None:
            self.before.clear()


class ChannelUse:
    """One channel of a pass: what the pass does with it, and the cells it was given."""

    __slots__ = ("channel", "copy", "put_cell", "puts", "take_cell", "takes", "ticket", "uses_front")

    def __init__(self, channel: Channel, *, uses_front: bool, takes: bool, puts: bool) -> None:
        self.channel = channel
        self.uses_front = uses_front  # needs a full cell
        self.takes = takes
        self.puts = puts
        self.ticket = -1
        self.take_cell = -1
        self.put_cell = -1
        self.copy = -1  # results word of the copy of the put

    def again(self) -> ChannelUse:
        """The same use by another pass, without cells."""
        return ChannelUse(self.channel, uses_front=self.uses_front, takes=self.takes, puts=self.puts)


PassSink = Callable[["Pass", list[Value] | None, EngineError | None], None]


def _nobody(_: Pass, values: list[Value] | None, error: EngineError | None) -> None:
    """The sink of a pass that has ended."""


class Pass:
    """An accepted pass. It ends exactly once: with values, or with an error.

    `uses` holds each channel once; `lane_uses` is the same in the order of the program's channels; `embed` feeds the tokens.
    """

    __slots__ = (
        "_final",
        "accepted_at",
        "claims",
        "embed",
        "ended",
        "failure",
        "fault",
        "found",
        "geometry",
        "info",
        "instance",
        "lane_uses",
        "out_words",
        "params",
        "parts",
        "pipe",
        "reads",
        "remaining",
        "reuse",
        "revives",
        "seq",
        "sink",
        "size",
        "skip",
        "started",
        "status_word",
        "tail",
        "token",
        "undone",
        "uses",
    )

    def __init__(
        self,
        instance: Instance,
        pipe: Pipeline,
        *,
        parts: list[Part],
        geometry: Geometry,
        info: ProgramInfo | None,
        params: tuple[int, ...],
        uses: list[ChannelUse],
        lane_uses: list[ChannelUse],
        embed: ChannelUse | None,
        sink: PassSink,
        seq: int,
        accepted_at: float,
        reuse: bool = True,
    ) -> None:
        self.instance = instance
        self.pipe = pipe
        self.parts = parts
        self.geometry = geometry
        self.info = info
        self.params = params
        self.uses = uses
        self.lane_uses = lane_uses
        self.embed = embed
        self.sink = sink
        self.seq = seq  # grows with each pass the engine accepts
        self.accepted_at = accepted_at
        part, *others = parts
        self.remaining = part.n
        self.reads = len(part.reads)
        self.tail = part.tail  # tokens that must run in the last step
        for part in others:
            self.remaining += part.n
            self.reads += len(part.reads)
            self.tail += part.tail
        self.size = self.remaining
        self.reuse = reuse
        self.revives: WorkingSet | None = None  # the paused set that the pass computes again (see pausing.py)
        self.claims: list[bytes] = []  # names of pages that others wait for
        self.found: list[Sequence[int]] = [()] * len(parts)  # pages that the last look found for each part (see reuse.py)
        self.skip = 0  # tokens that they hold
        self.started = False  # some tokens were scheduled
        self._final = False
        self.ended = False
        self.failure: EngineError | None = None
        self.fault: EngineError | None = None  # what the host found wrong with its tokens when its step was read
        self.undone = False  # cancelled whole: it gave back what it had
        self.status_word = -1
        self.out_words: list[int] = []
        self.token: int | None = None  # the first value returned, if it is a whole number

    @property
    def final(self) -> bool:
        """Whether all tokens were scheduled, and the epilogue. From then on its sets may be edited early (see edit_order.py)."""
        return self._final

    @final.setter
    def final(self, done: bool) -> None:
        self._final = done
        if done:
            for part in self.parts:
                part.ws.out_of_line(self)
                part.ws.order.scheduled(part.ticket)

    @property
    def plain(self) -> bool:
        """Whether its tokens see all that is before them: then their ids say everything about their K and V."""
        return not self.geometry.window and not self.geometry.shaped

    @property
    def to_compute(self) -> int:
        """Tokens that still have to run, less those that shared pages hold."""
        return self.remaining - self.skip

    def shares(self) -> bool:
        """Whether another pipeline uses one of its working sets or channels."""
        return any(p.ws.shared for p in self.parts) or any(u.channel.shared for u in self.uses)

    def finish(self, values: list[Value] | None, error: EngineError | None) -> None:
        """Tell the submitter, once, and let the operations go on that waited for this pass."""
        if self.ended:
            return
        self.ended = True
        self.instance.outstanding -= 1
        try:
            for part in self.parts:
                if self.started and not self.final:
                    part.ws.writing = False
                part.forget_state()
                if not self._final:
                    part.ws.out_of_line(self)
                part.ws.order.leave(part.ticket, queued=not self._final)
            for use in self.uses:
                if use.puts:
                    use.channel.settled()
            self.release_cells()
            for use in self.uses:
                channel = use.channel
                channel.users -= 1
                if channel.dropped:
                    self.instance.free_channel(channel)
            self._release_claims()
        finally:  # whatever is wrong with what waited for it
            sink, self.sink = self.sink, _nobody  # it may hold what holds the pass
            sink(self, values, error)

    def release_cells(self) -> None:
        """Host-written cells of the pass are in a submitted step (or never will be): a `set` that waited may replace them."""
        for use in self.uses:
            if use.ticket >= 0:
                use.channel.order.leave(use.ticket)
                use.ticket = -1

    def abandon(self, cause: EngineError) -> None:
        """End with `cause` without giving anything back: the whole instance goes."""
        if not self.ended:
            self.ended = True
            self.instance.outstanding -= 1
            for part in self.parts:
                part.forget_state()
            self._release_claims()
            sink, self.sink = self.sink, _nobody
            sink(self, None, cause)

    def _release_claims(self) -> None:
        if self.claims:
            self.instance.engine.cache.release_claims(self)

    def fail(self, cause: EngineError) -> None:
        """End with `cause`: cells that it would have put are poisoned, tokens that it wrote stay counted, and its working sets keep the
        cause for every later use. Whoever submitted that may not have heard, and counts on its tokens."""
        if self.ended:
            return
        self.failure = cause = cause.kept()
        for part in self.parts:
            part.ws.fail(cause, PASS, self.seq, part.undo if self.started else (part.ws.length, part.ws.frozen))
        for use in self.uses:
            channel = use.channel
            if not self.final and use.takes and channel.host == "writer":
                channel.head += 1  # its reserved cell goes with it
            if use.puts:
                channel.fail_from(use.put_cell if self.final else channel.tail, cause)
        self.finish(None, cause)

    def undo(self, cause: EngineError) -> None:
        """Cancel whole: give back cells, reservations and tokens, newest pass of the pipeline first; end with `cause`."""
        if self.ended:
            return
        for use in self.uses:
            channel = use.channel
            if use.takes:
                if channel.host == "writer":
                    channel.reserved -= 1
                if self.final:
                    channel.head -= 1
            if use.puts:
                channel.tail -= self.final
                channel.skipped = cause
        self.undone = True
        if self.started:
            for part in self.parts:
                if not part.ws.dropped:
                    if part.ws.state is not None and part.before is not None:
                        part.ws.state.become(part.before)
                    part.ws.restore(*part.undo)
        self.finish(None, cause)


def check_parts(spec: PassSpec, limits: RunnerLimits) -> list[Part]:
    """The parts of a spec. Raises InvalidPass with field, value and fix."""
    state, tokens = spec.state, spec.tokens
    if len(state) == 1 and type(tokens) is list and len(tokens) == 1 and spec.reads is None and not spec.geometry.shaped:
        token = tokens[0]  # a step of a decode loop, the same checks in less time
        if type(token) is int and 0 <= token < limits.vocab:
            return [Part(state[0], tokens, 1, (0,) if spec.program is not None else ())]
    if not state:
        raise InvalidPass("state: a pass needs at least one working set")
    if len(set(map(id, state))) != len(state):
        raise InvalidPass("state: each working set may appear once in a pass")
    per_set, counts = check_tokens(tokens, len(state), limits)
    check_shape(spec.geometry, counts)
    reads = check_reads(spec.reads, counts, spec.program is not None, limits)
    return [Part(ws, ids, n, r) for ws, ids, n, r in zip(state, per_set, counts, reads, strict=True)]
