"""The split form of an epilogue for GPUs: a launch a phase with several workgroups a lane, whose folds meet in scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pie_core.codegen.schedule import Loop, Phase, Schedule, Sink, Skeleton, schedule
from pie_core.codegen.wgsl import Epilogue, check_workgroup, phase_title, stores_scratch, used_bindings
from pie_core.codegen.wgsl_bounds import check_total
from pie_core.codegen.wgsl_calls import Part, barriers, cut_rows
from pie_core.codegen.wgsl_folds import Accumulator
from pie_core.codegen.wgsl_loops import Grid
from pie_core.codegen.wgsl_writer import MAX_ITERATIONS, TooLong, WgslKernel, value_name
from pie_core.eta.program import Program

MAX_GROUPS = 64
LAUNCH_BARRIERS = 16  # of the skeletons of one launch: lavapipe takes time to compile that grows with their square


@dataclass(frozen=True)
class Partial:
    """Where the parts of a fold lie: `parts` groups of a word (or two) a thread, from scratch word `word`. `phase`: where they are made."""

    sink: Sink
    phase: int
    word: int
    parts: int

    def at(self, which: int, group: str, workgroup: int) -> str:
        """Scratch index of this thread's word `which` of a group."""
        return f"mine + {self.word + which * self.parts * workgroup}u + {group} * {workgroup}u + lid"


class _Launch(Epilogue):
    """One launch. Folds of earlier phases have names from the start; those that the body uses are joined at its top."""

    def __init__(self, plan: Schedule, grid: Grid, partials: dict[tuple[str, int], Partial], phase: int) -> None:
        super().__init__(plan, grid)
        self.partials = partials
        self.phase = phase
        self._folds: dict[str, Partial] = {}
        for (kind, value), partial in partials.items():
            if partial.phase >= phase:
                continue
            name = self.name(value_name(value, plan.node(value)) if kind == "reduce" else f"any_nan_{value}")
            self._folds[name] = partial
            if kind == "reduce":
                self.scalars[value, 0] = name
            else:
                self.status[value] = name

    def takes(self, skeleton: Skeleton, part: Part | None) -> bool:
        """Whether there is room for one more skeleton."""
        routine = self.routines.made(self, skeleton, part)
        code = self.barriers + barriers(routine.text)
        return self.iterations + routine.iterations <= MAX_ITERATIONS and code <= LAUNCH_BARRIERS

    def save(self, folds: Sequence[Accumulator]) -> None:
        """Write this group's part of each fold."""
        for fold in folds:
            partial = self.partials[fold.key]
            self.uses.add("scratch")
            inside = "" if partial.parts == self.grid.groups else f"if (group.x < {partial.parts}u) "
            for which, word in enumerate(fold.partial()):
                write = f"scratch[{partial.at(which, 'group.x', self.grid.workgroup)}] = {word};"
                self.line(f"{inside}{{ {write} }}" if inside else write)

    def join_parts(self) -> None:
        """Put the joins that the body needs before it."""
        body, self.lines = self.lines, []
        text = "\n".join(body)
        needed = {name: partial for name, partial in self._folds.items() if re.search(rf"\b{name}\b", text)}
        folds = {name: Accumulator(self, self.plan, partial.sink) for name, partial in needed.items()}
        if folds:
            self.uses.add("scratch")
            self.line("// what the launches before left: parts of groups, then of threads")
        for fold in folds.values():
            fold.start(self)
        for parts in sorted({p.parts for p in needed.values()}):
            with self.loop(f"var g = 0u; g < {parts}u; g += 1u", parts):
                for name, fold in folds.items():
                    partial = needed[name]
                    if partial.parts == parts:
                        fold.join(self, [f"scratch[{partial.at(w, 'g', self.grid.workgroup)}]" for w in range(fold.words)])
        self.joiner.join(self, list(folds.values()))
        for name, fold in folds.items():
            self.line(f"let {name} = {fold.final};  // {fold.note}")
        self.lines += body

    def describe(self) -> str:
        """What a workgroup does."""
        return f"Split: {self.grid.groups} workgroups of {self.grid.workgroup} a lane"


def _partials(plan: Schedule, grid: Grid) -> tuple[dict[tuple[str, int], Partial], int]:
    """Places of all folds behind the schedule's scratch, and the words of a lane in all."""
    found: dict[tuple[str, int], Partial] = {}
    word = plan.scratch_words
    sizes = Epilogue(plan, grid)  # only to ask each fold for its words
    for number, phase in enumerate(plan.phases):
        for loop in phase.loops:
            for sink in loop.sinks:
                if sink.kind == "store" or sink.targets:
                    continue
                fold = Accumulator(sizes, plan, sink)
                found[fold.key] = Partial(sink, number, word, grid.parts(loop.n))
                word += fold.words * grid.parts(loop.n) * grid.workgroup
    return found, word


