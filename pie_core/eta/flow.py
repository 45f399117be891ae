"""Channels inside one pass are registers: what each take or read sees, and what a run does to each channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pie_core.eta.errors import ProgramError

if TYPE_CHECKING:
    from pie_core.eta.program import Node

First = Literal["take", "read", "put"]


class ChanEffect(NamedTuple):
    """`first` fixes what a pass needs (take and read: a full cell; put: room). `takes` and `puts` are the cells consumed and
    committed by a pass, 0 or 1 each; `uses_cell` says whether the device reads the front cell; `put` is the value id committed."""

    first: First
    takes: int
    puts: int
    uses_cell: bool
    put: int | None


def pending_values(ops: Sequence[Node]) -> dict[int, int]:
    """For each take or read of a value put earlier in the same pass: op id -> id of that value."""
    pending: dict[int, int] = {}
    seen: dict[int, int] = {}
    for index, node in enumerate(ops):
        chan = node.attrs.get("chan")
        if chan is None:
            continue
        if node.name == "put":
            pending[int(chan)] = node.args[0]
        elif int(chan) in pending:
            seen[index] = pending[int(chan)]
            if node.name == "take":
                del pending[int(chan)]
    return seen


def channel_effects(ops: Sequence[Node], count: int) -> tuple[ChanEffect, ...]:
    """The effects of a program on its `count` channels. Raises ProgramError for an order that a register cannot follow."""
    return tuple(_one(ops, chan) for chan in range(count))


def _one(ops: Sequence[Node], chan: int) -> ChanEffect:
    first: First | None = None
    takes = 0
    uses_cell = False
    state = "front"  # front: the cell from before the pass; value: a pending put; empty: taken
    put: int | None = None
    for index, node in enumerate(ops):
        if node.attrs.get("chan") != chan:
            continue
        if node.name == "put":
            if state == "front" and uses_cell:
                raise ProgramError(f"op {index} (put) fills channel {chan}, which this pass only read: take it instead of read")
            first = first or "put"
            state, put = "value", node.args[0]
            continue
        if state == "empty":
            raise ProgramError(
                f"op {index} ({node.name}) finds channel {chan} empty: this pass took its value already; keep that value or put first"
            )
        first = first or ("take" if node.name == "take" else "read")
        if state == "front":
            uses_cell = True
            takes = int(node.name == "take")
        if node.name == "take":
            state, put = "empty", None
    assert first is not None, "every declared channel is touched"
    return ChanEffect(first, takes, int(put is not None), uses_cell, put)
