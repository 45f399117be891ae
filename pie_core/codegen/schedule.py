"""Schedules an epilogue Program: phases of loops over vectors, with the scalar work between them.

Every executable vector op is a function of its element index alone, so a chain is recomputed in each loop that consumes it and no vector
is ever stored for later. Level of a value = number of reductions in its longest chain. Phase p holds the reductions and the vector stores
whose operand has level p; reductions of phase p are known from phase p + 1 on. A loop runs over all vectors of one length.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Literal

from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.codegen.wgsl_lib import helpers_for
from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import pending_values
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

MAX_LINES = 8192  # WGSL lines after inlining, all loops together: compilers inline everything, 20,000 lines take lavapipe half a minute


@dataclass(frozen=True)
class Target:
    """Where a value goes: `region` word at lane word `word`; an offset of NONE drops it."""

    region: Literal["arena", "results"]
    word: int


@dataclass(frozen=True)
class Sink:
    """What a loop consumes: a reduction `id`, the NaN check of read-out `id`, or the store of value `id` to `targets`."""

    kind: Literal["reduce", "nan", "store"]
    id: int
    targets: tuple[Target, ...] = ()


@dataclass
class Loop:
    """One pass over `n` elements."""

    n: int
    sinks: list[Sink] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """`phases[p]`: the loops of phase p. `stores`: scalar stores, after all phases. `alias`: take or read of a value put earlier in
    the pass -> that value."""

    program: Program
    layout: LaneLayout
    phases: tuple[tuple[Loop, ...], ...]
    stores: tuple[Sink, ...]
    alias: dict[int, int]

    def resolve(self, value: int) -> int:
        """The value id that holds what `value` is: register reads, broadcasts of the same rank and reshapes looked through."""
        while True:
            node = self.program.ops[value]
            if value in self.alias:
                value = self.alias[value]
            elif node.name == "reshape" and (node.shape == ()) == (self.program.ops[node.args[0]].shape == ()):
                value = node.args[0]
            else:
                return value

    def node(self, value: int) -> Node:
        """The op behind a resolved value."""
        return self.program.ops[value]

    def checks(self) -> tuple[int, ...]:
        """Read-outs that the status word answers for."""
        return live_outputs(self.program)


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
    return tuple(i for i, n in enumerate(program.ops) if n.name == "output" and i in live)


def schedule(program: Program) -> Schedule:
    """Phases of an epilogue. Raises ProgramError when the stage is another one or the fused code would be too large."""
    if program.stage != "epilogue":
        raise ProgramError(f"an epilogue is needed here, the program's stage is {program.stage!r}")
    layout = lane_layout(program)
    alias = pending_values(program.ops)
    live = live_values(program)
    level: list[int] = []
    for i, node in enumerate(program.ops):
        args = (alias[i],) if i in alias else node.args
        level.append(max((level[a] + (OPS[program.ops[a].name].kind == "reduce") for a in args), default=0))
    sinks: list[tuple[int, int, Sink]] = []  # (phase, n, sink)
    sinks += [(0, program.ops[i].shape[0], Sink("nan", i)) for i in live_outputs(program)]
    for i, node in enumerate(program.ops):
        if i in live and OPS[node.name].kind == "reduce":
            sinks.append((level[i], elements(program.ops[node.args[0]].shape), Sink("reduce", i)))
    scalar_stores: list[Sink] = []
    for value, targets in _stores(program, layout):
        sink = Sink("store", value, targets)
        if program.ops[value].shape:
            sinks.append((level[value], elements(program.ops[value].shape), sink))
        else:
            scalar_stores.append(sink)
    phases: list[dict[int, Loop]] = [{} for _ in range(max((p for p, _, _ in sinks), default=-1) + 1)]
    for phase, n, sink in sinks:
        phases[phase].setdefault(n, Loop(n)).sinks.append(sink)
    result = Schedule(program, layout, tuple(tuple(p.values()) for p in phases), tuple(scalar_stores), alias)
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


def _check_size(plan: Schedule) -> None:
    total = sum(_lines(plan.program, n) for n in plan.program.ops if not n.shape)
    for loop in chain.from_iterable(plan.phases):
        if total <= MAX_LINES:
            total += sum(_lines(plan.program, plan.node(v)) for v in loop_values(plan, loop))
    if total > MAX_LINES:
        raise ProgramError(
            f"the fused kernel would hold more than {MAX_LINES} lines: "
            "use fewer transcendental ops, or fewer dependent reductions over long chains"
        )


def _lines(program: Program, node: Node) -> int:
    """Lines of WGSL that a compiler sees for one op once its helpers are inlined."""
    row = OPS[node.name]
    if row.kind not in ("elementwise", "generator"):
        return 1
    return _template_lines(variant(node.name, tuple(program.ops[a].dtype for a in node.args), node.dtype, row.wgsl))


@cache
def _template_lines(template: str) -> int:
    return 1 + helpers_for(template).count("\n")


def loop_values(plan: Schedule, loop: Loop) -> list[int]:
    """Resolved ids of the vector values that `loop` computes, in program order."""
    todo = [plan.node(s.id).args[0] if s.kind == "reduce" else s.id for s in loop.sinks]
    found: set[int] = set()
    while todo:
        value = plan.resolve(todo.pop())
        node = plan.node(value)
        if value in found or not node.shape:
            continue
        found.add(value)
        if OPS[node.name].kind == "elementwise":
            todo.extend(node.args)
    return sorted(found)


def scalar_order(plan: Schedule, value: int, element: int, done: Container[tuple[int, int]]) -> list[tuple[int, int]]:
    """What must be computed, in order, to know element `element` of `value` outside of loops: (resolved value, element) pairs, without
    those in `done`. A reduction must be in `done`: its phase is over."""
    todo = [scalar_key(plan, value, element)]
    found: set[tuple[int, int]] = set()
    while todo:
        key = todo.pop()
        if key in found or key in done:
            continue
        found.add(key)
        node = plan.node(key[0])
        if node.name.startswith("rng_"):
            todo += [scalar_key(plan, node.args[0], 0), scalar_key(plan, node.args[0], 1)]
        elif OPS[node.name].kind == "elementwise":
            todo += [scalar_key(plan, a, key[1]) for a in node.args]
        elif OPS[node.name].kind == "reduce":
            raise AssertionError(f"reduction {key[0]} is used before its phase ends")
    return sorted(found)


def scalar_key(plan: Schedule, value: int, element: int) -> tuple[int, int]:
    """(resolved value, element), element 0 for scalars."""
    value = plan.resolve(value)
    return value, element if plan.node(value).shape else 0
