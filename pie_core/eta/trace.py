"""The tracer: a function runs once over symbolic tensors and leaves a Program, its parameter words and its channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from pie_core.eta.dtypes import DTYPES, to_word
from pie_core.eta.errors import ProgramError, TraceError
from pie_core.eta.ops import OPS, OUTPUT_NAMES, Op
from pie_core.eta.program import (
    MAX_CELL_WORDS,
    MAX_CHANS,
    MAX_ELEMENTS,
    MAX_OPS,
    MAX_OUTS,
    MAX_PARAMS,
    Chan,
    Node,
    Program,
)
from pie_core.eta.rules import Attrs, RuleError, Shape, Type, elements, show
from pie_core.eta.tensor import Tensor

NO_ATTRS: Attrs = {}


class ModelInfo(Protocol):
    """What a trace needs to know of the model."""

    @property
    def vocab(self) -> int:
        """Width of a logits row."""
        ...

    @property
    def hidden(self) -> int:
        """Width of a hidden row."""
        ...


class Model(NamedTuple):
    """A plain ModelInfo."""

    vocab: int
    hidden: int


class ChannelLike(Protocol):
    """What a trace needs to know of a channel object."""

    dtype: str
    shape: Shape
    capacity: int


class Traced(NamedTuple):
    """`params`: the words of the lifted constants, by slot. `channels`: the author's objects in the program's order. `single`: fn returned
    one tensor and not a tuple."""

    program: Program
    params: tuple[int, ...]
    channels: tuple[Any, ...]
    single: bool


class Trace:
    """A growing program. `table` may hold more rows than eta's (the model language adds its own); `max_ops` caps its length."""

    __slots__ = ("_chan_ids", "_chans", "_outputs", "_pending", "channels", "max_ops", "model", "ops", "params", "stage", "table", "words")

    def __init__(self, stage: str, model: ModelInfo | None = None, table: Mapping[str, Op] = OPS, max_ops: int = MAX_OPS) -> None:
        self.stage = stage
        self.model = model
        self.table = table
        self.max_ops = max_ops
        self.ops: list[Node] = []
        self.params: list[str] = []
        self.words: list[int] = []
        self.channels: list[Any] = []
        self._chans: list[Chan] = []
        self._chan_ids: dict[int, int] = {}
        self._pending: dict[int, str] = {}
        self._outputs: dict[tuple[int, str], Tensor] = {}

    def add(self, name: str, args: Sequence[Tensor], attrs: Attrs = NO_ATTRS, declared: Type | None = None) -> Tensor:
        """Append an op and return its value. Raises TraceError naming op and types when the table's rule refuses it."""
        row = self.table[name]
        types = []
        for arg in args:
            if arg.trace is not self:
                raise TraceError(
                    f"{row.py or name}: a tensor of another trace cannot be used here; carry values in a channel or await them"
                )
            types.append((arg.dtype, arg.shape))
        try:
            dtype, shape = row.rule(types, attrs, declared)
        except RuleError as error:
            raise TraceError(f"{row.py or name} {error}") from None
        if len(self.ops) >= self.max_ops:
            raise TraceError(f"{row.py or name}: the program has more than {self.max_ops} ops; loops of Python unroll while tracing")
        ops = self.ops
        ops.append(Node(name, tuple([a.id for a in args]), attrs, dtype, shape))
        return Tensor(self, len(ops) - 1, dtype, shape)

    def op(self, name: str, *operands: object) -> Tensor:
        """Append an op whose operands may be Python scalars: they take the dtype of the tensors beside them."""
        dtype = ""
        for operand in operands:
            if isinstance(operand, Tensor) and (name != "select" or operand is not operands[0]):
                dtype = operand.dtype
                break
        args = []
        for position, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                args.append(operand)
            else:
                want = "bool" if name == "select" and position == 0 else dtype or _natural(operand)
                try:
                    args.append(self.constant(operand, want))
                except TraceError as error:
                    raise TraceError(f"{self.table[name].py or name}: {error}") from None
        return self.add(name, args)

    def constant(self, value: object, dtype: str) -> Tensor:
        """A Python scalar as a value: lifted to a param in an epilogue, a const elsewhere."""
        word = to_word(value, dtype)
        if self.stage != "epilogue":
            return self.add("const", (), {"bits": word}, (dtype, ()))
        slot = len(self.params)
        if slot >= MAX_PARAMS:
            raise TraceError(f"the program has more than {MAX_PARAMS} scalar constants; bring bulk data in through a seeded channel")
        self.params.append(dtype)
        self.words.append(word)
        return self.add("param", (), {"slot": slot}, (dtype, ()))

    def output(self, index: int, name: str) -> Tensor:
        """Read-out row `index` of `name`, f32 [width]; the same row twice is the same value."""
        found = self._outputs.get((index, name))
        if found is not None:
            return found
        if self.stage != "epilogue" or self.model is None:
            raise TraceError("intrinsics.output is only there inside a function given to .epilogue(fn)")
        if name not in OUTPUT_NAMES:
            raise TraceError(f"intrinsics.output knows the names {', '.join(OUTPUT_NAMES)}, not {name!r}")
        if type(index) is not int or not 0 <= index < 1 << 16:
            raise TraceError(f"intrinsics.output(i, name): i is a read-out row, 0 or more, got {index!r}")
        width = self.model.vocab if name == "logits" else self.model.hidden
        value = self.add("output", (), {"index": index, "name": name}, ("f32", (width,)))
        self._outputs[index, name] = value
        return value

    def input(self, index: int, n: int) -> Tensor:
        """Input `index` of a map program, f32 [n]."""
        return self.add("input", (), {"index": index}, ("f32", (n,)))

    def take(self, channel: ChannelLike) -> Tensor:
        """Consume the cell of `channel`; after a put in this pass, the value put."""
        chan = self._touch(channel, "take")
        self._pending[chan] = "empty"
        return self._effect("take", chan)

    def read(self, channel: ChannelLike) -> Tensor:
        """Peek at the cell of `channel`; after a put in this pass, the value put."""
        chan = self._touch(channel, "read")
        self._pending.setdefault(chan, "read")
        return self._effect("read", chan)

    def put(self, channel: ChannelLike, value: Tensor | int | float | bool) -> None:
        """Put `value` (a tensor of the channel's type, or a scalar for a scalar channel); the last of several wins."""
        chan = self._touch(channel, "put")
        cell = self._chans[chan]
        if not isinstance(value, Tensor):
            value = self.constant(value, cell.dtype)
        if not value.shape and cell.shape:
            value = self.add("broadcast", (value,), NO_ATTRS, (value.dtype, cell.shape))
        if value.type != (cell.dtype, cell.shape):
            raise TraceError(f"put: the channel holds {show((cell.dtype, cell.shape))}, the value is {show(value.type)}")
        self._pending[chan] = "value"
        self.add("put", (value,), {"chan": chan})

    def _effect(self, name: str, chan: int) -> Tensor:
        cell = self._chans[chan]
        return self.add(name, (), {"chan": chan}, (cell.dtype, cell.shape))

    def _touch(self, channel: ChannelLike, verb: str) -> int:
        if self.stage != "epilogue":
            raise TraceError(f"{verb}: channels are only there in an epilogue")
        chan = self._chan_ids.get(id(channel))
        if chan is None:
            shape = tuple(channel.shape)
            if channel.dtype not in DTYPES or elements(shape) > MAX_CELL_WORDS:
                raise TraceError(f"{verb}: a cell {show((channel.dtype, shape))} is over {MAX_CELL_WORDS} elements or of an unknown dtype")
            chan = len(self.channels)
            if chan >= MAX_CHANS:
                raise TraceError(f"{verb}: a program touches at most {MAX_CHANS} channels")
            self._chan_ids[id(channel)] = chan
            self.channels.append(channel)
            self._chans.append(Chan(channel.capacity, channel.dtype, shape))
        state = self._pending.get(chan)
        if verb == "put" and state == "read":
            raise TraceError("put: this pass only read the channel; take it instead of read, then put the new value")
        if verb != "put" and state == "empty":
            raise TraceError(f"{verb}: this pass took the channel's value already; keep that tensor, or put before the next {verb}")
        return chan

    def finish(self, outs: Sequence[Tensor]) -> Program:
        """The Program that returns `outs`, without ops that nothing uses."""
        ops, ids, params = self.ops, [t.id for t in outs], self.params
        used = bytearray(len(ops))
        for i in ids:
            used[i] = 1
        for i in range(len(ops) - 1, -1, -1):
            node = ops[i]
            if used[i] or "chan" in node.attrs:
                used[i] = 1
                for arg in node.args:
                    used[arg] = 1
        if 0 in used:
            ops, ids, params = self._prune(used, ids)
        return Program(self.stage, ops, ids, self._chans, params)

    def _prune(self, used: bytearray, ids: list[int]) -> tuple[list[Node], list[int], list[str]]:
        ops: list[Node] = []
        moved: dict[int, int] = {}
        slots: list[int] = []
        for i, node in enumerate(self.ops):
            if not used[i]:
                continue
            attrs = node.attrs
            if node.name == "param":
                slots.append(int(attrs["slot"]))
                attrs = {"slot": len(slots) - 1}
            moved[i] = len(ops)
            ops.append(Node(node.name, tuple([moved[a] for a in node.args]), attrs, node.dtype, node.shape))
        self.words = [self.words[s] for s in slots]
        return ops, [moved[i] for i in ids], [self.params[s] for s in slots]