def _ends(plan: Schedule) -> bool:
    """Whether the loops of the last phase can be followed by the scalar results: nothing is folded or made from memory there, or stored for
    them by other workgroups."""
    last: Phase | None = plan.phases[-1] if plan.phases else None
    if last is None or last.skeletons or stores_scratch(last):
        return False
    return all(s.kind == "store" for loop in last.loops for s in loop.sinks)


def longest_loop(plan: Schedule) -> int:
    """Elements of the longest loop of an epilogue."""
    return max((loop.rows * loop.n for phase in plan.phases for loop in phase.loops), default=0)


def loop_iterations(plan: Schedule, workgroup: int) -> int:
    """Fewest iterations of one invocation in a fused kernel: those of loops over elements."""
    return sum(-(-loop.rows * loop.n // workgroup) for phase in plan.phases for loop in phase.loops)


def emit_epilogue_wgsl_split(program: Program, groups: int, workgroup: int = 256, plan: Schedule | None = None) -> tuple[WgslKernel, ...]:
    """The launches of an epilogue, to run in order: grid (groups or 1, lanes, 1); all have the same bindings and `scratch_words`. Results
    equal those of `emit_epilogue_wgsl(program, workgroup, groups)` bit for bit, where that fits one launch: here loops and rows are spread
    over as many as their iterations, and their code, ask for. `groups` is 1 to MAX_GROUPS; `plan`: the program's schedule, if it is there.
    Raises ProgramError when a bound does not hold."""
    check_workgroup(workgroup)
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"groups must be from 1 to {MAX_GROUPS}, got {groups}")
    plan = plan or schedule(program)
    wide, alone = Grid(workgroup, groups, split=True), Grid(workgroup, groups)
    partials, words = _partials(plan, wide)
    launches: list[_Launch] = []
    for number, phase in enumerate(plan.phases):
        if phase.loops:
            launches += _loop_launches(plan, wide, partials, number, phase)
        launches += _skeleton_launches(plan, alone, partials, number, phase)
        _check(launches)
    if _ends(plan):
        body, guard = launches[-1], "lid == 0u && group.x == 0u"
    else:
        body, guard = _Launch(plan, alone, partials, len(plan.phases)), "lid == 0u"
        launches.append(body)
    body.line("// scalar results")
    body.results(guard)
    for body in launches:
        body.join_parts()
    bindings = used_bindings(set().union(*(body.uses for body in launches)))
    words = words if ("scratch", "rw") in bindings else 0
    kernels = tuple(body.kernel("group.y", (groups if body.grid.split else 1, 0, 1), bindings, words) for body in launches)
    check_total(sum(kernel.iterations for kernel in kernels), sum(kernel.barriers for kernel in kernels))
    return kernels


def _loop_launches(plan: Schedule, grid: Grid, partials: dict[tuple[str, int], Partial], number: int, phase: Phase) -> list[_Launch]:
    """The loops of a phase in one launch; in one each where that would be too long."""
    try:
        return [_loop_launch(plan, grid, partials, number, phase.loops)]
    except TooLong:
        if len(phase.loops) == 1:
            raise
    return [_loop_launch(plan, grid, partials, number, (loop,)) for loop in phase.loops]


def _loop_launch(plan: Schedule, grid: Grid, partials: dict[tuple[str, int], Partial], number: int, loops: tuple[Loop, ...]) -> _Launch:
    body = _Launch(plan, grid, partials, number)
    body.line(f"// {phase_title(number, Phase(loops, ()))}")
    body.save(body.loops(loops))
    return body


def _skeleton_launches(plan: Schedule, grid: Grid, partials: dict[tuple[str, int], Partial], number: int, phase: Phase) -> list[_Launch]:
    """The skeletons of a phase, as many to a launch as it has room for; rows of one in several launches where they ask for it."""
    launches: list[_Launch] = []
    for skeleton in phase.skeletons:
        for part in _row_parts(_Launch(plan, grid, partials, number), skeleton):
            if launches and launches[-1].takes(skeleton, part):
                body = launches[-1]
            else:
                body = _Launch(plan, grid, partials, number)
                body.line(f"// {phase_title(number, Phase((), phase.skeletons))}")
                launches.append(body)
            body.routines.call(body, skeleton, part)
            body.meet()
            _check(launches)
    return launches


def _check(launches: Sequence[Epilogue]) -> None:
    """Raises ProgramError as soon as what was written is too much."""
    check_total(sum(body.iterations for body in launches), sum(body.routines.barriers for body in launches))


def _row_parts(body: Epilogue, skeleton: Skeleton) -> list[Part | None]:
    """All rows as one, or parts of which each fits a launch. Raises TooLong for a row that does not."""
    rows = count = cut_rows(skeleton, body.plan.program)
    while body.routines.made(body, skeleton, Part(0, count) if count < rows else None).iterations > MAX_ITERATIONS:
        if count == 1:
            body.routines.call(body, skeleton, Part(0, 1) if rows > 1 else None)  # says how long it is
        count = -(-count // 2)
    return [None] if count == rows else [Part(first, min(count, rows - first)) for first in range(0, rows, count)]
