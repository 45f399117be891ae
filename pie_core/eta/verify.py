"""The verifier that guards every program text from outside: bounded work, typed errors, nothing taken on trust."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pie_core.eta.dtypes import DTYPES
from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import pending_values
from pie_core.eta.json_text import loads
from pie_core.eta.ops import OPS
from pie_core.eta.program import (
    MAX_CAPACITY,
    MAX_CELL_WORDS,
    MAX_CHANS,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_OPS,
    MAX_PARAMS,
    MAX_TEXT,
    VERSION,
    Chan,
    Node,
    Program,
)
from pie_core.eta.rules import MAX_RANK, Attr, RuleError, Shape, elements, show
from pie_core.eta.stages import STAGES, intrinsic_fault

_DEEP = frozenset(("reduce", "pivot", "lookup", "skeleton"))


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
        got = ", ".join(_brief(key) for key in sorted(value)[:4]) or "none" if type(value) is dict else _brief(value)
        raise _fail(f"{what} takes the attributes {sorted(spec)}, got {got}")
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
    if not STAGES[stage].allows(name, spec.kind):
        raise _fail(f"{what} is not allowed in the {stage} stage")
    args = _list(row[1], 3, f"operands of {what}")
    if len(args) != spec.arity:
        raise _fail(f"{what} takes {spec.arity} operands, got {len(args)}")
    for arg in args:
        if type(arg) is not int or not 0 <= arg < index:
            raise _fail(f"operand of {what} must be the number of an op before it, got {_brief(arg)}")
        if nodes[arg].name == "put":
            raise _fail(f"{what} uses op {arg}, a put, which has no value")
    attrs = _attributes(row[2], name, what)
    if name == "pick" and OPS[nodes[args[0]].name].results <= int(attrs["i"]):
        raise _fail(f"{what} takes result {attrs['i']} of op {args[0]} ({nodes[args[0]].name}), which has one")
    dtype, shape = _dtype(row[3], f"dtype of {what}"), _shape(row[4], MAX_ELEMENTS, what)
    try:
        found = spec.rule([nodes[a].type for a in args], attrs, (dtype, shape))
    except RuleError as error:
        raise _fail(f"{what} {error}") from None
    if found != (dtype, shape):
        raise _fail(f"{what} gives {show(found)}, the text declares {show((dtype, shape))}")
    return Node(name, tuple(args), attrs, dtype, shape)


def parse(text: str) -> Program:
    """The verified Program of a JSON text. Raises ProgramError naming the op and the rule it breaks."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        size = f"{len(text)} characters" if isinstance(text, str) else _brief(text)
        raise _fail(f"a program text is a string of at most {MAX_TEXT} characters, got {size}")
    try:
        doc = loads(text, unique=True)
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
    for index, row in enumerate(_list(doc["ops"], MAX_OPS, "ops")):
        nodes.append(_node(row, index, stage, nodes))
    outs = [_int(o, 0, max(len(nodes), 1), "an output id") for o in _list(doc["outs"], STAGES[stage].outs, f"outs of the {stage} stage")]
    if outs and not nodes:
        raise _fail("a program with outputs has ops")
    for out in outs:
        if nodes[out].name == "put":
            raise _fail(f"output {out} is a put, which has no value")
    program = Program(stage, nodes, outs, chans, params)
    _check_sources(program)
    _ = program.effects
    _check_depth(nodes)
    return program


def _check_depth(nodes: Sequence[Node]) -> None:
    """Values that pass through a register count on."""
    alias = pending_values(nodes)
    depth: list[int] = []
    for index, node in enumerate(nodes):
        args = (alias[index],) if index in alias else node.args
        moves = node.name == "transpose" or (node.name == "broadcast" and nodes[node.args[0]].shape != ())
        depth.append(max((depth[a] for a in args), default=0) + (moves or OPS[node.name].kind in _DEEP))
        if depth[-1] > MAX_DEPTH:
            chain = f"a chain of more than {MAX_DEPTH} ops on memory that depend on each other"
            raise _fail(f"op {index} ({node.name}) ends {chain}; split it over several passes")


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
    rows = program.rows
    widths: dict[str, int] = {}
    given: dict[str, Shape] = {}
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
        elif node.name in ("output", "outputs"):
            _check_readout(rows, index, node, widths)
        elif node.name == "intrinsic":
            _check_intrinsic(program.stage, index, node, given)
        elif node.name == "const" and node.dtype == "bool" and node.attrs["bits"] not in (0, 1):
            raise _fail(f"op {index} (const) is a bool of 0 or 1")
    if touched != len(program.chans):
        raise _fail(f"{len(program.chans)} channels declared, {touched} used")
    if slots != len(program.params):
        raise _fail(f"{len(program.params)} params declared, {slots} used")
    if program.stage == "map":
        _check_map(program)


def _check_readout(rows: int | None, index: int, node: Node, widths: dict[str, int]) -> None:
    name = str(node.attrs["name"])
    if widths.setdefault(name, node.shape[-1]) != node.shape[-1]:
        raise _fail(f"op {index} ({node.name}) reads {name} rows of two widths")
    if node.name == "outputs" and node.shape[0] != rows:
        raise _fail(f"op {index} (outputs) reads {node.shape[0]} rows, another one {rows}; a pass has one number of read-outs")
    if node.name == "output" and rows is not None and int(node.attrs["index"]) >= rows:
        raise _fail(f"op {index} (output) reads row {node.attrs['index']} of the {rows} that outputs declares")


def _check_intrinsic(stage: str, index: int, node: Node, given: dict[str, Shape]) -> None:
    name = str(node.attrs["name"])
    fault = intrinsic_fault(stage, name, node.type)
    if fault:
        raise _fail(f"op {index} (intrinsic) {fault}")
    if given.setdefault(name, node.shape) != node.shape:
        raise _fail(f"op {index} (intrinsic) gives {name!r} two shapes")
    if node.shape and given.setdefault("", node.shape[:1]) != node.shape[:1]:
        raise _fail(f"op {index} (intrinsic) has {node.shape[0]} token rows, another one {given[''][0]}; a stage has one number of them")


def _check_map(program: Program) -> None:
    lengths = {n.shape for n in program.ops if n.shape}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise _fail(f"a map program works on vectors of one length, got the shapes {sorted(lengths)[:4]}")
    if len(program.outs) != 1 or program.ops[program.outs[0]].type != ("f32", next(iter(lengths))):
        raise _fail("a map program has exactly one output, f32 [n]")
    used = sorted({int(n.attrs["index"]) for n in program.ops if n.name == "input"})
    if used != list(range(len(used))) or not used:
        raise _fail(f"a map program numbers its inputs 0, 1, …; got {used}")