_ACTIVE: ContextVar[Trace | None] = ContextVar("eta_trace", default=None)


def active_trace(what: str) -> Trace:
    """The trace that is running. Raises TraceError naming `what` outside of one."""
    trace = _ACTIVE.get()
    if trace is None:
        raise TraceError(f"{what} is only there inside a function given to .epilogue(fn)")
    return trace


def is_tracing() -> bool:
    """Whether a traced function is running now."""
    return _ACTIVE.get() is not None


class tracing:
    """`with tracing(trace):` makes `trace` the running one."""

    __slots__ = ("_token", "_trace")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __enter__(self) -> Trace:
        if _ACTIVE.get() is not None:
            raise TraceError("an epilogue cannot be traced inside another one")
        self._token = _ACTIVE.set(self._trace)
        return self._trace

    def __exit__(self, *_: object) -> None:
        _ACTIVE.reset(self._token)


def trace_epilogue(fn: Callable[[], Any], model: ModelInfo) -> Traced:
    """Run `fn` once over symbolic tensors. It returns a Tensor, a tuple or list of Tensors, or None. Raises TraceError (ProgramError for
    channel orders) at the author's line; whatever else `fn` raises passes through."""
    if not callable(fn):
        raise TraceError(f"epilogue takes a function, got {type(fn).__name__}; write .epilogue(lambda: …)")
    trace = Trace("epilogue", model)
    with tracing(trace):
        result = fn()
    single = isinstance(result, Tensor)
    outs: list[Any] = [result] if single else [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    if len(outs) > MAX_OUTS:
        raise TraceError(f"an epilogue returns at most {MAX_OUTS} tensors, got {len(outs)}")
    for out in outs:
        if not isinstance(out, Tensor):
            if hasattr(out, "close") and hasattr(out, "cr_code"):
                out.close()
                raise TraceError("an epilogue is a plain function, not async: it is traced, nothing can be awaited in it")
            raise TraceError(f"an epilogue returns Tensors, got {type(out).__name__}")
        if out.trace is not trace:
            raise TraceError("an epilogue returned a tensor of another trace; use channels to carry values between passes")
        if elements(out.shape) > MAX_ELEMENTS:
            raise TraceError(f"an output of {elements(out.shape)} elements is over the cap of {MAX_ELEMENTS}")
    program = trace.finish(outs)
    return Traced(program, tuple(trace.words), tuple(trace.channels), single)


def _natural(value: object) -> str:
    return "bool" if isinstance(value, bool) else "i32" if isinstance(value, int) else "f32"


__all__ = [
    "ChannelLike",
    "Model",
    "ModelInfo",
    "ProgramError",
    "Trace",
    "Traced",
    "active_trace",
    "is_tracing",
    "trace_epilogue",
    "tracing",
]
