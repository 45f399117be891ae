"""Writes docs/eta-ops.md, the reference of tensor programs, from the op table and the library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pie_core.eta import STAGES, intrinsics, program, rules
from pie_core.eta.functions import OTHER_FUNCTIONS
from pie_core.eta.library import SECTIONS
from pie_core.eta.ops import OPS, Op

PATH = Path(__file__).resolve().parents[2] / "docs" / "eta-ops.md"
COMMAND = "python -m pie_server.build.eta_reference"

KINDS = {
    "source": "Values from outside. `param` is a lifted Python number, `const` one that stays in the text.",
    "elementwise": "Each element from the same element of the operands: equal shapes, or scalars beside them.",
    "generator": "Each element from its flat index.",
    "view": "The same elements at other places.",
    "lookup": "Elements of the first operand found through the second.",
    "pivot": "A bool keep-mask of each row; `pivot_threshold` makes them.",
    "reduce": "Along the last axis of rank 1 to 4.",
    "skeleton": "From memory to memory; along the last axis, or by rows.",
    "pick": "Further results of an op.",
    "effect": "Channels, in program order, never removed: `channel.take()`, `.read()`, `.put(value)`.",
}
OPERATORS = {
    "add": "`a + b`", "sub": "`a - b`", "mul": "`a * b`", "div": "`a / b` (f32), `a // b` (integers)", "rem": "`a % b`", "neg": "`-a`",
    "abs": "`abs(a)`", "gt": "`a > b`", "ge": "`a >= b`", "eq": "`a == b`", "ne": "`a != b`", "lt": "`a < b`", "le": "`a <= b`",
    "and": "`a & b`", "or": "`a \\| b`", "not": "`~a`", "matmul": "`a @ b`",
    "gather": "`a[i]`, `a[i:j]`, `a[indices]`", "cast": "`a.cast(dtype)`",
    "output": "`intrinsics.output(i, name)`", "outputs": "`intrinsics.outputs(name)`", "intrinsic": "`intrinsics.tokens()` and so on",
    "take": "`channel.take()`", "read": "`channel.read()`", "put": "`channel.put(value)`", "pivot_rank": "`pivot_threshold(x, rank=k)`",
    "pivot_mass": "`pivot_threshold(x, mass=p)`", "select": "`select(cond, a, b)`",
}  # fmt: skip


def reference() -> str:
    """The text of the page."""
    lines = [
        "# Tensor programs: every op and function",
        "",
        f"Generated from the tables of `pie_core.eta` by `{COMMAND}`; a test holds it up to date. "
        "Names are importable from `inferlet.eta`.",
        "",
        f"A value is a tensor of dtype f32, i32, u32 or bool, of rank 0 to {rules.MAX_RANK}, every extent 1 or more and known when the "
        f"program is traced, at most {rules.MAX_ELEMENTS:,} elements. A program has at most {program.MAX_OPS:,} ops, "
        f"{program.MAX_PARAMS} constants, {program.MAX_CHANS} channels and {program.MAX_OUTS} outputs; at most {program.MAX_DEPTH} ops on "
        "memory (reductions, pivots, lookups, skeletons, views that move elements) depend on each other. "
        "A Python number beside a tensor takes the tensor's dtype.",
        "",
        "Numeric rules: the largest element is the lowest index on ties and never a NaN; sorting is descending, ties by lower index, NaN "
        "last; indices out of range (negative too) give 0 or are skipped; integers wrap; integer division truncates and gives 0 for "
        "divisor 0. Devices agree bit for bit on integers, bools, random bits and the argmax of equal inputs, on f32 within 1e-5 relative "
        "(sums: of the sum of the magnitudes; cumprod: or half a unit in the last place a factor); "
        "an f32 result nearer to 0 than 2^-126 may be 0. On one device a row has the same bits alone and in a batch.",
        "",
        "## Ops",
        "",
    ]
    for kind, doc in KINDS.items():
        lines += [f"### {kind.capitalize()}", "", doc, "", "| op | author writes | first operand | meaning |", "|---|---|---|---|"]
        lines += [_row(op) for op in OPS.values() if op.kind == kind]
        lines.append("")
    lines += ["## Functions with arguments of their own", "", *_functions(OTHER_FUNCTIONS.values()), ""]
    lines += ["## Library", "", "Fixed expansions into the ops above.", ""]
    for title, functions in SECTIONS.items():
        lines += [f"### {title}", "", *_notes(functions), *_functions(functions), ""]
    lines += ["## Stages", "", "A program belongs to one stage of a forward pass.", "", *_stages(), ""]
    lines += [
        *_functions((f for f in vars(intrinsics).values() if inspect.isfunction(f) and f.__module__ == intrinsics.__name__), "intrinsics.")
    ]
    return "\n".join(lines) + "\n"


def _row(op: Op) -> str:
    forms = [OPERATORS[op.name]] if op.name in OPERATORS else []
    if op.py and op.name != "select":
        forms.append(f"`{op.py}({', '.join('abc'[: op.arity])})`")
    elif op.name in OTHER_FUNCTIONS:
        forms.append(f"`{op.name}`, below")
    attrs = f" ({', '.join(op.attrs)})" if op.attrs else ""
    return f"| `{op.name}`{attrs} | {', '.join(forms)} | {' '.join(op.dtypes)} | {_cell(op.doc)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _functions(functions: Iterable[Callable[..., Any]], prefix: str = "") -> list[str]:
    return [f"- `{prefix}{fn.__name__}{_signature(fn)}`: {' '.join((fn.__doc__ or '').split())}" for fn in functions]


def _signature(fn: Callable[..., Any]) -> str:
    signature = inspect.signature(fn)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _notes(functions: tuple[Callable[..., Any], ...]) -> list[str]:
    """What the module of these functions says of all of them, behind its first line."""
    doc = inspect.getdoc(inspect.getmodule(functions[0])) or ""
    rest = doc.partition("\n\n")[2]
    return [" ".join(rest.split()), ""] if rest else []


def _stages() -> list[str]:
    lines = ["| stage | when | given | outputs | runs |", "|---|---|---|---|---|"]
    for name, stage in STAGES.items():
        given = [f"`{n}` {i.dtype}[{', '.join(('T', 'width')[: i.rank])}]" for n, i in stage.intrinsics.items()]
        given = given or [f"`{source}`" for source in sorted(stage.sources - {"param", "const"})]
        lines.append(f"| `{name}` | {stage.doc} | {', '.join(given)} | {stage.outs or 'none'} | {'yes' if stage.runs else 'not yet'} |")
    return lines


def main() -> int:
    """Write the page; 1 when `--check` finds it out of date."""
    text = reference()
    if "--check" in sys.argv[1:]:
        return int(not PATH.exists() or PATH.read_text(encoding="utf-8") != text)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
