"""Loops of an epilogue in WGSL: elements strided over threads (and groups), rows one a thread or one a workgroup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie_core.codegen.access import access
from pie_core.codegen.schedule import Loop, Sink, loop_values
from pie_core.codegen.wgsl_folds import Accumulator, Joiner
from pie_core.codegen.wgsl_values import Values
from pie_core.codegen.wgsl_writer import note_of, plus, value_name, word_of

BARRIERS = 64  # what the barriers of a joined row cost, in iterations: short rows are cheaper one a thread


@dataclass(frozen=True)
class Grid:
    """`workgroup` threads in each of `groups` workgroups of a lane. `split`: the groups run side by side; else one workgroup walks the
    parts of all of them, so that sums are the same."""

    workgroup: int
    groups: int = 1
    split: bool = False

    def part(self, n: int) -> int:
        """Elements of a row of `n` that one group takes."""
        share = -(-n // self.groups)
        return -(-share // self.workgroup) * self.workgroup

    def parts(self, n: int) -> int:
        """Groups that have elements of a row of `n`."""
        return -(-n // self.part(n))


def row_by_thread(rows: int, n: int, grid: Grid) -> bool:
    """Whether rows are folded one a thread (else one a workgroup); the same for all launch shapes."""
    together = rows * (-(-n // grid.workgroup) + Joiner(grid.workgroup).iterations + BARRIERS)
    return -(-rows // grid.workgroup) * (n + 1) <= together


def write_loop(body: Values, loop: Loop, grid: Grid, joiner: Joiner) -> list[Accumulator]:
    """One loop; the accumulators whose threads are still to be joined."""
    values = loop_values(body.plan, loop)
    for value in values:
        body.prepare(value)
    for sink in loop.sinks:
        source = body.plan.resolve(_source(body, sink))
        if not body.plan.node(source).shape:
            body.scalar(source)
    if any(s.kind == "reduce" and s.targets for s in loop.sinks):
        _rows(body, loop, values, grid, joiner)
        return []
    folds = [Accumulator(body, body.plan, s) for s in loop.sinks if s.kind != "store"]
    for fold in folds:
        fold.start(body)
    part, parts = grid.part(loop.n), grid.parts(loop.n)
    if grid.split:
        end = f"min({loop.n}u, group.x * {part}u + {part}u)"
        with body.loop(f"var i = group.x * {part}u + lid; i < {end}; i += {grid.workgroup}u", part // grid.workgroup):
            _elements(body, loop, values, folds, {})
    elif parts > 1 and any(fold.ordered for fold in folds):
        sums = {fold.acc: body.name(f"part_{fold.id}") for fold in folds if fold.ordered}
        with body.loop(f"var c = 0u; c < {loop.n}u; c += {part}u", parts):
            for name in sums.values():
                body.line(f"var {name} = 0.0;")
            with body.loop(f"var i = c + lid; i < min({loop.n}u, c + {part}u); i += {grid.workgroup}u", part // grid.workgroup):
                _elements(body, loop, values, folds, sums)
            for total, name in sums.items():
                body.line(f"{total} = {total} + {name};")
    else:
        with body.loop(f"var i = lid; i < {loop.n}u; i += {grid.workgroup}u", -(-loop.n // grid.workgroup)):
            _elements(body, loop, values, folds, {})
    return folds


def _source(body: Values, sink: Sink) -> int:
    return body.plan.node(sink.id).args[0] if sink.kind == "reduce" else sink.id


def _elements(body: Values, loop: Loop, values: Sequence[int], folds: Sequence[Accumulator], sums: dict[str, str]) -> None:
    """The work of element `i`: values, then sinks."""
    plan = body.plan
    local: dict[int, str] = {}

    def named(value: int) -> str:
        value = plan.resolve(value)
        return local[value] if value in local else body.scalar(value)

    for value in values:
        node = plan.node(value)

        def operand(position: int, value: int = value, args: tuple[int, ...] = node.args) -> str:
            same = access(plan.program, value, position) == "same"
            return named(args[position]) if same else body.scalar(args[position])

        local[value] = body.let(body.element(value, "i", operand), value_name(value, node), note_of(value, node))
    index = "i" if not any(f.sink.targets for f in folds) else "k"
    for fold in folds:
        fold.step(body, named(fold.source), index, sums.get(fold.acc, ""))
    for sink in loop.sinks:
        if sink.kind == "store":
            store(body, sink, named(sink.id), "i")


def store(body: Values, sink: Sink, value: str, index: str) -> None:
    """Write a value at `index` of each of a sink's targets."""
    node = body.plan.program.ops[sink.id]
    word = word_of(value, node.dtype)
    for target in sink.targets:
        body.uses.add(target.region)
        if target.region == "scratch":
            body.line(f"scratch[{plus(plus('mine', f'{target.word}u'), index)}] = {word};")
            continue
        at = body.lane(target.word)
        body.line(f"if ({at} != NONE) {{ {target.region}[{plus(at, index)}] = {word}; }}")


def _rows(body: Values, loop: Loop, values: Sequence[int], grid: Grid, joiner: Joiner) -> None:
    """Folds of each row of a matrix, stored at the row's place."""
    n, rows = loop.n, loop.rows
    folds = [Accumulator(body, body.plan, s) for s in loop.sinks]
    first, step = ("group.x", grid.groups) if grid.split else ("0u", 1)
    if row_by_thread(rows, n, grid):
        start = f"{first} * {grid.workgroup}u + lid" if grid.split else "lid"
        with body.loop(f"var r = {start}; r < {rows}u; r += {grid.workgroup * step}u", -(-rows // (grid.workgroup * step))):
            for fold in folds:
                fold.start(body)
            with body.loop(f"var k = 0u; k < {n}u; k += 1u", n):
                body.line(f"let i = r * {n}u + k;")
                _elements(body, loop, values, folds, {})
            for fold in folds:
                store(body, fold.sink, fold.final, "r")
        return
    with body.loop(f"var r = {first}; r < {rows}u; r += {step}u", -(-rows // step)):
        for fold in folds:
            fold.start(body)
        with body.loop(f"var k = lid; k < {n}u; k += {grid.workgroup}u", -(-n // grid.workgroup)):
            body.line(f"let i = r * {n}u + k;")
            _elements(body, loop, values, folds, {})
        joiner.join(body, folds)
        with body.block("if (lid == 0u)"):
            for fold in folds:
                store(body, fold.sink, fold.final, "r")
        joiner.again(body)
