"""Forward passes: the author's `PassSpec`, checked at submit, and the engine's `Pass` that moves through the queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidPass, UnsupportedGeometry
from pie_core.engine.program_info import ProgramInfo
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.values import Value
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.program import Program

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.pipeline import Pipeline

U32_END = 1 << 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a pass extends and sees its working sets. `folding` freezes its tokens at once, `buffered` appends to the buffer.
    `window` > 0 limits attention to that many last positions, `sinks` keeps the first ones visible besides."""

    mode: Literal["folding", "buffered"] = "folding"
    window: int = 0
    sinks: int = 0

    @staticmethod
    def check(mode: object, window: object = 0, sinks: object = 0, **other: object) -> Geometry:
        """A Geometry from untrusted fields. Raises UnsupportedGeometry for masks, trees and the like, InvalidPass for bad values."""
        for name, value in other.items():
            if value is not None:
                raise UnsupportedGeometry(f"geometry field {name!r} is not supported yet; use window= and sinks=")
        if mode not in ("folding", "buffered"):
            raise UnsupportedGeometry(f"geometry mode {mode!r} is unknown; use 'folding' or 'buffered'")
        for name, value in (("window", window), ("sinks", sinks)):
            if type(value) is not int or not 0 <= value < U32_END:
                raise InvalidPass(f"geometry {name}={value!r} must be a whole number >= 0")
        if sinks and not window:
            raise InvalidPass(f"geometry sinks={sinks} needs a window: without one every position is visible")
        return Geometry("folding" if mode == "folding" else "buffered", window, sinks)  # type: ignore[arg-type]


FOLDING = Geometry()
BUFFERED = Geometry("buffered")


@dataclass(slots=True)
class PassSpec:
    """One forward pass, as an author asks for it.

    tokens: ids of one working set, a list of ids a working set, or a Channel whose cell holds them (i32 or u32; divided
        evenly among the working sets; the cell is taken).
    state: the working sets to extend, each once.
    reads: token indices within this pass, a list a working set; None reads the last token of each.
    program, params, channels: the epilogue, the 32-bit words of its parameters, the channels it touches in its order.
    """

    tokens: Sequence[int] | Sequence[Sequence[int]] | Channel
    state: Sequence[WorkingSet]
    geometry: Geometry = FOLDING
    reads: Sequence[Sequence[int]] | None = None
    program: Program | None = None
    params: Sequence[int] = ()
    channels: Sequence[Channel] = ()


class Part:
    """The tokens of a pass that go to one working set, and how far they have been scheduled."""

    __slots__ = ("done", "ids", "n", "reads", "tail", "ticket", "undo", "ws")

    def __init__(self, ws: WorkingSet, ids: Sequence[int] | None, n: int, reads: tuple[int, ...]) -> None:
        self.ws = ws
        self.ids = ids  # None: the device reads them from the arena
        self.n = n
        self.reads = reads
        self.tail = n - min(reads) if reads else 0  # tokens that must run in the pass's last step
        self.done = 0
        self.ticket = -1
        self.undo = (0, 0)  # (length, frozen) before the first token


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


PassSink = Callable[["Pass", list[Value] | None, EngineError | None], None]


