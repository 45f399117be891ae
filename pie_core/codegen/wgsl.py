"""Renders epilogue Programs as WGSL from their schedule: fused (one launch, one workgroup a lane) or split (a launch a phase, several).

Every name is made of the op table's names and counters, every number comes from the verified program; nothing of a program's text reaches
the source as text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.codegen.layout import ROW, STATUS
from pie_core.codegen.schedule import MAX_LINES, Loop, Phase, Schedule, schedule
from pie_core.codegen.wgsl_bounds import MAX_TOTAL_ITERATIONS, check_total
from pie_core.codegen.wgsl_calls import Routines
from pie_core.codegen.wgsl_folds import TREE, Accumulator, Joiner
from pie_core.codegen.wgsl_loops import Grid, store, write_loop
from pie_core.codegen.wgsl_routines import common
from pie_core.codegen.wgsl_values import Values
from pie_core.codegen.wgsl_writer import BINDINGS, MAX_ITERATIONS, WgslKernel, module, note_of, plus, value_name
from pie_core.eta.errors import ProgramError
from pie_core.eta.program import Program


class Epilogue(Values):
    """One kernel of an epilogue: its body, and what it needs around it."""

    def __init__(self, plan: Schedule, grid: Grid) -> None:
        super().__init__(plan)
        self.grid = grid
        self.routines = Routines(grid.workgroup)
        self.joiner = Joiner(grid.workgroup)
        self.status: dict[int, str] = {}  # read-out -> name of its NaN flag
        self._met = 0

    def title(self, number: int, text: str) -> None:
        """A comment that opens a part of the kernel."""
        self.phase = number
        self.line(f"// {text}")

    def loops(self, loops: Sequence[Loop]) -> list[Accumulator]:
        """All loops of a phase; the folds whose threads are still to be joined."""
        folds: list[Accumulator] = []
        for loop in loops:
            folds += write_loop(self, loop, self.grid, self.joiner)
        return folds

    def meet(self) -> None:
        """A barrier behind which all threads see the scratch that was written, and may write what was read."""
        self.line("storageBarrier();")
        self._met = len(self.lines)

    def touched_scratch(self) -> bool:
        """Whether anything read or wrote scratch since the threads last met."""
        return any("scratch[" in line for line in self.lines[self._met :])

    def join(self, folds: Sequence[Accumulator]) -> None:
        """Join the threads' parts; the results are scalars from here on."""
        self.joiner.join(self, folds)
        for fold in folds:
            if fold.sink.kind == "nan":
                self.status[fold.id] = fold.acc
            else:
                node = self.plan.node(fold.id)
                self.scalars[fold.id, 0] = self.let(fold.final, value_name(fold.id, node), note_of(fold.id, node))

    def skeletons(self, phase: Phase) -> None:
        """All skeletons of a phase, a barrier behind each."""
        for skeleton in phase.skeletons:
            self.routines.call(self, skeleton)
            self.meet()

    def results(self, guard: str = "lid == 0u") -> None:
        """Scalar stores and the status word, by one thread."""
        values = [(sink, self.scalar(sink.id)) for sink in self.plan.stores]
        for sink in self.plan.stores:
            for target in sink.targets:
                self.lane(target.word)
        at = self.lane(STATUS)
        with self.block(f"if ({guard})"):
            for sink, value in values:
                store(self, sink, value, "0u")
            flags = " | ".join(self.status[i] for i in self.plan.checks()) or "0u"
            self.line(f"if ({at} != NONE) {{ results[{at}] = {flags}; }}")

    def kernel(self, lane: str, grid: tuple[int, int, int], bindings: Sequence[tuple[str, str]], scratch_words: int) -> WgslKernel:
        """The finished kernel. `lane`: the builtin that numbers lanes. Raises ProgramError over a bound."""
        wg, lane_row = self.grid.workgroup, f"lanes[{plus('lane', f'{ROW}u')}]"
        head = [
            f"@compute @workgroup_size({wg})",
            "fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {",
            f"  let lane = {lane} * {self.plan.layout.words}u;",
            f"  if ({lane_row} == NONE) {{ return; }}  // its gate is shut",
        ]
        if scratch_words:
            head.append(f"  let mine = {lane} * {scratch_words}u;")
        head += self.joiner.head(lane_row)
        body = [*self.head, *self.lines]
        functions, shared = common("\n".join([*self.routines.functions, *body]), wg)
        shared = [*self.joiner.declarations(), *shared]
        lines = len(self.lines) + self.routines.lines
        if lines > MAX_LINES:
            raise ProgramError(f"the kernel would hold {lines} lines of WGSL, the cap is {MAX_LINES}: use fewer sorts and selections")
        note = f"// {self.describe()}; at most {self.iterations} loop iterations an invocation."
        text = module(note, bindings, shared, [*functions, *self.routines.functions], [*head, *body, "}"])
        return WgslKernel(text, wg, tuple(bindings), self.iterations, grid, scratch_words, self.barriers)

    @property
    def barriers(self) -> int:
        """Barriers of the code so far, calls inlined; those outside of routines count half, as they take half the time to compile."""
        return self.routines.barriers + sum(line.endswith("Barrier();") for line in self.lines) // 2

    def describe(self) -> str:
        """What a workgroup does."""
        return f"One workgroup of {self.grid.workgroup} a lane" + (f", sums in {self.grid.groups} parts" if self.grid.groups > 1 else "")


