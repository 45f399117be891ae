"""One launch of an epilogue for tests: inputs of several lanes packed into arena, lane table and results, and their answers read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pie_core.codegen.layout import NONE, lane_layout
from pie_core.codegen.oracle import from_words, run_epilogue, to_words
from pie_core.eta.program import Program

GUARD = 0xDEADBEEF
Array = Any


class Lane(NamedTuple):
    """Inputs of one pass: first read-out row, parameter words, cells by channel."""

    row: int = 0
    params: tuple[int, ...] = ()
    cells: Mapping[int, Array] = MappingProxyType({})


class MapLaunch(NamedTuple):
    """One launch of a map program. `inputs`: (stride, offset) of each array; `step`: step header u32; `out` f32 as it is before."""

    program: Program
    n: int
    inputs: tuple[tuple[int, int], ...]
    rows: str
    bucket: int
    step: Array
    arrays: tuple[Array, ...]
    out: Array


class Answer(NamedTuple):
    """What one pass left: outputs, values put by channel, status word."""

    outs: list[Array]
    puts: dict[int, Array]
    status: int


@dataclass
class Batch:
    """`logits` [R, V] and `hidden` [R, d] f32 (None when not read)."""

    program: Program
    lanes: list[Lane]
    logits: Array | None = None
    hidden: Array | None = None
    arena: Array = field(init=False)
    table: Array = field(init=False)
    results: Array = field(init=False)

    def __post_init__(self) -> None:
        layout, program = lane_layout(self.program), self.program
        guard = np.array([GUARD], np.uint32)
        arena, top = [guard.repeat(3)], 3
        size = 5
        words: list[int] = []
        self.places = []
        for lane in self.lanes:
            channels, outs = [], []
            status, size = size, size + 2  # one guard word behind everything
            for chan, effect in enumerate(program.effects):
                take = put = copy = NONE
                if effect.uses_cell:
                    take, top = top, top + layout.cell_sizes[chan] + 1
                    arena += [to_words(np, lane.cells[chan]), guard]
                if effect.puts:
                    put, top = top, top + layout.cell_sizes[chan] + 1
                    arena.append(guard.repeat(layout.cell_sizes[chan] + 1))
                    copy, size = size, size + layout.cell_sizes[chan] + 1
                channels.append((take, put, copy))
            for out in layout.out_sizes:
                outs.append(size)
                size += out + 1
            self.places.append((status, channels, outs))
            words += layout.pack(lane.row, status, channels, outs, lane.params)
        self.arena = np.concatenate(arena)
        self.table = np.array(words, np.uint32)
        self.results = np.full(size, GUARD, np.uint32)

    def answers(self, arena: Array, results: Array) -> list[Answer]:
        """Decode what a machine left, and check that nothing else was written."""
        layout, program = lane_layout(self.program), self.program
        free_arena, free_results = arena.copy(), results.copy()
        found = []
        for status, channels, outs in self.places:
            values = []
            for at, n, (dtype, shape) in zip(outs, layout.out_sizes, program.out_types, strict=True):
                values.append(from_words(np, results[at : at + n], dtype, shape))
                free_results[at : at + n] = GUARD
            puts = {}
            for chan, (_, put, copy) in enumerate(channels):
                if put == NONE:
                    continue
                cell, n = program.chans[chan], layout.cell_sizes[chan]
                assert np.array_equal(arena[put : put + n], results[copy : copy + n]), "the host's copy differs from the cell"
                puts[chan] = from_words(np, arena[put : put + n], cell.dtype, cell.shape)
                free_arena[put : put + n] = GUARD
                free_results[copy : copy + n] = GUARD
            found.append(Answer(values, puts, int(results[status])))
            free_results[status] = GUARD
        assert (free_results == GUARD).all(), "a result word that belongs to nothing was written"
        assert np.array_equal(free_arena, self.arena), "an arena word that belongs to nothing was written"
        return found

    def oracle(self) -> list[Answer]:
        """The answers by NumPy."""
        return [Answer(*run_epilogue(self.program, lane.params, self.logits, self.hidden, lane.row, lane.cells)) for lane in self.lanes]


def check(got: list[Answer], want: list[Answer], rtol: float = 2e-6, atol: float = 1e-6, where: str = "") -> None:
    """Ints, bools and statuses equal bit for bit; floats within tolerance, NaN and infinities in the same places."""
    assert len(got) == len(want)
    for lane, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.status == w.status, f"{where} lane {lane}: status {g.status}, want {w.status}"
        assert g.puts.keys() == w.puts.keys()
        pairs = [(f"out {i}", a, b) for i, (a, b) in enumerate(zip(g.outs, w.outs, strict=True))]
        pairs += [(f"channel {c}", g.puts[c], w.puts[c]) for c in w.puts]
        for name, a, wanted in pairs:
            b = np.asarray(wanted)
            assert a.shape == b.shape and a.dtype == b.dtype, f"{where} lane {lane} {name}: {a.dtype}{a.shape}, want {b.dtype}{b.shape}"
            if b.dtype == np.float32:
                np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, equal_nan=True, err_msg=f"{where} lane {lane} {name}")
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"{where} lane {lane} {name}")


def same_bits(a: Answer, b: Answer) -> bool:
    """Whether two answers are equal bit for bit."""
    return (
        a.status == b.status
        and all(np.array_equal(to_words(np, x), to_words(np, y)) for x, y in zip(a.outs, b.outs, strict=True))
        and a.puts.keys() == b.puts.keys()
        and all(np.array_equal(to_words(np, a.puts[c]), to_words(np, b.puts[c])) for c in a.puts)
    )
