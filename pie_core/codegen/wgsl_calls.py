"""Skeletons of a schedule to WGSL functions and their calls; equal functions of one kernel are written once."""

from __future__ import annotations

from typing import NamedTuple

from pie_core.codegen.schedule import SMALL_SORT, Place, Skeleton
from pie_core.codegen.wgsl_bounds import check_total
from pie_core.codegen.wgsl_routines import COMMON_BARRIERS, Routine, Rows
from pie_core.codegen.wgsl_select import pivot_mass, pivot_rank, top_k
from pie_core.codegen.wgsl_skeletons import matmul, ranks, running, scatter, scatter_distinct, scatter_set, sort
from pie_core.codegen.wgsl_values import Values
from pie_core.codegen.wgsl_writer import note_of, plus
from pie_core.eta.ops import OPS
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

PASSES = 2  # iterations of rank counting that are worth one of passes, which have barriers and more code


class Part(NamedTuple):
    """Rows of a skeleton that works row by row, for a launch of their own."""

    first: int
    rows: int


def cut_rows(skeleton: Skeleton, program: Program) -> int:
    """How many rows a skeleton has that may run apart; 1 where they may not."""
    node = program.ops[skeleton.id]
    return 1 if node.name.startswith("scatter") else elements(program.ops[node.args[0]].shape[:-1])


def barriers(text: str) -> int:
    """Barriers of a routine once the functions that it calls are inlined."""
    return text.count("Barrier();") + sum(text.count(f"{name}(") * count for name, count in COMMON_BARRIERS.items())


class Routines:
    """The functions of one kernel. `lines` and `barriers`: of code, each call counted, since compilers inline them."""

    def __init__(self, workgroup: int) -> None:
        self.workgroup = workgroup
        self.functions: list[str] = []
        self.lines = 0
        self.barriers = 0
        self._names: dict[str, str] = {}

    def call(self, body: Values, skeleton: Skeleton, part: Part | None = None) -> None:
        """Write the call of a skeleton, or of some of its rows; a barrier has to stand before and after it. Raises TooLong."""
        node = body.plan.node(skeleton.id)
        routine, operands = self._routine(body, skeleton, node, part)
        shapes = [list(body.plan.program.ops[a].shape) for a in node.args if body.plan.program.ops[a].shape]
        body.spend(routine.iterations, f"{node.name} of {', '.join(map(str, shapes))}")
        name = self._names.get(routine.text)
        if name is None:
            name = self._names[routine.text] = f"run_{node.name}_{len(self._names)}"
            self.functions.append(routine.text.replace("NAME", name))
        self.lines += routine.text.count("\n")
        self.barriers += barriers(routine.text)
        check_total(body.iterations, self.barriers)  # now: what is refused should not be written first
        body.uses.add("scratch")
        rows = f", rows {part.first} to {part.first + part.rows - 1}" if part is not None else ""
        body.line(f"// {note_of(skeleton.id, node)}{rows}")
        body.line(f"{name}(lid, {', '.join(operands)});  // at most {routine.iterations} iterations")

    def made(self, body: Values, skeleton: Skeleton, part: Part | None = None) -> Routine:
        """The function of a skeleton, or of some of its rows."""
        return self._routine(body, skeleton, body.plan.node(skeleton.id), part)[0]

    def _routine(self, body: Values, skeleton: Skeleton, node: Node, part: Part | None) -> tuple[Routine, list[str]]:
        """The function, and its arguments after lid."""
        program, wg = body.plan.program, self.workgroup
        given = [program.ops[a] for a in node.args]
        places = list(zip(node.args, skeleton.operands, strict=True))
        sources = [body.base(place, body.plan.node(body.plan.resolve(arg))) for arg, place in places if place]
        words = list(skeleton.result)
        work = plus("mine", f"{skeleton.work}u")
        rows = [_rows(operand, place) for operand, place in zip(given, skeleton.operands, strict=True)]
        if part is not None:  # operands that are not cut are scalars, or the right side of a matmul
            cut = 1 if node.name == "matmul" else len(sources)
            sources[:cut] = [plus(source, f"{part.first * rows[0].n}u") for source in sources[:cut]]
            rows[:cut] = [row._replace(rows=part.rows) for row in rows[:cut]]
            words = [word + part.first * (2 if OPS[node.name].kind == "pivot" else node.shape[-1]) for word in words]
        results = [plus("mine", f"{word}u") for word in words]
        if node.name == "pivot_rank":
            return pivot_rank(rows[0], wg), [sources[0], results[0], body.scalar(node.args[1])]
        if node.name == "pivot_mass":
            return pivot_mass(rows[0], rows[1].region, wg), [*sources, results[0], body.scalar(node.args[2])]
        if node.name in ("sort_desc", "top_k"):
            k = node.shape[-1]
            selects = node.name == "top_k" and k <= SMALL_SORT
            made = (top_k if selects else sort)(rows[0], k, wg)
            if rows[0].n <= SMALL_SORT:
                counted = ranks(rows[0], k, wg)
                if counted.iterations <= PASSES * made.iterations:
                    return counted, [sources[0], *results]
            return made, [sources[0], *results, work]
        if node.name in ("cumsum", "cumprod"):
            return running(node.name == "cumprod", rows[0], wg), [sources[0], results[0]]
        if node.name == "matmul":
            return matmul(rows[0], rows[1], wg), [*sources, results[0]]
        if node.name in ("scatter_add", "scatter_set"):
            n = given[0].shape[0]
            base = rows[0]._replace(rows=n, n=elements(given[0].shape) // n)
            if _distinct(body, node.args[1]):
                return scatter_distinct(node.name == "scatter_add", base, rows[1], rows[2].region, wg), [*sources, results[0]]
            if node.name == "scatter_set" and skeleton.work_words:
                return scatter_set(base, rows[1], rows[2].region, wg), [*sources, results[0], work]
            return scatter(node.name == "scatter_add", base, rows[1], rows[2].region, wg), [*sources, results[0]]
        raise AssertionError(f"no WGSL for the skeleton {node.name}")


def _distinct(body: Values, index: int) -> bool:
    """Whether the elements of `index` are known to differ: the order of one sorted row is."""
    node = body.plan.node(body.plan.resolve(index))
    return OPS[node.name].kind == "pick" and len(node.shape) == 1


def _rows(node: Node, place: Place | None) -> Rows:
    n = node.shape[-1] if node.shape else 1
    return Rows(place.region if place else "", node.dtype, elements(node.shape) // n, n)