def used_bindings(uses: set[str]) -> tuple[tuple[str, str], ...]:
    """The bindings a kernel uses, in the order of all kernels."""
    return tuple((name, access) for name, access in BINDINGS if name in uses)


def stores_scratch(phase: Phase) -> bool:
    """Whether loops of the phase write scratch."""
    return any(target.region == "scratch" for loop in phase.loops for sink in loop.sinks for target in sink.targets)


def check_workgroup(workgroup: int) -> None:
    """Raise ValueError for a workgroup size that the trees cannot join."""
    if workgroup % TREE or not TREE <= workgroup <= 256:
        raise ValueError(f"workgroup must be a multiple of {TREE} from {TREE} to 256, got {workgroup}")


def phase_title(number: int, phase: Phase) -> str:
    """What a phase holds, for its comment."""
    made = [f"a loop over {f'{loop.rows} rows of {loop.n}' if loop.rows > 1 else loop.n} elements" for loop in phase.loops]
    many = len(phase.skeletons)
    made += [f"{many} op{'s' if many > 1 else ''} from memory to memory"] if many else []
    return f"phase {number}: {', '.join(made) or 'nothing'}"


def emit_epilogue_wgsl(program: Program, workgroup: int = 256, groups: int = 1, plan: Schedule | None = None) -> WgslKernel:
    """The fused kernel of an epilogue: grid (lanes, 1, 1), one workgroup a lane. Bindings, only those used: logits [R, V] f32, hidden
    [R, d] f32, arena u32 (rw), lanes u32, results u32 (rw), scratch u32 (rw, `scratch_words` a lane). `workgroup` is a multiple of 16 up to
    256. Sums run in the order of a split kernel of `groups` groups. `plan`: the program's schedule, if it is there. Raises
    ProgramError when a bound does not hold; TooLong where only one launch has not the room."""
    check_workgroup(workgroup)
    plan = plan or schedule(program)
    body = Epilogue(plan, Grid(workgroup, groups))
    for number, phase in enumerate(plan.phases):
        body.title(number, phase_title(number, phase))
        stores = stores_scratch(phase)
        if stores and body.touched_scratch():
            body.meet()  # what an earlier phase read is written here
        folds = body.loops(phase.loops)
        if stores or (phase.skeletons and body.touched_scratch()):
            body.meet()
        body.join(folds)
        body.skeletons(phase)
    body.title(len(plan.phases), "scalar results")
    body.results()
    check_total(body.iterations, body.barriers)
    return body.kernel("group.x", (0, 1, 1), used_bindings(body.uses), plan.scratch_words)


__all__ = ["MAX_ITERATIONS", "MAX_TOTAL_ITERATIONS", "WgslKernel", "emit_epilogue_wgsl"]
