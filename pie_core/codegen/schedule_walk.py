"""What a loop or a scalar of a schedule needs, and in which order: the questions of both emitters."""

from __future__ import annotations

from collections.abc import Container, Iterable

from pie_core.codegen.access import access
from pie_core.codegen.schedule_plan import Loop, Schedule
from pie_core.eta.ops import OPS


def loop_values(plan: Schedule, loop: Loop) -> list[int]:
    """Resolved ids of the vector values that `loop` computes or loads, in program order."""
    found = plan.walked.get(id(loop))
    if found is None:
        found = plan.walked[id(loop)] = sorted(needed(plan, loop_sources(plan, loop), loop.phase))
    return found


def loop_sources(plan: Schedule, loop: Loop) -> list[int]:
    """What the sinks of `loop` consume."""
    return [plan.node(s.id).args[0] if s.kind == "reduce" else s.id for s in loop.sinks]


def local_args(plan: Schedule, value: int, phase: int) -> list[int]:
    """Resolved operands that computing an element of `value` in `phase` needs at the same element, vectors and scalars (those of a value
    that is loaded: none)."""
    if plan.loads(value, phase) is not None:
        return []
    found = plan.local.get(value)
    if found is None:
        args = enumerate(plan.node(value).args)
        found = plan.local[value] = [plan.resolve(a) for i, a in args if access(plan.program, value, i) == "same"]
    return found


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


def needed(plan: Schedule, todo: list[int], phase: int) -> set[int]:
    """The resolved vector values that computing those of `todo` in `phase` touches, these included."""
    found: set[int] = set()
    todo = [v for v in map(plan.resolve, todo) if plan.node(v).shape]
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            todo += [arg for arg in local_args(plan, value, phase) if arg not in found and plan.node(arg).shape]
    return found


def phases_of(plan: Schedule, sources: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of the values that `sources`, (value, phase) pairs, touch: the phases, as a mask, in which each is computed or loaded. The same as
    `needed` of each, in one walk from the last value to the first."""
    masks = [0] * len(plan.program.ops)
    for value, phase in sources:
        masks[plan.resolve(value)] |= 1 << phase
    found: dict[int, int] = {}
    for value in range(len(masks) - 1, -1, -1):
        mask = masks[value]
        if not mask or not plan.node(value).shape:
            continue
        found[value] = mask
        computed = mask & ((1 << plan.ready[value]) - 1) if value in plan.ready else mask  # loaded in the others
        if computed:
            for arg in local_args(plan, value, -1):
                masks[arg] |= computed
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
