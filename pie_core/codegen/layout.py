"""The lane table: which u32 words a pass hands to its epilogue kernel, and where each one stands (docs/architecture.md, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from pie_core.eta.program import Program
from pie_core.eta.rules import elements

NONE = 0xFFFFFFFF  # an offset that is not used
ROW = 0  # word: first read-out row of the pass
STATUS = 1  # word: results word offset of the pass's status word
FIXED = 2
CHAN_WORDS = 3


class LaneLayout:
    """Positions of the words of one lane.

    `words` u32 in all: [row, status] + per channel [cell taken or read, cell put, copy for the host] + outputs + params.
    `out_sizes` and `cell_sizes` are in words (one word an element, bool as 0 or 1); `results_words` is what one pass needs in the
    results region when every output and the status word is wanted, without channel copies.
    """

    __slots__ = ("cell_sizes", "channels", "out_sizes", "outs", "params", "results_words", "words")

    def __init__(self, program: Program) -> None:
        self.channels = len(program.chans)
        self.outs = len(program.outs)
        self.params = len(program.params)
        self.words = FIXED + CHAN_WORDS * self.channels + self.outs + self.params
        self.out_sizes = tuple(elements(shape) for _, shape in program.out_types)
        self.cell_sizes = tuple(elements(c.shape) for c in program.chans)
        self.results_words = 1 + sum(self.out_sizes)

    def take(self, chan: int) -> int:
        """Word that holds the arena offset of the cell taken or read."""
        return FIXED + CHAN_WORDS * chan

    def put(self, chan: int) -> int:
        """Word that holds the arena offset of the cell put."""
        return FIXED + CHAN_WORDS * chan + 1

    def copy(self, chan: int) -> int:
        """Word that holds the results offset of the host's copy of the value put."""
        return FIXED + CHAN_WORDS * chan + 2

    def out(self, index: int) -> int:
        """Word that holds the results offset of output `index`."""
        return FIXED + CHAN_WORDS * self.channels + index

    def param(self, slot: int) -> int:
        """Word that holds the 32 bits of parameter `slot`."""
        return FIXED + CHAN_WORDS * self.channels + self.outs + slot

    def name(self, word: int) -> str:
        """What a word is called in generated code: row, status, take_0, put_0, copy_0, out_0 or param_0, by channel, output or slot."""
        if word < FIXED:
            return ("row", "status")[word]
        chan, which = divmod(word - FIXED, CHAN_WORDS)
        if chan < self.channels:
            return f"{('take', 'put', 'copy')[which]}_{chan}"
        index = word - FIXED - CHAN_WORDS * self.channels
        return f"out_{index}" if index < self.outs else f"param_{index - self.outs}"

    def pack(
        self, row: int, status_word: int, channels: Sequence[tuple[int, int, int]], outs: Sequence[int], params: Sequence[int]
    ) -> list[int]:
        """The `words` u32 of one lane. `channels`: (cell taken or read, cell put, copy) offsets, NONE where unused; `outs`: results
        offsets, NONE to drop one. Raises ValueError when a count differs from the program's."""
        if len(channels) != self.channels or len(outs) != self.outs or len(params) != self.params:
            raise ValueError(
                f"a lane of this program has {self.channels} channels, {self.outs} outputs and {self.params} params; "
                f"got {len(channels)}, {len(outs)} and {len(params)}"
            )
        return [row, status_word, *chain.from_iterable(channels), *outs, *params]


@lru_cache(maxsize=256)
def lane_layout(program: Program) -> LaneLayout:
    """The layout of `program`; cached."""
    return LaneLayout(program)
