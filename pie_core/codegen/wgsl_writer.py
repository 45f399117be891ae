"""Lines, names, nested loops with their iteration bounds, and how words become values: what all WGSL emitters write with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pie_core.codegen.layout import NONE
from pie_core.codegen.wgsl_lib import helpers_for, iterations_of
from pie_core.eta.dtypes import is_finite_bits
from pie_core.eta.errors import ProgramError
from pie_core.eta.program import Node
from pie_core.eta.rules import show

BINDINGS = (("logits", "r"), ("hidden", "r"), ("arena", "rw"), ("lanes", "r"), ("results", "rw"), ("scratch", "rw"))
FLOATS = ("logits", "hidden")  # regions bound as f32, all others as u32
MAX_ITERATIONS = 60_000  # loop iterations of one invocation in one launch, all loops together; lavapipe cuts at 65,535


class TooLong(ProgramError):
    """One launch would run more iterations an invocation than MAX_ITERATIONS: more threads, or several launches, have fewer each."""


@dataclass(frozen=True)
class WgslKernel:
    """WGSL text with entry point `main`. `bindings`: (name, "r" | "rw") in binding order, all in group 0. `grid`: workgroups along x, y, z;
    a 0 stands for the number of lanes. `iterations`: proven bound of one invocation. `scratch_words`: u32 words that each lane needs in
    the `scratch` binding, lane after lane; 0 when there is none. `barriers`: in its code, calls inlined."""

    source: str
    workgroup: int
    bindings: tuple[tuple[str, str], ...]
    iterations: int
    grid: tuple[int, int, int]
    scratch_words: int = 0
    barriers: int = 0


def word_of(expr: str, dtype: str) -> str:
    """WGSL: a value as its u32 word."""
    return {"f32": f"bitcast<u32>({expr})", "i32": f"bitcast<u32>({expr})", "u32": expr, "bool": f"select(0u, 1u, {expr})"}[dtype]


def value_of(word: str, dtype: str) -> str:
    """WGSL: a u32 word as a value."""
    return {"f32": f"bitcast<f32>({word})", "i32": f"bitcast<i32>({word})", "u32": word, "bool": f"{word} != 0u"}[dtype]


def region_value(region: str, at: str, dtype: str) -> str:
    """WGSL: the value at index `at` of a bound region."""
    return f"{region}[{at}]" if region in FLOATS else value_of(f"{region}[{at}]", dtype)


def region_word(region: str, at: str) -> str:
    """WGSL: the u32 word at index `at` of a bound region."""
    return f"bitcast<u32>({region}[{at}])" if region in FLOATS else f"{region}[{at}]"


def constant(bits: int, dtype: str) -> str:
    """WGSL of a `const` op; an infinity or NaN is made at run time, WGSL refuses it in constant expressions."""
    word = f"{bits:#010x}u"
    if dtype == "f32" and not is_finite_bits(bits):
        word = f"({word} | runtime_zero)"
    return value_of(word, dtype)


def note_of(index: int, node: Node) -> str:
    """Comment that names the source op of a line."""
    args = ", ".join([f"%{a}" for a in node.args] + [f"{k}={v}" for k, v in sorted(node.attrs.items())])
    return f"%{index} {node.name}({args}) {show(node.type)}"


def value_name(index: int, node: Node, element: int | None = None) -> str:
    """What the value of an op is called: its op and number, `div_6`; an element of a vector outside of loops `take_0_at_1`."""
    return f"{node.name}_{index}" + (f"_at_{element}" if element is not None else "")


def plus(base: str, index: str) -> str:
    """`base + index`."""
    return base if index == "0u" else f"{base} + {index}"


class Writer:
    """Lines at an indent, names that are not taken, and the sum of the iterations of all loops written so far. Raises TooLong as soon as
    they are too many."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.iterations = 0
        self.indent = "  "
        self._names: list[set[str]] = [set()]  # taken, by block
        self._times = 1  # iterations of the loops around this line

    def spend(self, iterations: int, what: str = "") -> None:
        """Account for iterations of one invocation, of an op `what` where it is one."""
        self.iterations += iterations
        if self.iterations > MAX_ITERATIONS:
            raise TooLong(
                f"one launch would run {self.iterations} or more loop iterations an invocation, the bound is {MAX_ITERATIONS}"
                f"{f', at {what}' if what else ''}: use shorter rows or fewer indices, or split it over several passes"
            )

    def line(self, text: str) -> None:
        """Append one line at the present indent."""
        self.lines.append(self.indent + text)

    def name(self, wish: str, *, outer: bool = False) -> str:
        """`wish`, with a number where this block or one around it has that name; `outer`: for the whole function. Wishes are made of the
        table's names and counters, nothing of a program's text."""
        name, number = wish, 1
        while any(name in taken for taken in self._names):
            number += 1
            name = f"{wish}x{number}"
        self._names[0 if outer else -1].add(name)
        return name

    def let(self, expr: str, wish: str, note: str = "") -> str:
        """Append a let; its name."""
        name = self.name(wish)
        inside = self._times * iterations_of(expr)
        if inside:
            self.spend(inside)
            note = f"{note}; at most {inside} iterations"
        self.line(f"let {name} = {expr};" + (f"  // {note}" if note else ""))
        return name

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head { … }`."""
        self.line(f"{head} {{")
        with self._inside():
            yield
        self.line("}")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.indent += "  "
        self._names.append(set())
        yield
        self._names.pop()
        self.indent = self.indent[:-2]

    @contextmanager
    def loop(self, head: str, count: int) -> Iterator[None]:
        """`for (head) { … }` that runs at most `count` times; the comment states its iterations in all, with the loops around it."""
        outer, self._times = self._times, self._times * count
        self.spend(self._times)
        self.line(f"for ({head}) {{  // at most {self._times} iterations")
        with self._inside():
            yield
        self.line("}")
        self._times = outer


def declarations(bindings: Sequence[tuple[str, str]]) -> list[str]:
    """The binding declarations, in order."""
    return [
        f"@group(0) @binding({i}) var<storage, {'read' if access == 'r' else 'read_write'}> {name}: "
        f"array<{'f32' if name in FLOATS else 'u32'}>;"
        for i, (name, access) in enumerate(bindings)
    ]


def module(head: str, bindings: Sequence[tuple[str, str]], shared: Sequence[str], functions: Sequence[str], main: Sequence[str]) -> str:
    """A WGSL module: a comment, bindings, module variables, the helpers that are called, functions, the entry point."""
    code = "\n".join([*functions, *main])
    private = [f"const NONE = {NONE:#x}u;  // a lane word that stands for nothing"] if "NONE" in code else []
    private += ["var<private> runtime_zero: u32;"] if "runtime_zero" in code else []
    text = [head, *declarations(bindings), *shared, *private, helpers_for(code), *functions, *main]
    return "\n".join(filter(None, text)) + "\n"
