"""Packs a StepBatch into the words of the step buffer (docs/architecture.md, section 4): the one place that knows its layout."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pie_core.device.protocol import LANE_ALIGN, NONE
from pie_core.engine.runner import ROW_WORDS, RUN_WORDS, StepBatch
from pie_core.eta.program import Program

HEADER_WORDS = 16
GATE_WORDS = 4
SHIFT_WORDS = 8
SLOT_WORD = 3  # of a token row
WRITE_WORD = 2  # of a run
CELL_WORD = 4
LANE_ALIGN_WORDS = LANE_ALIGN // 4
_ZEROS = bytes(LANE_ALIGN)


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Where one epilogue launch finds its lanes: byte offset in the step buffer (a multiple of 256) and their number."""

    program: Program
    lane_offset: int
    lanes: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Bytes for offset 0 of the step buffer, and the epilogue launches that follow the head plan."""

    data: bytearray
    groups: list[PackedGroup]


def aligned_lane_words(words: int) -> int:
    """Words that `words` lane words take in the step buffer."""
    return -(-words // LANE_ALIGN_WORDS) * LANE_ALIGN_WORDS


def pack_step(batch: StepBatch, *, single_lanes: bool = False) -> PackedStep:
    """Little-endian words of the whole step: header, token rows, reads, page tables, masks, runs, the lanes of each group, gates, shifts.
    `single_lanes`: a launch for each lane, aligned like a group."""
    n_tokens, n_reads = batch.n_tokens, len(batch.reads)
    read_off = HEADER_WORDS + ROW_WORDS * n_tokens
    page_off = read_off + n_reads
    words = array("I", (n_tokens, n_reads, batch.n_seqs, HEADER_WORDS, read_off, page_off, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    words.extend(batch.rows)
    first = HEADER_WORDS + 4
    for at in range(first, read_off, ROW_WORDS):
        words[at] += page_off
    if batch.masks:
        mask_off = page_off + len(batch.tables)
        for at in range(first + 3, read_off, ROW_WORDS):
            if words[at]:
                words[at] += mask_off - 1
    words.extend(batch.reads)
    words.extend(batch.tables)
    words.extend(batch.masks)
    if batch.runs:
        words[6:8] = array("I", (len(words), len(batch.runs) // RUN_WORDS))
        words.extend(batch.runs)
    groups: list[PackedGroup] = []
    lane_at: dict[int, int] = {}  # by id of a lane that may have a gate
    for group in batch.epilogues:
        for lanes in ([lane] for lane in group.lanes) if single_lanes else (group.lanes,):
            pad = -len(words) % LANE_ALIGN_WORDS
            words.frombytes(_ZEROS[: 4 * pad])
            groups.append(PackedGroup(group.program, 4 * len(words), len(lanes)))
            for lane in lanes:
                if batch.gates:
                    lane_at[id(lane)] = len(words)
                words.extend(lane)
    if batch.gates:
        _pack_gates(words, batch, lane_at)
        _pack_shifts(words, batch)
    return PackedStep(bytearray(words.tobytes()), groups)


def _pack_gates(words: array[int], batch: StepBatch, lane_at: dict[int, int]) -> None:
    """The words that each gate masks when it is shut, then the gate table; its place, the gates and the rows without one in the header."""
    entries: list[int] = []
    runs = words[6]
    for gate in batch.gates:
        if gate.word == NONE:
            continue
        first = len(words)
        words.extend(HEADER_WORDS + ROW_WORDS * row + SLOT_WORD for row in gate.rows)
        words.extend(runs + RUN_WORDS * run + WRITE_WORD for run in gate.runs)
        if gate.lane is not None:
            words.append(lane_at[id(gate.lane)])
        entries += (gate.word, gate.cell, first, len(words) - first)
    words[8:11] = array("I", (len(words), len(entries) // GATE_WORDS, batch.n_tokens - batch.gated_rows))
    words.extend(entries)


def _pack_shifts(words: array[int], batch: StepBatch) -> None:
    """The shift table, its place and size in the header; runs of passes with a new count fold as many rows as it says."""
    shifted = [(gate, gate.shift) for gate in batch.gates if gate.shift is not None]
    words[11:13] = array("I", (len(words), len(shifted)))
    for gate, shift in shifted:
        words.extend((shift.total, shift.fresh, shift.cell, shift.limit, shift.known, gate.rows.start, shift.early, len(gate.rows)))
        for run in gate.runs:
            words[words[6] + RUN_WORDS * run + CELL_WORD] = shift.cell
