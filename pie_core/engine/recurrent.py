"""Recurrent state behind working sets: slots shared by reference, a folded prefix, and the tokens that are replayed behind it.

A set owns the slot of its folded prefix. Folding writes another slot, so a fork is a reference and never sees what its parent does
next. Tokens behind the folded prefix (the buffer, and what was committed since) are kept by id: a pass runs them again in front of its
own, without read-outs and without storing K and V, and folds the committed ones on the way. Discarding drops ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import NONE
from pie_core.engine.channel import Channel
from pie_core.engine.errors import InvalidState, OutOfSlots, UnsupportedGeometry

if TYPE_CHECKING:
    from pie_core.engine.forward import Part, Pass, PassSpec
    from pie_core.engine.runner import RunnerLimits

Token = tuple[int, int, int]  # id, window, sinks


class StatePool:
    """Slots 0 .. total-1 with exact reference counts. The device runs in order: any later step may write a slot that was freed."""

    __slots__ = ("_free", "_refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total

    @property
    def free(self) -> int:
        """Slots that nobody references."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots with at least one reference."""
        return self.total - self.free

    def refs(self, slot: int) -> int:
        """References to `slot`."""
        return self._refs[slot]

    def allocate(self) -> int:
        """A slot with one reference. The caller has checked `free`; IndexError otherwise."""
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """One more reference to a slot in use."""
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """One reference less; the last one frees the slot. Raises RuntimeError when there is none."""
        if self._refs[slot] == 0:
            raise RuntimeError(f"state slot {slot} was released more often than it was shared")
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free.append(slot)


class RecurrentState:
    """The state of one sequence. `slot` holds it after the first `at` tokens; None: zeros, after none. `replay` are the tokens behind."""

    __slots__ = ("at", "pool", "replay", "slot")

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slot: int | None = None
        self.at = 0
        self.replay: list[Token] = []

    def copy(self, length: int | None = None) -> RecurrentState:
        """Another holder of the same state, of the first `length` tokens (None: all)."""
        other = RecurrentState(self.pool)
        other.become(self, length)
        return other

    def become(self, other: RecurrentState, length: int | None = None) -> None:
        """Hold what `other` holds of the first `length` tokens (None: all), instead of what was."""
        if other.slot is not None:
            self.pool.share(other.slot)
        self.clear()
        self.slot, self.at = other.slot, other.at
        self.replay = list(other.replay) if length is None else other.replay[: max(0, length - other.at)]

    def clear(self) -> None:
        """Back to no tokens. Twice is harmless."""
        if self.slot is not None:
            self.pool.release(self.slot)
        self.slot, self.at, self.replay = None, 0, []

    def cut(self, length: int) -> bool:
        """Drop the tokens from `length` on. False: they were folded, so that all is gone and has to be computed again."""
        if length >= self.at:
            del self.replay[length - self.at :]
            return True
        self.clear()
        return length == 0

    def extend(self, tokens: Sequence[Token], n: int, committed: int) -> tuple[int, int, int]:
        """A run of `replay` and `n` more tokens is about to be enqueued; its first `committed` rows are folded. `tokens` are the new ones,
        and may be left out where they are folded. Gives (slot to start from, slot to write, rows to fold) for the recurrence table.

        A slot that only this set refers to is written in place: then a pass goes on that keeps what was before it. The caller has
        checked that a slot is free otherwise.
        """
        start, rows = NONE if self.slot is None else self.slot, len(self.replay) + n
        self.replay = [*self.replay, *tokens][committed:] if committed < rows else []
        if not committed:
            return start, NONE, 0
        self.at += committed
        if self.slot is None or self.pool.refs(self.slot) > 1:
            fresh = self.pool.allocate()
            if self.slot is not None:
                self.pool.release(self.slot)
            self.slot = fresh
        return start, self.slot, committed


def check_recurrent(spec: PassSpec) -> None:
    """What a model with recurrent state does not run. Raises UnsupportedGeometry with the way round it."""
    geometry = spec.geometry
    if geometry.tree is not None:
        raise UnsupportedGeometry(
            "geometry tree=…: the model has recurrent state, which follows one sequence: fork the set for each branch instead"
        )
    if geometry.mode == "buffered" and geometry.mask is not None:
        raise UnsupportedGeometry(
            "geometry mask=… of a buffered pass: the model has recurrent state, so that buffered tokens are computed again and again, "
            "and masks are not kept: use window and sinks, or a folding pass on a fork"
        )
    if geometry.mode == "buffered" and isinstance(spec.tokens, Channel):
        raise UnsupportedGeometry(
            "tokens of a buffered pass come from a channel: the model has recurrent state, so that they are computed again by their ids, "
            "which the host does not know: give ids, or use a folding pass on a fork"
        )


def replayed(work: Pass) -> int:
    """Rows that the working sets of `work` replay in front of its own tokens."""
    return sum(len(part.ws.state.replay) for part in work.parts if part.ws.state is not None and part.done < part.n)


def slots_needed(work: Pass) -> int:
    """Slots that a pass takes when it starts: one for each set that it folds tokens of."""
    folding = work.geometry.mode == "folding"
    return sum(1 for part in work.parts if part.ws.state is not None and (folding or part.ws.frozen > part.ws.state.at))


def slots_free(work: Pass, pool: StatePool, promised: int) -> bool:
    """Whether a pass may start now, as far as slots go, when `promised` are for another one. Raises OutOfSlots when it never can."""
    need = slots_needed(work)
    if need > pool.total:
        raise OutOfSlots(
            f"the pass needs {need} slots of recurrent state at once, the pool has {pool.total}: fewer working sets in a pass need fewer",
            needed=need,
            total=pool.total,
        )
    return not need or need <= pool.free - promised


def fold_before(work: Pass, limits: RunnerLimits) -> list[Part]:
    """Parts whose committed tokens must be folded in a step before the pass, which with its replayed tokens would not fit one.
    Raises InvalidState when it does not fit without them either."""
    buffered = work.geometry.mode == "buffered"
    own = work.remaining if buffered else max(work.tail, 1)
    rows = replayed(work) + own
    if rows <= limits.max_tokens:
        return []
    parts = [part for part in work.parts if part.ws.state is not None and part.ws.frozen > part.ws.state.at]
    buffer = sum(part.ws.buffered for part in work.parts)
    if buffer + own > limits.max_tokens:
        raise InvalidState(
            f"the pass adds {own} tokens to a buffer of {buffer}; with recurrent state a whole buffer runs in one step, of at most "
            f"{limits.max_tokens} tokens: commit or discard some, or split the pass",
            buffered=buffer,
            tokens=own,
            most=limits.max_tokens,
        )
    return parts