class Pass:
    """An accepted pass. It ends exactly once: with values, or with an error.

    `uses` holds each channel once; `lane_uses` is the same in the order of the program's channels; `embed` feeds the tokens.
    """

    __slots__ = (
        "accepted_at",
        "embed",
        "ended",
        "final",
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
        "sink",
        "started",
        "status_word",
        "tail",
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
        accepted_at: float,
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
        self.accepted_at = accepted_at
        self.remaining = sum(p.n for p in parts)
        self.reads = sum(len(p.reads) for p in parts)
        self.tail = sum(p.tail for p in parts)  # tokens that must run in the last step
        self.started = False  # some tokens were scheduled
        self.final = False  # all of them were, and the epilogue
        self.ended = False
        self.status_word = -1
        self.out_words: list[int] = []

    def shares(self) -> bool:
        """Whether another pipeline uses one of its working sets or channels."""
        return any(p.ws.shared for p in self.parts) or any(u.channel.shared for u in self.uses)

    def finish(self, values: list[Value] | None, error: EngineError | None) -> None:
        """Tell the submitter, once, and let the operations go on that waited for this pass."""
        if self.ended:
            return
        self.ended = True
        self.instance.outstanding -= 1
        for part in self.parts:
            if self.started and not self.final:
                part.ws.writing = False
            part.ws.order.leave(part.ticket)
        for use in self.uses:
            if use.puts:
                use.channel.settled()
            if use.ticket >= 0:
                use.channel.order.leave(use.ticket)
                use.ticket = -1
        self.sink(self, values, error)

    def abandon(self, cause: EngineError) -> None:
        """End with `cause` without giving anything back: the whole instance goes."""
        if not self.ended:
            self.ended = True
            self.instance.outstanding -= 1
            self.sink(self, None, cause)

    def fail(self, cause: EngineError) -> None:
        """End with `cause`: cells that it would have put are poisoned, tokens that it wrote stay counted."""
        if self.ended:
            return
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
            if use.puts and self.final:
                channel.tail -= 1
        if self.started:
            for part in self.parts:
                if not part.ws.dropped:
                    part.ws.restore(*part.undo)
        self.finish(None, cause)


def check_parts(spec: PassSpec, limits: RunnerLimits) -> list[Part]:
    """The parts of a spec. Raises InvalidPass with field, value and fix."""
    state = spec.state
    if not state:
        raise InvalidPass("state: a pass needs at least one working set")
    if len(set(map(id, state))) != len(state):
        raise InvalidPass("state: each working set may appear once in a pass")
    per_set: Sequence[Sequence[int] | None]
    counts: Sequence[int]
    if isinstance(spec.tokens, Channel):
        counts = _channel_counts(spec.tokens, len(state))
        per_set = [None] * len(state)
    else:
        per_set = _token_lists(spec.tokens, len(state))
        counts = [len(ids) for ids in per_set if ids is not None]
        for k, ids in enumerate(per_set):
            _check_ids(ids or (), limits.vocab, k)
    reads = _read_lists(spec, counts)
    parts = [Part(ws, ids, n, r) for ws, ids, n, r in zip(state, per_set, counts, reads, strict=True)]
    n_reads, tail = sum(len(p.reads) for p in parts), sum(p.tail for p in parts)
    if n_reads > limits.max_reads:
        raise InvalidPass(f"reads: {n_reads} read-outs in one pass; one step has at most {limits.max_reads}")
    if tail > limits.max_tokens:
        raise InvalidPass(
            f"reads: from the earliest read-out to the end are {tail} tokens, which must run in one step of at most "
            f"{limits.max_tokens}: split the pass, or read later positions"
        )
    return parts


def _channel_counts(channel: Channel, sets: int) -> list[int]:
    if channel.dtype not in ("u32", "i32"):
        raise InvalidPass(f"tokens: a channel of ids must be u32 or i32, this one is {channel.dtype}")
    if channel.cell_words % sets:
        raise InvalidPass(f"tokens: a cell of {channel.cell_words} ids does not divide among {sets} working sets")
    return [channel.cell_words // sets] * sets


def _token_lists(tokens: Sequence[int] | Sequence[Sequence[int]], sets: int) -> list[Sequence[int]]:
    if not isinstance(tokens, (list, tuple)):
        raise InvalidPass(f"tokens: a list of ids, a list of lists or a Channel is needed, got {type(tokens).__name__}")
    nested = bool(tokens) and isinstance(tokens[0], (list, tuple))
    lists = list(tokens) if nested else [tokens]
    if len(lists) != sets:
        raise InvalidPass(f"tokens: {len(lists)} lists of ids for {sets} working sets: give one list each")
    for k, ids in enumerate(lists):
        if not isinstance(ids, (list, tuple)):
            raise InvalidPass(f"tokens[{k}]: a list of ids is needed, got {type(ids).__name__}")
        if not ids:
            raise InvalidPass(f"tokens[{k}] is empty: a pass needs at least one token for each working set")
    return lists


def _check_ids(ids: Sequence[int], vocab: int, k: int) -> None:
    try:
        fine = not ids or (min(ids) >= 0 and max(ids) < vocab)
    except TypeError:
        fine = False
    if fine and set(map(type, ids)) <= {int}:
        return
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise InvalidPass(f"tokens[{k}][{i}] = {token!r} is not a token id: whole numbers 0 .. {vocab - 1} are")


def _read_lists(spec: PassSpec, counts: Sequence[int]) -> list[tuple[int, ...]]:
    if spec.reads is None:
        return [(n - 1,) for n in counts] if spec.program is not None else [()] * len(counts)
    if not isinstance(spec.reads, (list, tuple)) or len(spec.reads) != len(counts):
        raise InvalidPass(f"reads: one list of positions for each of the {len(counts)} working sets is needed, got {spec.reads!r:.80}")
    for k, (positions, n) in enumerate(zip(spec.reads, counts, strict=True)):
        if not isinstance(positions, (list, tuple)):
            raise InvalidPass(f"reads[{k}]: a list of positions is needed, got {positions!r:.80}")
        for p in positions:
            if type(p) is not int or not 0 <= p < n:
                raise InvalidPass(f"reads[{k}]: position {p!r} is not a token of this pass: 0 .. {n - 1} are")
    if spec.program is None:
        return [()] * len(counts)  # nothing looks at them
    return [tuple(r) for r in spec.reads]
