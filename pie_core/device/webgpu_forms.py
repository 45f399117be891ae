"""Which kernels an epilogue gets on webgpu: one launch for all, one a phase with several workgroups, or as many as its loops ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pie_core.codegen import WgslKernel, emit_epilogue_wgsl, emit_epilogue_wgsl_split, keep_loops
from pie_core.codegen.schedule import Schedule, schedule
from pie_core.codegen.wgsl_split import longest_loop, loop_iterations
from pie_core.codegen.wgsl_work import lane_work
from pie_core.codegen.wgsl_writer import MAX_ITERATIONS, TooLong
from pie_core.eta.program import Program

# Lanes of an epilogue workgroup: a software adapter pays for every lane at every barrier.
EPILOGUE_WORKGROUP = {"software": 32, "gpu": 256}
# Most barriers of one kernel: the time that lavapipe compiles grows with their square, so that several kernels take less together.
FUSED_BARRIERS = {"software": 75, "gpu": 128}
JIT_LINE, JIT_BARRIER = 300_000, 40_000_000  # nanoseconds that lavapipe compiles for at the first run
MAX_WORKGROUP = 256
SPLIT_ELEMENTS = 16_384  # shortest row that is worth several workgroups and a launch a phase on a GPU
SPLIT_GROUPS = 32  # workgroups of a lane then


@dataclass(frozen=True)
class Forms:
    """Launches in order. `fused` runs any number of lanes; `split`, maybe none, is for few of them on a GPU. `work`: nanoseconds of a lane,
    about, at most; `first_work`: of compiling when it runs first. `lines`: of all WGSL."""

    fused: tuple[WgslKernel, ...]
    split: tuple[WgslKernel, ...]
    work: int
    first_work: int
    lines: int


def epilogue_forms(program: Program, adapter_class: Literal["software", "gpu"]) -> Forms:
    """The kernels of an epilogue. Raises ProgramError when a bound does not hold."""
    plan = schedule(program)
    work = lane_work(plan, adapter_class)
    parts = SPLIT_GROUPS if adapter_class == "gpu" and longest_loop(plan) >= SPLIT_ELEMENTS else 1
    fused = _fused(plan, EPILOGUE_WORKGROUP[adapter_class], parts)
    if fused is not None and fused.barriers > FUSED_BARRIERS[adapter_class]:
        fused = None
    split = emit_epilogue_wgsl_split(program, parts, plan=plan) if parts > 1 or fused is None else ()
    if adapter_class == "software":
        fused, split = fused and keep_loops(fused), tuple(map(keep_loops, split))
    forms = (fused,) if fused is not None else split
    lines = sum(kernel.source.count("\n") for kernel in {*forms, *split})
    first = JIT_LINE * lines + JIT_BARRIER * sum(kernel.barriers for kernel in forms) if adapter_class == "software" else 0
    return Forms(forms, split, work, first, lines)


def _fused(plan: Schedule, workgroup: int, parts: int) -> WgslKernel | None:
    """The fused kernel, in a larger workgroup where the iteration bound does not hold: more lanes have fewer iterations each. None where
    one launch is not enough."""
    while workgroup <= MAX_WORKGROUP:
        if loop_iterations(plan, workgroup) <= MAX_ITERATIONS:
            try:
                return emit_epilogue_wgsl(plan.program, workgroup, parts, plan)
            except TooLong:
                pass
        workgroup *= 2
    return None
