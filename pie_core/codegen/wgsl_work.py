"""What an epilogue's loops cost on webgpu, in nanoseconds of a lane: a bound, and a share of a step."""

from __future__ import annotations

from typing import Literal

from pie_core.codegen.cpu_work import MAX_WORK, op_cost, skeleton_work
from pie_core.codegen.schedule_plan import Schedule
from pie_core.codegen.schedule_walk import loop_values
from pie_core.eta.errors import ProgramError

SOFTWARE = 5, 4  # a software adapter takes so many times what the cpu device does, as a fraction
SKELETON = 6  # what goes from memory to memory, again so many times
GPU_THREADS = 64  # a lane has at least so many times the speed of one core on a GPU


def lane_work(plan: Schedule, adapter_class: Literal["software", "gpu"]) -> int:
    """Nanoseconds of one lane, about, at most. Raises ProgramError over the bound."""
    work = 0
    for phase in plan.phases:
        for loop in phase.loops:
            each = 1 + sum(op_cost(plan.node(v)) for v in loop_values(plan, loop) if plan.loads(v, loop.phase) is None)
            work += loop.rows * (each * -(-loop.n // 4))
        work += SKELETON * sum(skeleton_work(plan.program, plan.node(s.id)) for s in phase.skeletons)
    work = work * SOFTWARE[0] // SOFTWARE[1] if adapter_class == "software" else work // GPU_THREADS
    if work > MAX_WORK:
        raise ProgramError(
            f"a pass of the program would take some {work // 1_000_000} ms or more on this webgpu device, the bound is "
            f"{MAX_WORK // 1_000_000} ms, since everybody's token waits for it: use fewer ops over large tensors, or smaller ones, or "
            "split the program over several passes"
        )
    return work
