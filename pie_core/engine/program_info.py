"""What the engine must know of a Program: its effects on channels, the sizes of its outputs, its lane layout."""

from __future__ import annotations

from dataclasses import dataclass

from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.device.kept import Kept
from pie_core.engine.errors import EngineError, InvalidPass
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.values import elements
from pie_core.eta.flow import ChanEffect
from pie_core.eta.program import Chan, Program

_KEPT = 256  # infos: as many as a runner keeps plans
_REFUSED = 4096  # programs of which it is known why they are refused


@dataclass(slots=True, eq=False)
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
    result_words: int  # of the results region, for one lane, without the copies of what it puts into channels that the host reads
    masks_read: frozenset[int]  # channels that a read, not a take, makes a mask of
    work: int = 0  # of one lane, as `Runner.prepare` gives it
    first_work: int = 0  # of its first run besides; 0 once that is under way
    size: int = 1  # of its kernel, see `device.protocol.Kernel`


def _masks_read(program: Program) -> frozenset[int]:
    """Channels whose front cell the program reads and applies as a mask."""
    ops = program.ops
    masks = {node.args[1] for node in ops if node.name == "mask_apply"}
    return frozenset(int(ops[at].attrs["chan"]) for at in masks if ops[at].name == "read")


class ProgramInfos:
    """Infos of the programs seen lately, and why others are refused, by the hash of their text."""

    __slots__ = ("_infos", "_limits", "_refused")

    def __init__(self, limits: RunnerLimits) -> None:
        self._limits = limits
        self._infos: Kept[ProgramInfo] = Kept(_KEPT)
        self._refused: Kept[EngineError] = Kept(_REFUSED)

    def known(self, program: Program) -> bool:
        """Whether `find` answers at once, by an info or by the refusal."""
        return program.hash in self._infos or program.hash in self._refused

    def find(self, program: Program) -> ProgramInfo | None:
        """The kept info of an equal program. Raises why it is refused, if that is known: it costs its time once."""
        info = self._infos.find(program.hash)
        if info is None:
            refused = self._refused.find(program.hash)
            if refused is not None:
                raise refused.again()
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
        result_words = 1 + sum(n for _, _, n in outs)  # its status word in front
        if result_words > limits.results_words:
            raise InvalidPass(
                f"program: what it returns takes {result_words} words of results, one step has {limits.results_words}: "
                "return less (a reduction, fewer rows)"
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
            result_words=result_words,
            masks_read=_masks_read(program),
        )

    def keep(self, info: ProgramInfo) -> None:
        """Remember an info whose kernel was prepared; what was used longest ago goes when there is too much."""
        self._infos.keep(info.program.hash, info, max(info.size, len(info.program.ops)))

    def refuse(self, program: Program, error: EngineError) -> None:
        """Remember why a program is refused, which nothing but the program decides."""
        self._refused.keep(program.hash, error.kept(), 1)
