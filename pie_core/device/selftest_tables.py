"""What the self-test asks of `shift` and `gate`: steps whose tables have an entry of each kind, and the words that must come out."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pie_core.device.protocol import NONE, PAGE_TOKENS

PAGES = (2, 0)  # of the one sequence: not in order
HEADER_WORDS, ROW_WORDS, SLOT_WORD = 16, 8, 3

# Words 0 to 3 are totals, 4 to 6 counts (2, -1, and one over its limit), 7 to 10 latches of gates, 11 and 12 stop cells. A read behind the
# end may find the last one.
ARENA = (9, 4, 1, 1, 2, NONE, 9, 0, 1, 0, 0, 1, 0, 0, 0, 1)
SHIFTS = (  # total, fresh, cell, limit, known, first, early, rows
    (0, 1, 4, 5, 0, 0, 1, 3),  # the 9 is forgotten, 3 of 5 are left over: row 0 stays, 1 and 2 go back by 3, into the page before
    (1, 0, NONE, 5, 1, 3, 0, 1),  # 4 as before, of which 1 is known
    (2, 0, 5, 2, 1, 4, 1, 2),  # 1 as before, and both: less what is known, row 4 goes back by 0 and row 5 by 2
    (3, 0, 6, 2, 0, 6, 0, 1),  # 1 as before, and none; the row stores nothing
)
POSITIONS = (17, 18, 19, 16, 16, 17, 17)
SHIFTED = (17, 15, 16, 13, 16, 15, 16)
TOTALS = (3, 4, 3, 1)
SILENT = (6,)  # the row without a slot
GATES = (  # latch, cell, the rows that it masks
    (7, 11, (0, 1, 2)),  # told to stop just now
    (8, 12, (3,)),  # told before
    (9, 12, (4, 5)),  # told to go on
    (10, NONE, (6,)),  # not told yet
)
LATCHES = (1, 1, 0, 0)
SHUT = ((7, 12, (0, 1)), (8, NONE, (2,)))  # as the step before left them


class Check(NamedTuple):
    """`template` makes `after` of a step that holds `before`, and leaves `arena` in the first words of the arena; named `name`."""

    name: str
    template: str
    before: array[int] | None  # None: the step as the check before left it
    after: array[int]
    arena: array[int]


Gates = Sequence[tuple[int, int, Sequence[int]]]


def step_words(
    positions: Sequence[int], masked: Collection[int], gates: Gates, shifts: Sequence[Sequence[int]], free: int = 0
) -> array[int]:
    """Words of a step with rows at `positions`, those of `masked` without a slot, and these tables. `free` rows have no gate."""
    pages = HEADER_WORDS + ROW_WORDS * len(positions)
    at = pages + len(PAGES)
    places = [HEADER_WORDS + ROW_WORDS * row + SLOT_WORD for _, _, rows in gates for row in rows]
    table = at + len(places)
    words = [len(positions), 2, 1, HEADER_WORDS, pages, pages, 0, 0, table, len(gates), free, table + 4 * len(gates), len(shifts), 0, 0, 0]
    for row, pos in enumerate(positions):
        slot = NONE if row in masked else PAGES[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
        words += [0, NONE, pos, slot, pages, 0, 0, 0]
    words += [*PAGES, *places]
    for latch, cell, rows in gates:
        words += [latch, cell, at, len(rows)]
        at += len(rows)
    return array("I", [*words, *(word for shift in shifts for word in shift)])


def checks() -> list[Check]:
    """In the order in which they have to run, on one arena that starts as ARENA."""
    before, moved = step_words(POSITIONS, SILENT, GATES, SHIFTS), step_words(SHIFTED, SILENT, GATES, SHIFTS)
    totals = array("I", [*TOTALS, *ARENA[len(TOTALS) :]])
    latched = array("I", [*totals[:7], *LATCHES, *ARENA[11:]])
    found = [
        Check("shift", "shift", before, moved, totals),
        Check("gate", "gate", None, step_words(SHIFTED, (0, 1, 2, 3, *SILENT), GATES, SHIFTS), latched),
    ]
    for free in (0, 1):
        before, after = (step_words(POSITIONS[:3], masked, SHUT, (), free) for masked in ((), range(3)))
        if not free:
            after[0] = after[1] = 0
        found.append(Check(f"gate, all shut, {free} rows without one", "gate", before, after, latched))
    return found
