"""What a schedule is made of: phases of loops and skeletons, where values lie, and what of a program is alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pie_core.codegen.access import access
from pie_core.codegen.layout import LaneLayout
from pie_core.eta.flow import pending_values
from pie_core.eta.ops import OPS
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

SMALL_SORT = 1024  # longest row that is sorted by counting ranks
HISTOGRAM_WORDS = 4096  # work words of a radix pass: 16 digits of 256 threads

Region = Literal["logits", "hidden", "arena", "results", "scratch"]


@dataclass(frozen=True)
class Target:
    """Where a value goes: an `arena` or `results` offset at lane word `word` (an offset of NONE drops it), or `scratch` word `word`."""

    region: Region
    word: int


@dataclass(frozen=True)
class Place:
    """Where a value lies: read-out row `word` of `logits` or `hidden`, the cell at the `arena` offset in lane word `word`, or `scratch`
    word `word`. Elements are consecutive words."""

    region: Region
    word: int


@dataclass(frozen=True)
class Sink:
    """What a loop consumes: a fold of reduction `id` (of a matrix: one a row, stored to `targets`), the NaN check of read-out `id`, or
    the store of value `id` to `targets`."""

    kind: Literal["reduce", "nan", "store"]
    id: int
    targets: tuple[Target, ...] = ()


@dataclass
class Loop:
    """One pass over `rows` x `n` elements in phase `phase`; the flat index runs over all of them. Folds of a loop with several rows, or
    of a row of a matrix, start anew at each row."""

    n: int
    rows: int
    phase: int
    sinks: list[Sink] = field(default_factory=list)


@dataclass(frozen=True)
class Skeleton:
    """One op that works from memory to memory. `operands`: the place of each operand, None for a scalar (evaluate it at function scope).
    `result`: scratch word of each result (sort_desc, top_k: values, indices; pivot: two words a row: the least key kept and, for equal
    keys, the last index kept). `work`: scratch word of `work_words` words that are free during this skeleton."""

    id: int
    operands: tuple[Place | None, ...]
    result: tuple[int, ...]
    work: int
    work_words: int


@dataclass(frozen=True)
class Phase:
    """Loops (in any order, none reads what another stores), then a barrier, then skeletons, each followed by a barrier."""

    loops: tuple[Loop, ...]
    skeletons: tuple[Skeleton, ...]


@dataclass(frozen=True)
class Schedule:
    """`stores`: scalar stores, after all phases. `alias`: take or read of a value put earlier in the pass -> that value. `places`: memory
    of the values that lie there, `ready`: the first phase that may load each. `scratch_words`: u32 words of scratch a lane needs."""

    program: Program
    layout: LaneLayout
    phases: tuple[Phase, ...]
    stores: tuple[Sink, ...]
    alias: dict[int, int]
    places: dict[int, Place]
    ready: dict[int, int]
    scratch_words: int
    walked: dict[int, list[int]] = field(default_factory=dict)  # what schedule_walk.py found: values of a loop, by its id,
    local: dict[int, list[int]] = field(default_factory=dict)  # and operands at the same element

    def resolve(self, value: int) -> int:
        """The value id that holds what `value` is: register reads, and views that keep the flat index, looked through."""
        return resolve_value(self.program, self.alias, value)

    def node(self, value: int) -> Node:
        """The op behind a resolved value."""
        return self.program.ops[value]

    def loads(self, value: int, phase: int) -> Place | None:
        """Where a resolved value is loaded from in `phase`; None when it has to be computed there."""
        return self.places[value] if self.ready.get(value, phase + 1) <= phase else None

    def checks(self) -> tuple[int, ...]:
        """Read-outs that the status word answers for."""
        return live_outputs(self.program)


def resolve_value(program: Program, alias: dict[int, int], value: int) -> int:
    while True:
        node = program.ops[value]
        if value in alias:
            value = alias[value]
        elif OPS[node.name].kind == "view" and (node.shape == ()) == (program.ops[node.args[0]].shape == ()):
            if access(program, value, 0) != "same":
                return value
            value = node.args[0]
        else:
            return value


def live_values(program: Program) -> set[int]:
    """Values that an output or a committed put needs."""
    alias = pending_values(program.ops)
    todo = [*program.outs, *(e.put for e in program.effects if e.put is not None)]
    live: set[int] = set()
    while todo:
        value = todo.pop()
        if value not in live:
            live.add(value)
            todo.extend([alias[value]] if value in alias else program.ops[value].args)
    return live


def live_outputs(program: Program) -> tuple[int, ...]:
    """Value ids of the read-out rows that the program uses: a NaN in one sets status bit 0."""
    live = live_values(program)
    return tuple(i for i, n in enumerate(program.ops) if n.name in ("output", "outputs") and i in live)


def result_words(node: Node) -> tuple[int, ...]:
    """Scratch words of each result of a skeleton or pivot."""
    n = elements(node.shape)
    if OPS[node.name].kind == "pivot":
        return (2 * (n // node.shape[-1]),)
    return (n, n) if node.name in ("sort_desc", "top_k") else (n,)


def work_words(program: Program, node: Node) -> int:
    """Scratch words that a skeleton may use while it runs."""
    kind = OPS[node.name].kind
    n = program.ops[node.args[0]].shape[-1]
    if node.name == "sort_desc" or (node.name == "top_k" and node.shape[-1] > SMALL_SORT):
        return 4 * n + HISTOGRAM_WORDS
    if node.name == "top_k":
        return 2 * node.shape[-1] + HISTOGRAM_WORDS
    if node.name == "scatter_set":
        updates = program.ops[node.args[1]].shape[0]
        return 4 * updates + HISTOGRAM_WORDS if updates > SMALL_SORT else 0
    return HISTOGRAM_WORDS if kind == "pivot" or node.name in ("cumsum", "cumprod") else 0
