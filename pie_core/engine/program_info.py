"""What the engine must know of a Program: its effects on channels, the sizes of its outputs, its lane layout."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.engine.errors import InvalidPass
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.values import elements
from pie_core.eta.flow import ChanEffect
from pie_core.eta.program import Chan, Program

_CACHE_SIZE = 1024


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """`outs`: (dtype, shape, words) of each returned output; `rows`: read-outs that the program looks at, `exact`: those that a pass
    must have, None where it may have more."""

    program: Program
    layout: LaneLayout
    effects: tuple[ChanEffect, ...]
    channels: tuple[Chan, ...]
    outs: tuple[tuple[str, tuple[int, ...], int], ...]
    params: int
    rows: int
    exact: int | None
    most_words: int  # of the results region, for one lane
    masks_read: frozenset[int]  # channels that a read, not a take, makes a mask of


def _masks_read(program: Program) -> frozenset[int]:
    """Channels whose front cell the program reads and applies as a mask."""
    ops = program.ops
    masks = {node.args[1] for node in ops if node.name == "mask_apply"}
    return frozenset(int(ops[at].attrs["chan"]) for at in masks if ops[at].name == "read")


class ProgramInfos:
    """Infos of the programs seen lately, by the hash of their text."""

    __slots__ = ("_by_hash", "_limits")

    def __init__(self, limits: RunnerLimits) -> None:
        self._limits = limits
        self._by_hash: OrderedDict[str, ProgramInfo] = OrderedDict()

    def find(self, program: Program) -> ProgramInfo | None:
        """The kept info of an equal program."""
        info = self._by_hash.get(program.hash)
        if info is not None:
            self._by_hash.move_to_end(program.hash)
        return info

    def describe(self, program: Program) -> ProgramInfo:
        """A new info. Raises InvalidPass when the program does not fit this model."""
        limits = self._limits
        if program.stage != "epilogue":
            raise InvalidPass(f"program: stage {program.stage!r} cannot follow a pass; trace an epilogue")
        for name, width in (("logits", limits.vocab), ("hidden", limits.hidden)):
            got = program.width(name)
            if got not in (None, width):
                raise InvalidPass(f"program: output {name!r} has {got} elements, this model's has {width}")
        if program.reads > limits.max_reads:
            raise InvalidPass(f"program: it looks at {program.reads} read-outs; one step has at most {limits.max_reads}")
        outs = tuple((dtype, shape, elements(shape)) for dtype, shape in program.out_types)
        most = 1 + sum(n for _, _, n in outs) + sum(elements(c.shape) for c in program.chans)
        if most > limits.results_words:
            raise InvalidPass(
                f"program: its results take up to {most} words, one step has {limits.results_words}: return less (a reduction, fewer rows)"
            )
        layout = lane_layout(program)
        if layout.words > limits.lane_words:
            raise InvalidPass(f"program: its lane takes {layout.words} words, one step has {limits.lane_words}: use fewer channels")
        return ProgramInfo(
            program=program,
            layout=layout,
            effects=program.effects,
            channels=program.chans,
            outs=outs,
            params=len(program.params),
            rows=program.reads,
            exact=program.rows,
            most_words=most,
            masks_read=_masks_read(program),
        )

    def keep(self, info: ProgramInfo) -> None:
        """Remember an info whose kernel was prepared; the oldest goes when there are too many."""
        self._by_hash[info.program.hash] = info
        if len(self._by_hash) > _CACHE_SIZE:
            self._by_hash.popitem(last=False)
