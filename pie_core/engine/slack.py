"""Commits by a count that only the device knows yet: passes go on behind them, and the host corrects its lengths when it reads the count.

`commit(channel)` followed by `discard()` leaves a set with `base` + n tokens, where n, of at most `limit`, is in a cell of the channel
before the host has read it. Where the set allows it (`Slack.defer`), the host goes on with the most that it can be, `base` + `limit`:
passes reserve pages for that, and their rows are packed as if all drafts had been kept. The device keeps how many were dropped in one word
of the arena and moves the rows back by it (the template "shift"), so that one cell says where the sequence ends. When the count is read,
the host takes the dropped tokens out of everything that it holds of the set (`WorkingSet.forget`), and tells the device by how much its
rows are right already (`known`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.errors import ArenaFull, EngineLost
from pie_core.engine.runner import Shift

if TYPE_CHECKING:
    from pie_core.engine.arena import Arena
    from pie_core.engine.channel import Channel
    from pie_core.engine.forward import Geometry
    from pie_core.engine.working_set import WorkingSet


class Deferred:
    """A commit by cell number `cell` of `channel`. `base`, `limit`: tokens in front of its buffer and in it, as the host counts them;
    `counted`: a pass in a step has added it to the device's word."""

    __slots__ = ("base", "cell", "channel", "counted", "limit")

    def __init__(self, channel: Channel, cell: int) -> None:
        self.channel = channel
        self.cell = cell
        self.base = self.limit = 0
        self.counted = False


class Slack:
    """The commits of one working set that are `pending`: made early, and their counts not read. Holds an arena word while there are any."""

    __slots__ = ("_arena", "_fresh", "_known", "_word", "pending")

    def __init__(self, arena: Arena) -> None:
        self.pending: list[Deferred] = []
        self._arena = arena
        self._word = NONE
        self._fresh = True  # nothing is in the word yet
        self._known = 0  # tokens in the word that were dropped and that the host has taken out

    @property
    def base(self) -> int:
        """Tokens that will be there whatever the counts are. Only while something is pending."""
        return self.pending[0].base

    def defer(self, ws: WorkingSet, commit: Deferred) -> bool:
        """Commit early. False, and nothing has changed, where the set or the channel has to wait for the count."""
        if not may_defer(ws, commit) or any(not other.counted for other in self.pending):
            return False
        if self._word == NONE:
            try:
                self._word = self._arena.allocate(1)
            except (ArenaFull, EngineLost):  # of a lost device the next step tells
                return False
        commit.base, commit.limit = ws.frozen, ws.buffered
        ws.frozen = ws.length
        ws.last_step = max(ws.last_step, commit.channel.step_of(commit.cell))  # the next pass comes behind the step that counts
        commit.channel.promise(commit.cell)
        self.pending.append(commit)
        return True

    def shift(self, replayed: int) -> Shift | None:
        """How the rows of the next pass move, `replayed` of them in front of its own; None where the host knows where they are. The pass
        counts what was committed since the last one."""
        if not self.pending:
            return None
        fresh, self._fresh = self._fresh, False
        new = self.pending[-1]
        if new.counted:
            return Shift(self._word, fresh, NONE, 0, self._known, 0)
        new.counted = True
        new.channel.promise(new.cell, counted=True)
        return Shift(self._word, fresh, new.channel.offset(new.cell), new.limit, self._known, replayed)

    def settle(self, commit: Deferred, dropped: int) -> None:
        """The host knows that a pending commit dropped so many of its tokens, and takes them out."""
        if commit.counted:
            self._known += dropped
        for other in self.pending[self.pending.index(commit) + 1 :]:
            other.base -= dropped
        self.remove(commit)

    def cut(self, length: int) -> None:
        """The set was cut back to `length` tokens: commits of those behind never happened."""
        for commit in [c for c in self.pending if c.base >= length]:
            self.remove(commit)

    def clear(self) -> None:
        """The set is gone."""
        self.cut(0)

    def remove(self, commit: Deferred) -> None:
        """Forget a pending commit. With the last one the arena word is given back: steps in flight are in front of whoever gets it."""
        self.pending.remove(commit)
        commit.channel.keep_promise(commit.cell)
        if not self.pending:
            self._arena.release(self._word, 1)
            self._word, self._fresh, self._known = NONE, True, 0


def may_defer(ws: WorkingSet, commit: Deferred) -> bool:
    """Whether passes may go on behind a commit whose count is on its way: one pipeline does all, so that a stop cancels all that comes
    behind the pass that counts; the cell is being written; the buffer is a chain in pages of the set's own."""
    channel, cell = commit.channel, commit.cell
    if ws.dropped or not ws.buffered or ws.paused or ws.parents is not None or ws.error is not None or ws.inherited:
        return False
    if ws.pipe is None or ws.shared or channel.shared or channel.pipe is not ws.pipe or channel.closed or channel.poison is not None:
        return False
    if not channel.head <= cell < channel.tail:
        return False
    if ws.state is not None and ws.state.at != ws.frozen:
        return False  # what was committed before is not folded yet, and one run has one count
    return not any(ws.is_kept(page) for page in ws.pages[ws.frozen // PAGE_TOKENS :])


def may_shift(ws: WorkingSet, geometry: Geometry, sets: int) -> bool:
    """Whether the device can move the rows of a pass on `sets` sets, of which `ws` is one: it knows positions and places, not masks and
    trees; and only a buffer may be longer on the host than it is."""
    return sets == 1 and geometry.mode == "buffered" and not geometry.shaped and ws.parents is None
