"""`Trace`: a program as it grows op by op, with its parameter words and its channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pie_core.eta.advice import operand_advice
from pie_core.eta.canonical import canonical
from pie_core.eta.constant_faults import ARITHMETIC, constant_fault
from pie_core.eta.dtypes import DTYPES, to_word
from pie_core.eta.errors import TraceError
from pie_core.eta.ops import MAX_INDEX, OPS, OUTPUT_NAMES, Op
from pie_core.eta.program import (
    MAX_CELL_WORDS,
    MAX_CHANS,
    MAX_ELEMENTS,
    MAX_OPS,
    MAX_PARAMS,
    Chan,
    Node,
    Program,
)
from pie_core.eta.rules import Attrs, RuleError, Shape, Type, elements, show
from pie_core.eta.stages import STAGES, intrinsic_fault
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


class Trace:
    """A growing program of a stage; in eta's stages equal pure ops are one value.

    `table` may hold more rows than eta's (the model language adds its own); `max_ops` caps its length. `rows`: read-outs of the pass, where
    they are known. `shapes`: of the stage's intrinsics.
    """

    __slots__ = (
        "_chan_ids", "_chans", "_known", "_over", "_pending", "channels", "effects", "max_ops", "model", "ops", "params", "rows", "shapes",
        "stage", "table", "words",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self, stage: str, model: ModelInfo | None = None, table: Mapping[str, Op] = OPS, max_ops: int = MAX_OPS,
        rows: int | None = None, shapes: Mapping[str, Shape] | None = None,
    ) -> None:  # fmt: skip
        self.stage = stage
        self.model = model
        self.rows = rows
        self.shapes = shapes or {}
        self.table = table
        self.max_ops = max_ops
        self.ops: list[Node] = []
        self.params: list[str] = []
        self.words: list[int] = []
        self.channels: list[Any] = []
        self._chans: list[Chan] = []
        self.effects: list[int] = []
        self._chan_ids: dict[int, int] = {}
        self._pending: dict[int, str] = {}
        self._over = False
        self._known: dict[Any, Tensor] | None = {} if stage in STAGES else None  # values by what makes them

    def add(self, name: str, args: Sequence[Tensor], attrs: Attrs = NO_ATTRS, declared: Type | None = None) -> Tensor:
        """Append an op and return its value; of a pure op that is there already, that one. Raises TraceError naming op and types when the
        table's rule refuses it."""
        ids = tuple([a.id for a in args])
        known = self._known
        key = (name, ids, declared, *attrs.values()) if attrs else (name, ids, declared)
        if known is not None:
            found = known.get(key)
            if found is not None and all(a.trace is self for a in args):
                return found
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
        value = self._append(name, ids, attrs, dtype, shape)
        if known is not None:
            known[key] = value
        return value

    def _append(self, name: str, ids: tuple[int, ...], attrs: Attrs, dtype: str, shape: Shape) -> Tensor:
        ops = self.ops
        if len(ops) >= self.max_ops:
            label = self.table[name].py or name
            raise TraceError(f"{label}: the program has more than {self.max_ops} ops; loops of Python unroll while tracing")
        if self._over:
            label = self.table[name].py or name
            raise TraceError(
                f"{label}: the function that made this tensor has returned; compute inside it, or await an output and use its value"
            )
        ops.append(Node(name, ids, attrs, dtype, shape))
        return Tensor(self, len(ops) - 1, dtype, shape)

    def op(self, name: str, *operands: object) -> Tensor:
        """Append an op whose operands may be Python scalars: they take the dtype that the table has for their place, else that of the
        tensors beside them. Raises TraceError, as `add` does, and where a constant leaves nothing but NaN or infinities."""
        args: list[Tensor] = []
        for operand in operands:
            if not isinstance(operand, Tensor):
                args = self._with_constants(name, operands)
                break
            args.append(operand)
        if name in ARITHMETIC:
            self._check_constants(name, args)
        return self.add(name, args)

    def _check_constants(self, name: str, args: Sequence[Tensor]) -> None:
        for position, arg in enumerate(args):
            if arg.shape or arg.trace is not self:
                continue
            node = self.ops[arg.id]
            if node.name in ("param", "const"):
                word = self.words[int(node.attrs["slot"])] if node.name == "param" else int(node.attrs["bits"])
                fault = constant_fault(name, position, arg.dtype, word)
                if fault:
                    raise TraceError(f"{self.table[name].py or name}: {fault}")

    def _with_constants(self, name: str, operands: Sequence[object]) -> list[Tensor]:
        row = self.table[name]
        fixed = row.constants
        dtype = next((o.dtype for i, o in enumerate(operands) if isinstance(o, Tensor) and i not in fixed), "")
        args = []
        for position, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                args.append(operand)
                continue
            advice = operand_advice(operand)
            if advice and not isinstance(operand, (list, tuple)):
                raise TraceError(f"{row.py or name} takes Tensors and Python numbers, got {type(operand).__name__}{advice}")
            try:
                args.append(self.constant(operand, fixed.get(position) or dtype or _natural(operand)))
            except TraceError as error:
                raise TraceError(f"{row.py or name}: {error}{advice}") from None
        return args

    def constant(self, value: object, dtype: str) -> Tensor:
        """A Python scalar as a value: lifted to a param where the stage has params, a const elsewhere."""
        word = to_word(value, dtype)
        stage = STAGES.get(self.stage)
        if stage is None or "param" not in stage.sources:
            return self.add("const", (), {"bits": word}, (dtype, ()))
        slot = len(self.params)
        if slot >= MAX_PARAMS:
            raise TraceError(
                f"the program has more than {MAX_PARAMS} scalar constants: loops of Python unroll while tracing, and have to end; bulk "
                "data enters through a seeded channel"
            )
        self.params.append(dtype)
        self.words.append(word)
        return self._append("param", (), {"slot": slot}, dtype, ())

    def forget(self) -> None:
        """The function has returned: let go of its values, each of which holds this trace, and take no more ops."""
        self._known = None
        self._over = True

    def output(self, index: int, name: str) -> Tensor:
        """Read-out row `index` of `name`, f32 [width]; the same row twice is the same value."""
        width = self._width("output", name)
        if type(index) is not int or not 0 <= index < MAX_INDEX:
            raise TraceError(f"intrinsics.output(i, name): i is a read-out row, 0 or more, got {index!r}")
        if self.rows is not None and index >= self.rows:
            raise TraceError(f"intrinsics.output({index}, {name!r}): this pass has {self.rows} read-outs; .read() asks for more")
        return self.add("output", (), {"index": index, "name": name}, ("f32", (width,)))

    def outputs(self, name: str) -> Tensor:
        """All read-out rows of `name`, f32 [rows, width]."""
        width = self._width("outputs", name)
        if self.rows is None:
            raise TraceError(
                f"intrinsics.outputs({name!r}) needs the number of read-outs: call .read(positions) before .epilogue(fn), "
                f"or use intrinsics.output(i, {name!r})"
            )
        if self.rows < 1:
            raise TraceError(f"intrinsics.outputs({name!r}): this pass reads nothing out; .read(positions) asks for rows")
        if self.rows * width > MAX_ELEMENTS:
            raise TraceError(
                f"intrinsics.outputs({name!r}): {self.rows} read-outs of {width} numbers each are more than the {MAX_ELEMENTS} elements "
                f"that a value has at most; {MAX_ELEMENTS // width} fit: .read() fewer positions and split the pass, or use "
                f"intrinsics.output(i, {name!r})"
            )
        return self.add("outputs", (), {"name": name}, ("f32", (self.rows, width)))

    def _width(self, what: str, name: str) -> int:
        if self.stage != "epilogue" or self.model is None:
            raise TraceError(f"intrinsics.{what} is only there inside a function given to .epilogue(fn)")
        if name not in OUTPUT_NAMES:
            raise TraceError(f"intrinsics.{what} knows the names {', '.join(OUTPUT_NAMES)}, not {name!r}")
        return self.model.vocab if name == "logits" else self.model.hidden

    def intrinsic(self, name: str) -> Tensor:
        """A value that the stage is given, of the shape that this trace was told."""
        stage = STAGES.get(self.stage)
        known = stage.intrinsics.get(name) if stage is not None else None
        if known is None:
            raise TraceError(f"intrinsics.{name} {intrinsic_advice(name, self.stage)}")
        shape = tuple(self.shapes.get(name, ()))
        fault = intrinsic_fault(self.stage, name, (known.dtype, shape))
        if fault:
            raise TraceError(f"intrinsics.{name}: {fault}")
        return self.add("intrinsic", (), {"name": name}, (known.dtype, shape))

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
        """Put `value` (a tensor of the channel's type, or a scalar for a scalar channel); of several in one pass only the last stays."""
        chan = self._touch(channel, "put")
        cell = self._chans[chan]
        if not isinstance(value, Tensor):
            try:
                value = self.constant(value, cell.dtype)
            except TraceError:
                got = f"{value!r:.40} ({type(value).__name__})"
                raise TraceError(f"put: the channel holds {show((cell.dtype, cell.shape))}, the value is {got}") from None
        if not value.shape and cell.shape:
            value = self.add("broadcast", (value,), NO_ATTRS, (value.dtype, cell.shape))
        if value.type != (cell.dtype, cell.shape):
            raise TraceError(f"put: the channel holds {show((cell.dtype, cell.shape))}, the value is {show(value.type)}")
        self._pending[chan] = "value"
        if value.trace is not self:
            raise TraceError("put: a tensor of another trace cannot be used here; carry values in a channel or await them")
        self.effects.append(len(self.ops))
        self._append("put", (value.id,), {"chan": chan}, *value.type)

    def _effect(self, name: str, chan: int) -> Tensor:
        cell = self._chans[chan]
        self.effects.append(len(self.ops))
        return self._append(name, (), {"chan": chan}, cell.dtype, cell.shape)

    def _touch(self, channel: ChannelLike, verb: str) -> int:
        stage = STAGES.get(self.stage)
        if stage is None or "effect" not in stage.kinds:
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
        """The Program that returns `outs`, in canonical order and without what nothing uses."""
        ops, ids, slots = canonical(self.ops, [t.id for t in outs], self.effects)
        self.words = [self.words[s] for s in slots]
        return Program(self.stage, ops, ids, self._chans, [self.params[s] for s in slots])


def intrinsic_advice(name: str, stage: str) -> str:
    """Why an intrinsic is not there, as the end of a sentence."""
    where = [s for s, row in STAGES.items() if name in row.intrinsics]
    return f"is there in the stage{'s' if len(where) > 1 else ''} {', '.join(where)}, not in {stage!r}"


def _natural(value: object) -> str:
    return "bool" if isinstance(value, bool) else "i32" if isinstance(value, int) else "f32"
