"""Schedules an epilogue Program: phases of loops and skeletons, with the scalar work between them.

A value that is a function of its element index alone is recomputed in each loop that consumes it. What is read at other elements lies in
memory: a read-out row, a channel cell, or the lane's scratch (u32 words, bool as 0 or 1). Level of a value = number of barriers in its
longest chain. Phase p first runs loops (folds and stores of what has level p), then skeletons; what it makes is known from phase p + 1 on.
"""

from __future__ import annotations

from pie_core.codegen.access import access
from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.codegen.schedule_plan import (
    HISTOGRAM_WORDS,
    SMALL_SORT,
    Loop,
    Phase,
    Place,
    Schedule,
    Sink,
    Skeleton,
    Target,
    live_outputs,
    live_values,
    resolve_value,
    result_words,
    work_words,
)
from pie_core.codegen.schedule_size import MAX_LINES, STORE_LINES, check_size, is_long
from pie_core.codegen.schedule_walk import local_args, loop_sources, loop_values, phases_of, scalar_args, scalar_key, scalar_order
from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import pending_values
from pie_core.eta.ops import OPS
from pie_core.eta.program import Program
from pie_core.eta.rules import elements

__all__ = [
    "HISTOGRAM_WORDS", "MAX_LINES", "MAX_SCRATCH_WORDS", "SMALL_SORT", "STORE_LINES", "Loop", "Phase", "Place",
    "Schedule", "Sink", "Skeleton", "Target", "live_outputs", "live_values", "local_args",
    "loop_values", "result_words", "scalar_args", "scalar_key", "scalar_order", "schedule", "work_words",
]  # fmt: skip

MAX_SCRATCH_WORDS = 1 << 24  # u32 words of scratch a lane


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
        return resolve_value(self.program, self.alias, value)

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
        sources = [(v, loop.phase) for phase in plan.phases for loop in phase.loops for v in loop_sources(plan, loop)]
        computed = phases_of(plan, [*sources, *self.stored.items()])  # loops of what is stored are made at the end
        # Upwards: once a value is stored, what is made from it starts there, so neither a chain nor this search gets long.
        for value, phases in sorted(computed.items()):
            several = phases & (phases - 1)
            if not several or value in self.ready or elements(self.program.ops[value].shape) < 64 or not is_long(plan, value):
                continue
            first = (phases ^ several).bit_length() - 1
            self.stored[value] = first
            self._later(value, first + 1)

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
    check_size(result)
    return result


def _stores(program: Program, layout: LaneLayout) -> list[tuple[int, tuple[Target, ...]]]:
    where: dict[int, list[Target]] = {}
    for chan, effect in enumerate(program.effects):
        if effect.put is not None:
            where.setdefault(effect.put, []).extend((Target("arena", layout.put(chan)), Target("results", layout.copy(chan))))
    for index, value in enumerate(program.outs):
        where.setdefault(value, []).append(Target("results", layout.out(index)))
    return [(value, tuple(targets)) for value, targets in where.items()]
