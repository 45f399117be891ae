"""What the self-test asks of kernels that move state between slots, and the answers: `recur` over runs of every kind, `move_slots`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pie_core.device.protocol import NONE, PAGE_TOKENS

HEADER_WORDS, ROW_WORDS = 16, 8

# The recurrence. Its width is no multiple of a workgroup, its part of a slot begins and ends inside the slot.
WIDTH, STRIDE, OFFSET, SLOTS = 68, 76, 4, 7
BUCKET = 16  # rows of one launch; the last ones are of no step
ARENA = (1, NONE, 2, 9)  # counts: one of two, -1, and two over their limit

# Rows of K and of V, of which both together are no multiple of a workgroup.
CACHE_WIDTH, CACHE_SLOTS = 136, PAGE_TOKENS  # no device takes less than a page
MOVES = (  # source, slot
    (3, 1),
    (1, 0),  # as it is by then
    (5, 3),
    (6, 5),
    (CACHE_SLOTS, 6),  # neither from nor to a row that is not there
    (4, CACHE_SLOTS),
    (NONE, 4),
    (2, 7),
)
BEHIND = (0, 2)  # a row behind the last one of the list


class Run(NamedTuple):
    """An entry of the recurrence table that covers `rows` rows."""

    rows: int
    start: int
    write: int
    limit: int
    cell: int = NONE


class Recurrence(NamedTuple):
    """A step of `tokens` rows under `runs`; what is wrong here is the kernel `name`."""

    name: str
    tokens: int
    runs: tuple[Run, ...]


STEPS = (
    Recurrence(
        "recur",
        14,
        (
            Run(2, NONE, 0, 2),  # from zeros
            Run(3, 1, 2, 2, 0),  # one of two is folded: the third row goes on from the first
            Run(2, 3, 3, 1),  # in place
            Run(2, 1, 4, 1, 1),  # none is folded: a copy
            Run(3, 1, 5, 1, 2),  # no more than the limit
            Run(1, 1, NONE, 1, 3),  # nothing is kept
        ),  # and a row of no run
    ),
    Recurrence(
        "recur with malformed runs",
        7,
        (
            Run(1, SLOTS, 2, 1),
            Run(1, 1, SLOTS, 1),
            Run(1, 1, 2, 2),
            Run(1, 1, 2, 1, len(ARENA)),
            Run(2, 1, 6, 2),  # a good one
            Run(2, 1, 2, 1),  # over the end
        ),
    ),
)


def recurrence_words(step: Recurrence) -> array[int]:
    """The step buffer: rows of nothing, and the recurrence table."""
    at = HEADER_WORDS + ROW_WORDS * step.tokens
    words = array("I", [step.tokens, 0, 1, HEADER_WORDS, at, at, at, len(step.runs), *[0] * (at - 8)])
    end = 0
    for run in step.runs:
        end += run.rows
        words.extend((end, *run[1:]))
    return words


def recurrence(
    step: Recurrence, x: Sequence[Sequence[float]], decay: Sequence[float], gain: Sequence[float], state: Sequence[Sequence[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """(out [BUCKET, WIDTH] that was zeros, state [SLOTS, STRIDE] afterwards): the step with rows `x`."""
    out, after = [[float("nan")] * WIDTH] * step.tokens + [[0.0] * WIDTH] * (BUCKET - step.tokens), [list(slot) for slot in state]
    first = 0
    for rows, start, write, limit, cell in step.runs:
        end = first + rows
        inside = all(slot == NONE or slot < SLOTS for slot in (start, write)) and (cell == NONE or cell < len(ARENA))
        if inside and limit <= rows and end <= step.tokens:
            count = limit if cell == NONE else ARENA[cell]
            folded = 0 if count >> 31 else min(count, limit)  # a word with the sign bit is a negative count
            h = [0.0] * WIDTH if start == NONE else list(state[start][OFFSET : OFFSET + WIDTH])
            states = [h]
            for row in range(rows):
                before = states[folded] if row == limit else states[row]
                states.append([a * v + b * w for a, v, b, w in zip(decay, before, gain, x[first + row], strict=True)])
                out[first + row] = states[-1]
            if write != NONE:
                after[write][OFFSET : OFFSET + WIDTH] = states[folded]
        first = end
    return out, after


def moves_words() -> array[int]:
    """The list of MOVES, as a step buffer of its own. A row that is not of the list lies behind it."""
    words = array("I", [len(MOVES), 0, 1, HEADER_WORDS, HEADER_WORDS, HEADER_WORDS, *[0] * (HEADER_WORDS - 6)])
    for source, slot in (*MOVES, BEHIND):
        words.extend((source, NONE, 0, slot, 0, 0, 0, 0))
    return words


def cache(first: int) -> array[float]:
    """[CACHE_SLOTS, CACHE_WIDTH] whole numbers from `first` on: no two elements are equal."""
    return array("f", range(first, first + CACHE_SLOTS * CACHE_WIDTH))


def moved(before: array[float]) -> array[int]:
    """The words of such a cache behind MOVES."""
    rows = [before[at : at + CACHE_WIDTH] for at in range(0, len(before), CACHE_WIDTH)]
    for source, slot in MOVES:
        if source < CACHE_SLOTS and slot < CACHE_SLOTS:
            rows[slot] = rows[source]
    return array("I", b"".join(row.tobytes() for row in rows))
