"""`Program`: one immutable traced stage and its canonical text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pie_core.eta.errors import ProgramError
from pie_core.eta.flow import ChanEffect, channel_effects
from pie_core.eta.rules import MAX_ELEMENTS, Attrs, Shape, Type, show
from pie_core.eta.stages import MAX_OUTS, STAGES

VERSION = 1
MAX_TEXT = 1 << 18  # bytes of canonical text
MAX_OPS = 1024
MAX_CELL_WORDS = 1 << 20  # elements of one channel cell
MAX_CHANS = 32
MAX_CAPACITY = 1 << 12
MAX_PARAMS = 256
MAX_DEPTH = 64  # ops on memory (reductions, pivots, lookups, skeletons, moving views) that depend on each other


class Chan(NamedTuple):
    """A channel as a program sees it: cells of `dtype` and `shape`, a ring of `cap` cells."""

    cap: int
    dtype: str
    shape: Shape


class Node(NamedTuple):
    """One op; its value id is its index. `args` are earlier value ids."""

    name: str
    args: tuple[int, ...]
    attrs: Attrs
    dtype: str
    shape: Shape

    @property
    def type(self) -> Type:
        """(dtype, shape)."""
        return self.dtype, self.shape


RENDERERS: dict[str, Callable[[Program], str]] = {}  # by language; pie_core.codegen adds "wgsl", which eta may not import


class Program:
    """Immutable SSA of one stage. Equal when the canonical texts are equal.

    `Program(...)` trusts its arguments (the tracer checked each op); text from outside goes through `Program.parse`.
    """

    __slots__ = ("_effects", "_hash", "_text", "chans", "ops", "outs", "params", "stage")

    def __init__(
        self, stage: str, ops: Sequence[Node], outs: Sequence[int], chans: Sequence[Chan] = (), params: Sequence[str] = ()
    ) -> None:
        self.stage = stage
        self.ops = tuple(ops)
        self.outs = tuple(outs)
        self.chans = tuple(chans)
        self.params = tuple(params)
        self._text: str | None = None
        self._hash: str | None = None
        self._effects: tuple[ChanEffect, ...] | None = None

    @property
    def text(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        if self._text is None:
            chans = ",".join([f'{{"cap":{c.cap},"dtype":"{c.dtype}","shape":{_ints(c.shape)}}}' for c in self.chans])
            rows = [
                f'["{name}",{_ints(args)},{_attrs(attrs) if attrs else "{}"},"{dtype}",{_ints(shape)}]'
                for name, args, attrs, dtype, shape in self.ops
            ]
            ops = ",".join(rows)
            params = '","'.join(self.params)
            params = f'["{params}"]' if params else "[]"
            self._text = (
                f'{{"chans":[{chans}],"ops":[{ops}],"outs":{_ints(self.outs)},"params":{params},"stage":"{self.stage}","v":{VERSION}}}'
            )
        return self._text

    @property
    def hash(self) -> str:
        """sha256 of the canonical text, 64 hex digits: the program's identity."""
        if self._hash is None:
            self._hash = hashlib.sha256(self.text.encode()).hexdigest()
        return self._hash

    @property
    def effects(self) -> tuple[ChanEffect, ...]:
        """What a run does to each channel. Raises ProgramError for an order that a register cannot follow."""
        if self._effects is None:
            self._effects = channel_effects(self.ops, len(self.chans))
        return self._effects

    @property
    def out_types(self) -> tuple[Type, ...]:
        """(dtype, shape) of each returned output."""
        return tuple(self.ops[i].type for i in self.outs)

    @property
    def rows(self) -> int | None:
        """R of the rows that `outputs` reads: exactly the read-outs of a pass; None when the program does not use `outputs`."""
        return next((n.shape[0] for n in self.ops if n.name == "outputs"), None)

    @property
    def reads(self) -> int:
        """Number of read-out rows the program needs: that of `outputs`, else the greatest `output` index + 1, 0 if it reads none."""
        return self.rows or max((int(n.attrs["index"]) + 1 for n in self.ops if n.name == "output"), default=0)

    def width(self, name: str) -> int | None:
        """Row width of the read-out `name` ("logits" or "hidden"), None when the program does not read it."""
        return next((n.shape[-1] for n in self.ops if n.name in ("output", "outputs") and n.attrs["name"] == name), None)

    @classmethod
    def parse(cls, text: str) -> Program:
        """The verified Program of a JSON text. Raises ProgramError naming the op and the rule it breaks; the text may be hostile."""
        return _parse(text)

    def verify(self) -> Program:
        """Check this program as `parse` would; returns it. Raises ProgramError."""
        return _parse(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self is other or self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Program({self.stage}, {len(self.ops)} ops, {self.hash[:12]})"

    def listing(self) -> str:
        """One line an op, for people."""
        lines = []
        for i, n in enumerate(self.ops):
            args = ", ".join([f"%{a}" for a in n.args] + [f"{k}={v}" for k, v in sorted(n.attrs.items())])
            lines.append(f"%{i} = {n.name}({args}) : {show(n.type)}")
        return "\n".join(lines)

    def wgsl(self) -> str:
        """The kernel of this program as WGSL, for people: its ops as comments, then the code. Raises ProgramError where a bound does not
        hold, or where no code generator is loaded (inside an inferlet)."""
        render = RENDERERS.get("wgsl")
        if render is None:
            raise ProgramError("Program.wgsl() needs the code generator: import pie_core.codegen on the host")
        return render(self)


@lru_cache(maxsize=4096)
def _ints(values: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, values))}]"


def _attrs(attrs: Attrs) -> str:
    pairs = [f'"{k}":"{v}"' if isinstance(v, str) else f'"{k}":{v}' for k, v in sorted(attrs.items())]
    return f"{{{','.join(pairs)}}}"


def _parse(text: str) -> Program:
    from pie_core.eta.verify import parse  # it needs Program

    return parse(text)


__all__ = [
    "MAX_CAPACITY", "MAX_CELL_WORDS", "MAX_CHANS", "MAX_DEPTH", "MAX_ELEMENTS", "MAX_OPS", "MAX_OUTS", "MAX_PARAMS", "MAX_TEXT", "STAGES",
    "VERSION", "Chan", "Node", "Program",
]  # fmt: skip
