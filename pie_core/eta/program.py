"""`Program`: one immutable traced stage, its canonical text, and the verifier that guards every text from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pie_core.eta.dtypes import DTYPES
from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import ChanEffect, channel_effects
from pie_core.eta.json_text import loads
from pie_core.eta.ops import OPS
from pie_core.eta.rules import MAX_RANK, Attr, Attrs, RuleError, Shape, Type, elements, show

VERSION = 1
STAGES = ("epilogue", "map")
MAX_TEXT = 1 << 18  # bytes of canonical text
MAX_OPS = 1024
MAX_ELEMENTS = 1 << 22  # elements of one value
MAX_CELL_WORDS = 1 << 20  # elements of one channel cell
MAX_CHANS = 32
MAX_CAPACITY = 1 << 12
MAX_OUTS = 64
MAX_PARAMS = 256
MAX_DEPTH = 64  # reductions that depend on each other
STAGE_ONLY = {"output": "epilogue", "param": "epilogue", "take": "epilogue", "read": "epilogue", "put": "epilogue", "input": "map"}


class Chan(NamedTuple):
    """A channel as a program sees it: cells of `dtype` and `shape`, a ring of `cap` cells."""

    cap: int
    dtype: str
    shape: Shape


class Node(NamedTuple):
    """One op; its value id is its index. `args` are earlier value ids."""

    name: str
    args: tuple[int, ...]
    attrs: Attrs
    dtype: str
    shape: Shape

    @property
    def type(self) -> Type:
        """(dtype, shape)."""
        return self.dtype, self.shape


class Program:
    """Immutable SSA of one stage. Equal when the canonical texts are equal.

    `Program(...)` trusts its arguments (the tracer checked each op); text from outside goes through `Program.parse`.
    """

    __slots__ = ("_effects", "_hash", "_text", "chans", "ops", "outs", "params", "stage")

    def __init__(
        self, stage: str, ops: Sequence[Node], outs: Sequence[int], chans: Sequence[Chan] = (), params: Sequence[str] = ()
    ) -> None:
        self.stage = stage
        self.ops = tuple(ops)
        self.outs = tuple(outs)
        self.chans = tuple(chans)
        self.params = tuple(params)
        self._text: str | None = None
        self._hash: str | None = None
        self._effects: tuple[ChanEffect, ...] | None = None

    @property
    def text(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        if self._text is None:
            chans = ",".join([f'{{"cap":{c.cap},"dtype":"{c.dtype}","shape":{_ints(c.shape)}}}' for c in self.chans])
            rows = [
                f'["{name}",{_ints(args)},{_attrs(attrs) if attrs else "{}"},"{dtype}",{_ints(shape)}]'
                for name, args, attrs, dtype, shape in self.ops
            ]
            ops = ",".join(rows)
            params = '","'.join(self.params)
            params = f'["{params}"]' if params else "[]"
            self._text = (
                f'{{"chans":[{chans}],"ops":[{ops}],"outs":{_ints(self.outs)},"params":{params},"stage":"{self.stage}","v":{VERSION}}}'
            )
        return self._text

    @property
    def hash(self) -> str:
        """sha256 of the canonical text, 64 hex digits: the program's identity."""
        if self._hash is None:
            self._hash = hashlib.sha256(self.text.encode()).hexdigest()
        return self._hash

    @property
    def effects(self) -> tuple[ChanEffect, ...]:
        """What a run does to each channel. Raises ProgramError for an order that a register cannot follow."""
        if self._effects is None:
            self._effects = channel_effects(self.ops, len(self.chans))
        return self._effects

    @property
    def out_types(self) -> tuple[Type, ...]:
        """(dtype, shape) of each returned output."""
        return tuple(self.ops[i].type for i in self.outs)

    @property
    def reads(self) -> int:
        """Number of read-out rows the program needs: greatest `output` index + 1, 0 if it reads none."""
        return max((int(n.attrs["index"]) + 1 for n in self.ops if n.name == "output"), default=0)

    def width(self, name: str) -> int | None:
        """Row width of the read-out `name` ("logits" or "hidden"), None when the program does not read it."""
        return next((n.shape[0] for n in self.ops if n.name == "output" and n.attrs["name"] == name), None)

    @classmethod
    def parse(cls, text: str) -> Program:
        """The verified Program of a JSON text. Raises ProgramError naming the op and the rule it breaks; the text may be hostile."""
        return _parse(text)

    def verify(self) -> Program:
        """Check this program as `parse` would; returns it. Raises ProgramError."""
        return _parse(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self is other or self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Program({self.stage}, {len(self.ops)} ops, {self.hash[:12]})"

    def listing(self) -> str:
        """One line an op, for people."""
        lines = []
        for i, n in enumerate(self.ops):
            args = ", ".join([f"%{a}" for a in n.args] + [f"{k}={v}" for k, v in sorted(n.attrs.items())])
            lines.append(f"%{i} = {n.name}({args}) : {show(n.type)}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def _ints(values: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, values))}]"


def _attrs(attrs: Attrs) -> str:
    pairs = [f'"{k}":"{v}"' if isinstance(v, str) else f'"{k}":{v}' for k, v in sorted(attrs.items())]
    return f"{{{','.join(pairs)}}}"


# The verifier ---------------------------------------------------------------------------------------------------------------


def _fail(message: str) -> ProgramError:
    return ProgramError(message)


def _int(value: Any, low: int, bound: int, what: str) -> int:
    if type(value) is not int or not low <= value < bound:
        raise _fail(f"{what} must be an integer from {low} to {bound - 1}, got {_brief(value)}")
    return value


def _list(value: Any, most: int, what: str) -> list[Any]:
    if type(value) is not list:
        raise _fail(f"{what} must be a list, got {_brief(value)}")
    if len(value) > most:
        raise _fail(f"{what} has {len(value)} entries, the cap is {most}")
    return value


def _brief(value: Any) -> str:
    if isinstance(value, int):
        return "a huge integer" if value.bit_length() > 128 else str(value)
    text = repr(value) if isinstance(value, (str, float, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def _dtype(value: Any, what: str) -> str:
    if type(value) is not str or value not in DTYPES:
        raise _fail(f"{what} must be one of {', '.join(DTYPES)}, got {_brief(value)}")
    return value


def _shape(value: Any, most: int, what: str) -> Shape:
    shape = tuple(_int(x, 1, MAX_ELEMENTS + 1, f"extent of {what}") for x in _list(value, MAX_RANK, f"shape of {what}"))
    if elements(shape) > most:
        raise _fail(f"{what} has {elements(shape)} elements, the cap is {most}")
    return shape


def _attributes(value: Any, name: str, what: str) -> dict[str, Attr]:
    spec = OPS[name].attrs
    if type(value) is not dict or set(value) != set(spec):
        raise _fail(f"{what} takes the attributes {sorted(spec)}, got {sorted(value)[:8] if isinstance(value, dict) else _brief(value)}")
    for key, allowed in spec.items():
        if isinstance(allowed, tuple):
            if type(value[key]) is not str or value[key] not in allowed:
                raise _fail(f"attribute {key} of {what} must be one of {', '.join(allowed)}, got {_brief(value[key])}")
        else:
            _int(value[key], 0, allowed or 1 << 32, f"attribute {key} of {what}")
    return dict(sorted(value.items()))


def _node(row: Any, index: int, stage: str, nodes: Sequence[Node]) -> Node:
    if type(row) is not list or len(row) != 5:
        raise _fail(f"op {index} must be [name, operands, attributes, dtype, shape]")
    name = row[0]
    if type(name) is not str or name not in OPS:
        raise _fail(f"op {index} names an unknown op {_brief(name)}")
    what = f"op {index} ({name})"
    spec = OPS[name]
    if STAGE_ONLY.get(name, stage) != stage or (stage == "map" and spec.kind in ("reduce", "generator")):
        raise _fail(f"{what} is not allowed in the {stage} stage")
    args = _list(row[1], 3, f"operands of {what}")
    if len(args) != spec.arity:
        raise _fail(f"{what} takes {spec.arity} operands, got {len(args)}")
    for arg in args:
        if nodes[_int(arg, 0, index, f"operand of {what}")].name == "put":
            raise _fail(f"{what} uses op {arg}, a put, which has no value")
    attrs = _attributes(row[2], name, what)
    dtype, shape = _dtype(row[3], f"dtype of {what}"), _shape(row[4], MAX_ELEMENTS, what)
    try:
        found = spec.rule([nodes[a].type for a in args], attrs, (dtype, shape))
    except RuleError as error:
        raise _fail(f"{what} {error}") from None
    if found != (dtype, shape):
        raise _fail(f"{what} gives {show(found)}, the text declares {show((dtype, shape))}")
    return Node(name, tuple(args), attrs, dtype, shape)


def _parse(text: str) -> Program:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        size = f"{len(text)} characters" if isinstance(text, str) else _brief(text)
        raise _fail(f"a program text is a string of at most {MAX_TEXT} characters, got {size}")
    try:
        doc = loads(text)
    except (ValueError, RecursionError) as error:
        raise _fail(f"the program text is not JSON: {str(error)[:80]}") from None
    if type(doc) is not dict or set(doc) != {"chans", "ops", "outs", "params", "stage", "v"}:
        raise _fail("a program has exactly the keys chans, ops, outs, params, stage, v")
    if doc["v"] != VERSION or type(doc["v"]) is not int:
        raise _fail(f"program version {_brief(doc['v'])} is not {VERSION}")
    stage = doc["stage"]
    if type(stage) is not str or stage not in STAGES:
        raise _fail(f"stage must be one of {', '.join(STAGES)}, got {_brief(stage)}")
    chans = [_chan(c, i) for i, c in enumerate(_list(doc["chans"], MAX_CHANS, "chans"))]
    params = [_dtype(p, f"param {i}") for i, p in enumerate(_list(doc["params"], MAX_PARAMS, "params"))]
    nodes: list[Node] = []
    depth: list[int] = []
    for index, row in enumerate(_list(doc["ops"], MAX_OPS, "ops")):
        node = _node(row, index, stage, nodes)
        nodes.append(node)
        depth.append(max((depth[a] for a in node.args), default=0) + (OPS[node.name].kind == "reduce"))
        if depth[-1] > MAX_DEPTH:
            raise _fail(f"op {index} ({node.name}) ends a chain of more than {MAX_DEPTH} dependent reductions")
    outs = [_int(o, 0, max(len(nodes), 1), "an output id") for o in _list(doc["outs"], MAX_OUTS, "outs")]
    if outs and not nodes:
        raise _fail("a program with outputs has ops")
    for out in outs:
        if nodes[out].name == "put":
            raise _fail(f"output {out} is a put, which has no value")
    program = Program(stage, nodes, outs, chans, params)
    _check_sources(program)
    _ = program.effects
    return program


def _chan(value: Any, index: int) -> Chan:
    what = f"channel {index}"
    if type(value) is not dict or set(value) != {"cap", "dtype", "shape"}:
        raise _fail(f"{what} has exactly the keys cap, dtype, shape")
    return Chan(
        _int(value["cap"], 1, MAX_CAPACITY + 1, f"capacity of {what}"),
        _dtype(value["dtype"], f"dtype of {what}"),
        _shape(value["shape"], MAX_CELL_WORDS, what),
    )


def _check_sources(program: Program) -> None:
    """Channels and params in order of first touch, each used; cell and row types consistent; the stage's own rules."""
    touched = 0
    slots = 0
    for index, node in enumerate(program.ops):
        if "chan" in node.attrs:
            chan = int(node.attrs["chan"])
            if chan > touched or chan >= len(program.chans):
                raise _fail(
                    f"op {index} ({node.name}) touches channel {chan}; channels are numbered by first touch, {len(program.chans)} declared"
                )
            touched = max(touched, chan + 1)
            cell = program.chans[chan]
            if node.type != (cell.dtype, cell.shape):
                raise _fail(f"op {index} ({node.name}) moves {show(node.type)}, channel {chan} holds {show((cell.dtype, cell.shape))}")
        elif node.name == "param":
            if node.attrs["slot"] != slots or slots >= len(program.params) or program.params[slots] != node.dtype:
                raise _fail(f"op {index} (param) must be slot {slots} of the declared params, in order and dtype")
            slots += 1
        elif node.name == "output" and node.shape[0] != program.width(str(node.attrs["name"])):
            raise _fail(f"op {index} (output) reads {node.attrs['name']} rows of two widths")
        elif node.name == "const" and node.dtype == "bool" and node.attrs["bits"] not in (0, 1):
            raise _fail(f"op {index} (const) is a bool of 0 or 1")
    if touched != len(program.chans):
        raise _fail(f"{len(program.chans)} channels declared, {touched} used")
    if slots != len(program.params):
        raise _fail(f"{len(program.params)} params declared, {slots} used")
    if program.stage == "map":
        _check_map(program)


def _check_map(program: Program) -> None:
    lengths = {n.shape for n in program.ops if n.shape}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise _fail(f"a map program works on vectors of one length, got the shapes {sorted(lengths)[:4]}")
    if len(program.outs) != 1 or program.ops[program.outs[0]].type != ("f32", next(iter(lengths))):
        raise _fail("a map program has exactly one output, f32 [n]")
    used = sorted({int(n.attrs["index"]) for n in program.ops if n.name == "input"})
    if used != list(range(len(used))) or not used:
        raise _fail(f"a map program numbers its inputs 0, 1, …; got {used}")
