"""How large a schedule becomes in WGSL: the cap on lines, and which chains are too long to be computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from pie_core.codegen.schedule_plan import Loop, Schedule
from pie_core.codegen.schedule_walk import local_args, loop_values
from pie_core.codegen.wgsl_lib import helpers_for
from pie_core.eta.errors import ProgramError
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node, Program

MAX_LINES = 8192  # WGSL lines after inlining, all loops together: compilers inline everything, 20,000 lines take lavapipe half a minute
STORE_LINES = 24  # a chain this long that several phases need is computed once and stored


def check_size(plan: Schedule) -> None:
    """Raises ProgramError when the fused code would hold too many lines."""
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


def is_long(plan: Schedule, value: int) -> bool:
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
