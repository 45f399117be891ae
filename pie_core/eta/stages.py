"""The stages of a pass: what a program of each may use, in one table that tracer and verifier read. Only `epilogue` and `map` execute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pie_core.eta.rules import Type, show

PURE = frozenset(("elementwise", "generator", "view", "lookup", "pivot", "reduce", "skeleton", "pick"))
MAX_OUTS = 64


class Intrinsic(NamedTuple):
    """A value that a stage is given: its dtype and rank. The first extent of all with a rank is T, the token rows."""

    dtype: str
    rank: int


class Stage(NamedTuple):
    """`sources`: source ops by name; `kinds`: the other ops; `intrinsics`: values of the op `intrinsic`; `outs`: most outputs."""

    doc: str
    runs: bool
    sources: frozenset[str]
    kinds: frozenset[str]
    intrinsics: Mapping[str, Intrinsic]
    outs: int

    def allows(self, name: str, kind: str) -> bool:
        """Whether an op may occur in the stage."""
        return name in self.sources if kind == "source" else kind in self.kinds


_ROW, _ID, _LAYER = Intrinsic("f32", 2), Intrinsic("u32", 1), Intrinsic("u32", 0)
_OPS = PURE | {"effect"}
_GIVEN = frozenset(("intrinsic", "param", "const"))

STAGES: dict[str, Stage] = {
    "epilogue": Stage("once, behind the forward pass", True, frozenset(("output", "outputs", "param", "const")), _OPS, {}, MAX_OUTS),
    "map": Stage("an elementwise tail of a model", True, frozenset(("input", "const")), frozenset(("elementwise", "view")), {}, 1),
    "prologue": Stage("once, before the forward pass", False, _GIVEN, _OPS, {"tokens": _ID, "positions": _ID}, MAX_OUTS),
    # A layer's stage returns nothing, there would be one value a layer: it hands on through channels.
    "on_attn_proj": Stage(
        "in each layer, behind the projections", False, _GIVEN, _OPS,
        {"query": _ROW, "key": _ROW, "value": _ROW, "positions": _ID, "layer": _LAYER}, 0,
    ),
    "on_attn": Stage(
        "in each layer, behind attention", False, _GIVEN, _OPS,
        {"query": _ROW, "attention": _ROW, "positions": _ID, "layer": _LAYER}, 0,
    ),
}  # fmt: skip


def intrinsic_fault(stage: str, name: str, type_: Type) -> str:
    """What is wrong with an intrinsic of this type in a stage, as the end of a sentence; "" when nothing is."""
    known = STAGES[stage].intrinsics
    found = known.get(name)
    if found is None:
        return f"{name!r} is not there in the {stage} stage; it has {', '.join(known) or 'none'}"
    if type_[0] != found.dtype or len(type_[1]) != found.rank:
        form = f"{found.dtype}[{', '.join(('T', 'width')[: found.rank])}]"
        return f"{name!r} is {form} in the {stage} stage, not {show(type_)}"
    return ""
