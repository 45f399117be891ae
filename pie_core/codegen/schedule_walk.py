"""What a loop or a scalar of a schedule needs, and in which order: the questions of both emitters."""

from __future__ import annotations

from collections.abc import Container

from pie_core.codegen.access import access
from pie_core.codegen.schedule_plan import Loop, Schedule
from pie_core.eta.ops import OPS


def loop_values(plan: Schedule, loop: Loop) -> list[int]:
    """Resolved ids of the vector values that `loop` computes or loads, in program order."""
    todo = [plan.node(s.id).args[0] if s.kind == "reduce" else s.id for s in loop.sinks]
    return [v for v in sorted(needed(plan, todo, loop.phase)) if plan.node(v).shape]


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


def needed(plan: Schedule, todo: list[int], phase: int) -> set[int]:
    """The resolved vector values that computing those of `todo` in `phase` touches, these included."""
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
