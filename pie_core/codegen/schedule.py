"""Schedules an epilogue Program: phases of loops and skeletons, with the scalar work between them.

A value that is a function of its element index alone is recomputed in each loop that consumes it. What is read at other elements lies in
memory: a read-out row, a channel cell, or the lane's scratch (u32 words, bool as 0 or 1). Level of a value = number of barriers in its
longest chain. Phase p first runs loops (folds and stores of what has level p), then skeletons; what it makes is known from phase p + 1 on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from pie_core.codegen.access import access
from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.codegen.wgsl_lib import helpers_for
from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import pending_values
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

MAX_LINES = 8192  # WGSL lines after inlining, all loops together: compilers inline everything, 20,000 lines take lavapipe half a minute
MAX_SCRATCH_WORDS = 1 << 24  # u32 words of scratch a lane
STORE_LINES = 24  # a chain this long that several phases need is computed once and stored
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

    def resolve(self, value: int) -> int:
        """The value id that holds what `value` is: register reads, and views that keep the flat index, looked through."""
        return _resolve(self.program, self.alias, value)

    def node(self, value: int) -> Node:
        """The op behind a resolved value."""
        return self.program.ops[value]

    def loads(self, value: int, phase: int) -> Place | None:
        """Where a resolved value is loaded from in `phase`; None when it has to be computed there."""
        return self.places[value] if self.ready.get(value, phase + 1) <= phase else None

    def checks(self) -> tuple[int, ...]:
        """Read-outs that the status word answers for."""
        return live_outputs(self.program)


def _resolve(program: Program, alias: dict[int, int], value: int) -> int:
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


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.layout = lane_layout(program)
        self.alias = pending_values(program.ops)
        self.live = live_values(program)
        self.level: dict[int, int] = {}  # by resolved value
        self.places: dict[int, Place] = {}
        self.ready: dict[int, int] = {}
        self.stored: dict[int, int] = {}  # value -> phase whose loops store it
        self.skeletons: dict[int, int] = {}  # skeleton or pivot -> its phase
        self.rows: dict[int, int] = {}  # reduction of a matrix -> its phase
        for value in range(len(program.ops)):
            if value in self.live:
                self._value(value)

    def resolve(self, value: int) -> int:
        return _resolve(self.program, self.alias, value)

    def late(self, value: int) -> int:
        """Phases after its own level from which a resolved value is known."""
        kind = OPS[self.program.ops[value].name].kind
        return int(kind in ("reduce", "skeleton", "pick", "pivot"))

    def known(self, value: int) -> int:
        """First phase whose loops may use `value`."""
        value = self.resolve(value)
        return self.level[value] + self.late(value)

    def in_memory(self, value: int) -> int:
        """First phase that may load `value` from memory; it is stored for that if need be."""
        value = self.resolve(value)
        if value in self.ready:
            return self.ready[value]
        phase = self.known(value)
        self.stored[value] = phase
        self._later(value, phase + 1)
        return phase + 1

    def _later(self, value: int, phase: int) -> None:
        """`value` can be loaded from `phase` on; where from is decided at the end."""
        self.ready[value] = phase
        self.places[value] = Place("scratch", -1)

    def _value(self, value: int) -> None:
        program = self.program
        if self.resolve(value) != value:
            return
        node = program.ops[value]
        kind = OPS[node.name].kind
        if node.name in ("output", "outputs"):
            self.level[value], self.ready[value] = 0, 0
            index = int(node.attrs["index"]) if node.name == "output" else 0
            self.places[value] = Place("logits" if node.attrs["name"] == "logits" else "hidden", index)
        elif node.name in ("take", "read"):
            self.level[value], self.ready[value] = 0, 0
            self.places[value] = Place("arena", self.layout.take(int(node.attrs["chan"])))
        elif kind == "pick":
            self.level[value] = self.level[node.args[0]]
            self._later(value, self.level[value] + 1)
        elif kind in ("skeleton", "pivot"):
            phase = 0
            for arg in node.args:
                phase = max(phase, self.known(arg))
                if program.ops[arg].shape:
                    phase = max(phase, self.in_memory(arg) - 1)
            self.level[value] = self.skeletons[value] = phase
            if kind == "skeleton":
                self._later(value, phase + 1)
        else:
            level = 0
            for position, arg in enumerate(node.args):
                memory = access(program, value, position) == "memory"
                level = max(level, self.in_memory(arg) if memory else self.known(arg))
            self.level[value] = level
            if kind == "reduce" and len(program.ops[node.args[0]].shape) > 1:
                self.rows[value] = level
                self._later(value, level + 1)

    # Loops ------------------------------------------------------------------------------------------------------------------

    def loops(self) -> tuple[list[list[Loop]], list[Sink]]:
        """Loops by phase without the stores to scratch, and the scalar stores."""
        program = self.program
        sinks: list[tuple[int, int, int, Sink]] = []  # (phase, rows, n, sink)
        for i in live_outputs(program):
            sinks.append((0, 1, elements(program.ops[i].shape), Sink("nan", i)))
        for i, node in enumerate(program.ops):
            if i in self.live and OPS[node.name].kind == "reduce":
                shape = program.ops[node.args[0]].shape
                rows = elements(shape[:-1])
                sinks.append((self.level[i], rows, shape[-1], Sink("reduce", i)))
        scalars: list[Sink] = []
        for value, targets in _stores(program, self.layout):
            if program.ops[value].shape:
                sinks.append((self.known(value), 1, elements(program.ops[value].shape), Sink("store", value, targets)))
            else:
                scalars.append(Sink("store", value, targets))
        last = max([p for p, *_ in sinks] + list(self.stored.values()) + list(self.skeletons.values()), default=-1)
        phases: list[dict[tuple[int, int, bool], Loop]] = [{} for _ in range(last + 1)]
        for phase, rows, n, sink in sinks:
            _loop(phases[phase], phase, rows, n, self._by_row(sink)).sinks.append(sink)
        self.by_key = phases
        return [list(p.values()) for p in phases], scalars

    def _by_row(self, sink: Sink) -> bool:
        return sink.kind == "reduce" and sink.id in self.rows

    def store_long_chains(self, plan: Schedule) -> None:
        """Values that loops of several phases would compute by long chains are stored by the first of them."""
        computed: dict[int, set[int]] = {}
        for phase in plan.phases:
            for loop in phase.loops:
                for value in loop_values(plan, loop):
                    computed.setdefault(value, set()).add(loop.phase)
        for stored, number in self.stored.items():  # their loops are made at the end
            for value in _needed(plan, [stored], number):
                computed.setdefault(value, set()).add(number)
        # Upwards: once a value is stored, what is made from it starts there, so neither a chain nor this search gets long.
        for value, phases in sorted(computed.items()):
            if len(phases) < 2 or value in self.ready or elements(self.program.ops[value].shape) < 64 or not _is_long(plan, value):
                continue
            self.stored[value] = min(phases)
            self._later(value, min(phases) + 1)

    # Scratch ----------------------------------------------------------------------------------------------------------------

    def build(self) -> Schedule:
        loops, scalars = self.loops()
        plan = self._plan(loops, scalars, {}, 0)
        self.store_long_chains(plan)
        return self._finish(scalars)

    def _plan(self, loops: list[list[Loop]], scalars: list[Sink], skeletons: dict[int, list[Skeleton]], words: int) -> Schedule:
        phases = tuple(Phase(tuple(found), tuple(skeletons.get(p, ()))) for p, found in enumerate(loops))
        return Schedule(self.program, self.layout, phases, tuple(scalars), self.alias, self.places, self.ready, words)

    def _finish(self, scalars: list[Sink]) -> Schedule:
        program, end = self.program, len(self.by_key)
        spans: list[tuple[int, int, int, tuple[str, int]]] = []  # (first phase, last phase, words, what)
        for value, phase in self.stored.items():
            spans.append((phase, end, elements(program.ops[value].shape), ("value", value)))
        for value, phase in self.rows.items():
            spans.append((phase, end, elements(program.ops[value].shape), ("value", value)))
        for value, phase in self.skeletons.items():
            node = program.ops[value]
            spans += [(phase, end, words, (f"result{i}", value)) for i, words in enumerate(result_words(node))]
            spans.append((phase, phase, work_words(program, node), ("work", value)))
        where, total = _allocate(self._shorten(spans))
        if total > MAX_SCRATCH_WORDS:
            raise ProgramError(f"the program needs {total} words of scratch a lane, the cap is {MAX_SCRATCH_WORDS}: use shorter vectors")
        for value, phase in self.stored.items():
            target = Target("scratch", where["value", value])
            self.places[value] = Place("scratch", target.word)
            n = elements(program.ops[value].shape)
            _loop(self.by_key[phase], phase, 1, n, False).sinks.append(Sink("store", value, (target,)))
        for value, phase in self.rows.items():
            target = Target("scratch", where["value", value])
            self.places[value] = Place("scratch", target.word)
            for loop in self.by_key[phase].values():
                loop.sinks = [Sink("reduce", value, (target,)) if s.kind == "reduce" and s.id == value else s for s in loop.sinks]
        for value in self.skeletons:
            if OPS[program.ops[value].name].kind == "skeleton":
                self.places[value] = Place("scratch", where["result0", value])
        for value, node in enumerate(program.ops):
            if OPS[node.name].kind == "pick" and value in self.live:
                self.places[value] = Place("scratch", where[f"result{node.attrs['i']}", node.args[0]])
        skeletons: dict[int, list[Skeleton]] = {}
        for value, phase in sorted(self.skeletons.items()):
            skeletons.setdefault(phase, []).append(self._skeleton(value, where))
        return self._plan([list(p.values()) for p in self.by_key], scalars, skeletons, total)

    def _skeleton(self, value: int, where: dict[tuple[str, int], int]) -> Skeleton:
        node = self.program.ops[value]
        operands = tuple(self.places[self.resolve(a)] if self.program.ops[a].shape else None for a in node.args)
        result = tuple(where[f"result{i}", value] for i in range(len(result_words(node))))
        return Skeleton(value, operands, result, where["work", value], work_words(self.program, node))

    def _shorten(self, spans: list[tuple[int, int, int, tuple[str, int]]]) -> list[tuple[int, int, int, tuple[str, int]]]:
        """Spans that end with the last phase that may use them."""
        last = self._last_uses()
        return [(a, b if what[0] == "work" else last.get(what[1], b), n, what) for a, b, n, what in spans]

    def _last_uses(self) -> dict[int, int]:
        """For each value in scratch, a phase after which nothing reads it."""
        program, end = self.program, len(self.by_key)
        last: dict[int, int] = {}
        for i, node in enumerate(program.ops):
            if i not in self.live or self.resolve(i) != i:
                continue
            # An op that is recomputed may run in any phase up to the last use of its own value; only barriers end a chain.
            until = self.level[i] if OPS[node.name].kind in ("reduce", "skeleton") else end
            for arg in map(self._owner, node.args):
                last[arg] = max(last.get(arg, 0), until)
        for value in [*program.outs, *(e.put for e in program.effects if e.put is not None)]:
            last[self._owner(value)] = end
        return last

    def _owner(self, value: int) -> int:
        """The value whose memory holds `value`: itself once resolved, of a pick the op that made both results."""
        value = self.resolve(value)
        node = self.program.ops[value]
        return self.resolve(node.args[0]) if OPS[node.name].kind == "pick" else value


def _loop(phase: dict[tuple[int, int, bool], Loop], number: int, rows: int, n: int, by_row: bool) -> Loop:
    if not by_row:
        rows, n = 1, rows * n
    return phase.setdefault((rows, n, by_row), Loop(n, rows, number))


def _allocate(spans: list[tuple[int, int, int, tuple[str, int]]]) -> tuple[dict[tuple[str, int], int], int]:
    """First fit: spans that overlap in phases (ends included) do not overlap in words. Offsets are multiples of 4 words."""
    placed: list[tuple[int, int, int, int]] = []  # (word, end word, first phase, last phase)
    where: dict[tuple[str, int], int] = {}
    total = 0
    for first, last, words, what in sorted(spans, key=lambda s: (s[0], -s[2], s[3])):
        size, word = -(-words // 4) * 4, 0
        for low, high, a, b in sorted(placed):
            if a <= last and first <= b and low < word + size and word < high:
                word = high
        placed.append((word, word + size, first, last))
        where[what] = word
        total = max(total, word + size)
    return where, total


def schedule(program: Program) -> Schedule:
    """Phases of an epilogue. Raises ProgramError when the stage is another one, the scratch or the fused code would be too large."""
    if program.stage != "epilogue":
        raise ProgramError(f"an epilogue is needed here, the program's stage is {program.stage!r}")
    result = _Builder(program).build()
    _check_size(result)
    return result


def _stores(program: Program, layout: LaneLayout) -> list[tuple[int, tuple[Target, ...]]]:
    where: dict[int, list[Target]] = {}
    for chan, effect in enumerate(program.effects):
        if effect.put is not None:
            where.setdefault(effect.put, []).extend((Target("arena", layout.put(chan)), Target("results", layout.copy(chan))))
    for index, value in enumerate(program.outs):
        where.setdefault(value, []).append(Target("results", layout.out(index)))
    return [(value, tuple(targets)) for value, targets in where.items()]


def loop_values(plan: Schedule, loop: Loop) -> list[int]:
    """Resolved ids of the vector values that `loop` computes or loads, in program order."""
    todo = [plan.node(s.id).args[0] if s.kind == "reduce" else s.id for s in loop.sinks]
    return [v for v in sorted(_needed(plan, todo, loop.phase)) if plan.node(v).shape]


def local_args(plan: Schedule, value: int, phase: int) -> list[int]:
    """Resolved operands that computing an element of `value` in `phase` needs at the same element, vectors and scalars (those of a value
    that is loaded: none)."""
    if plan.loads(value, phase) is not None:
        return []
    node = plan.node(value)
    return [plan.resolve(a) for i, a in enumerate(node.args) if access(plan.program, value, i) == "same"]


def scalar_args(plan: Schedule, value: int, phase: int) -> list[tuple[int, int]]:
    """(resolved operand, element) pairs that computing `value` in `phase` needs at function scope, before its loop."""
    if plan.loads(value, phase) is not None:
        return []
    found: list[tuple[int, int]] = []
    for i, arg in enumerate(plan.node(value).args):
        how = access(plan.program, value, i)
        if how == "scalar" or (how == "same" and not plan.node(plan.resolve(arg)).shape):
            found.append(scalar_key(plan, arg, 0))
        elif how == "state":
            found += [scalar_key(plan, arg, 0), scalar_key(plan, arg, 1)]
    return found


def _needed(plan: Schedule, todo: list[int], phase: int) -> set[int]:
    found: set[int] = set()
    todo = list(todo)
    while todo:
        value = plan.resolve(todo.pop())
        if value in found or not plan.node(value).shape:
            continue
        found.add(value)
        todo.extend(local_args(plan, value, phase))
    return found


def scalar_order(plan: Schedule, value: int, element: int, done: Container[tuple[int, int]], phase: int) -> list[tuple[int, int]]:
    """What must be computed, in order, to know element `element` of `value` outside of loops in `phase`: (resolved value, element) pairs,
    without those in `done`. A reduction of a vector must be in `done`: its phase is over."""
    todo = [scalar_key(plan, value, element)]
    found: set[tuple[int, int]] = set()
    while todo:
        key = todo.pop()
        if key in found or key in done:
            continue
        found.add(key)
        if plan.loads(key[0], phase) is not None:
            continue
        node = plan.node(key[0])
        if OPS[node.name].kind == "reduce":
            raise AssertionError(f"reduction {key[0]} is used before its phase ends")
        todo += scalar_args(plan, key[0], phase)
        todo += [scalar_key(plan, a, key[1]) for a in local_args(plan, key[0], phase)]
    return sorted(found)


def scalar_key(plan: Schedule, value: int, element: int) -> tuple[int, int]:
    """(resolved value, element), element 0 for scalars."""
    value = plan.resolve(value)
    return value, element if plan.node(value).shape else 0


# Size -----------------------------------------------------------------------------------------------------------------------


def _check_size(plan: Schedule) -> None:
    total = sum(_lines(plan.program, n) for n in plan.program.ops if not n.shape)
    for loop in _loops(plan):
        if total <= MAX_LINES:
            total += sum(_lines(plan.program, plan.node(v)) for v in loop_values(plan, loop))
    if total > MAX_LINES:
        raise ProgramError(
            f"the fused kernel would hold more than {MAX_LINES} lines: "
            "use fewer transcendental ops, or fewer dependent reductions over long chains"
        )


def _loops(plan: Schedule) -> Iterator[Loop]:
    for phase in plan.phases:
        yield from phase.loops


def _is_long(plan: Schedule, value: int) -> bool:
    """Whether computing an element of `value` from what lies in memory takes STORE_LINES or more."""
    todo, found, lines = [value], {value}, 0
    while todo and lines < STORE_LINES:
        value = todo.pop()
        if value in plan.ready:
            continue
        lines += _lines(plan.program, plan.node(value))
        for arg in local_args(plan, value, len(plan.phases)):
            if arg not in found and plan.node(arg).shape:
                found.add(arg)
                todo.append(arg)
    return lines >= STORE_LINES


def _lines(program: Program, node: Node) -> int:
    """Lines of WGSL that a compiler sees for one op once its helpers are inlined."""
    row = OPS[node.name]
    if row.kind not in ("elementwise", "generator") or not row.wgsl:
        return 1
    return _template_lines(variant(node.name, tuple(program.ops[a].dtype for a in node.args), node.dtype, row.wgsl))


@cache
def _template_lines(template: str) -> int:
    return 1 + helpers_for(template).count("\n")
