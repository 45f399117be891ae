"""Recipes: what a working set's tokens are made of, so that they can be shared or computed again."""

from __future__ import annotations

from collections.abc import Sequence

OPAQUE = -1  # made with a window, or from an id that nobody knows: never shared, never computed again
PENDING = -2  # an id that the device read from a channel and that the host has not seen yet


class Recipe:
    """The token of each position of a working set, as far as an id under plain causal attention says everything about it.

    `known`: the leading positions that are covered; K and V behind the first hole depend on the hole, so they are not.
    """

    __slots__ = ("ids", "known")

    def __init__(self, ids: Sequence[int] = (), known: int = 0) -> None:
        self.ids = list(ids)
        self.known = known

    def extend(self, ids: Sequence[int]) -> None:
        """Tokens at known ids under plain causal attention."""
        if self.known == len(self.ids):
            self.known += len(ids)
        self.ids.extend(ids)

    def extend_unknown(self, n: int, *, pending: bool) -> None:
        """`n` tokens without a recipe; `pending` ones may get theirs (`fill`)."""
        self.ids.extend([PENDING if pending else OPAQUE] * n)

    def fill(self, at: int, ids: Sequence[int]) -> None:
        """The ids of pending tokens from position `at` on were read back; tokens that are gone, or opaque, stay so."""
        mine = self.ids
        for p, token in enumerate(ids, at):
            if p < len(mine) and mine[p] == PENDING:
                mine[p] = token
        while self.known < len(mine) and mine[self.known] >= 0:
            self.known += 1

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        del self.ids[length:]
        self.known = min(self.known, length)

    def copy(self, length: int) -> Recipe:
        """The recipe of the first `length` tokens."""
        return Recipe(self.ids[:length], min(self.known, length))
