"""Checks of a pass's tokens and read-outs, shared by the engine and the host's port (which knows channels by id only)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from pie_core.engine.errors import InvalidPass
from pie_core.engine.runner import RunnerLimits


class TokenCell(Protocol):
    """What is known of a channel that feeds a pass."""

    @property
    def dtype(self) -> str: ...
    @property
    def cell_words(self) -> int: ...


def check_tokens(tokens: object, sets: int, limits: RunnerLimits) -> tuple[Sequence[Sequence[int] | None], list[int]]:
    """(ids of each working set, None where a channel feeds them; number of tokens of each). `tokens`: a list of ids, a list of lists
    or a TokenCell. Raises InvalidPass."""
    if isinstance(tokens, (list, tuple)):
        lists = _lists(tokens, sets)
        for k, ids in enumerate(lists):
            check_ids("tokens" if ids is tokens else f"tokens[{k}]", ids, limits.vocab)
        return lists, [len(ids) for ids in lists]
    if not hasattr(tokens, "cell_words"):  # asking for a protocol takes as long as all the rest of a submit
        raise InvalidPass(f"tokens: a list of ids, a list of lists or a Channel is needed, got {type(tokens).__name__}")
    cell = cast(TokenCell, tokens)
    if cell.dtype not in ("u32", "i32"):
        raise InvalidPass(f"tokens: a channel of ids must be u32 or i32, this one is {cell.dtype}")
    if cell.cell_words % sets:
        raise InvalidPass(f"tokens: a cell of {cell.cell_words} ids does not divide among {sets} working sets")
    if cell.cell_words > limits.max_tokens:
        raise InvalidPass(f"tokens: {cell.cell_words} ids of a channel must run in one step of at most {limits.max_tokens}")
    return [None] * sets, [cell.cell_words // sets] * sets


def check_ids(field: str, ids: Sequence[int], vocab: int) -> None:
    """Raises InvalidPass for the first of `ids` (at least one) that is no token id, as `field[i]`."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise InvalidPass(f"{field}[{i}] = {token!r:.80} is not a token id: whole numbers 0 .. {vocab - 1} are")


def check_reads(reads: object, counts: Sequence[int], has_program: bool, limits: RunnerLimits) -> list[tuple[int, ...]]:
    """Token indices within the pass of each working set's read-outs; None means the last token of each, or nothing without a
    program. Raises InvalidPass."""
    lists: list[tuple[int, ...]]
    if reads is None:
        lists = [(n - 1,) for n in counts]
    else:
        if not isinstance(reads, (list, tuple)) or len(reads) != len(counts):
            raise InvalidPass(f"reads: one list of positions for each of the {len(counts)} working sets is needed, got {reads!r:.80}")
        for k, (positions, n) in enumerate(zip(reads, counts, strict=True)):
            if not isinstance(positions, (list, tuple)):
                raise InvalidPass(f"reads[{k}]: a list of positions is needed, got {positions!r:.80}")
            for p in positions:
                if type(p) is not int or not 0 <= p < n:
                    raise InvalidPass(f"reads[{k}]: position {p!r} is not a token of this pass: 0 .. {n - 1} are")
        lists = [tuple(positions) for positions in reads]
    if not has_program:
        return [()] * len(counts)  # nothing looks at them
    n_reads = sum(map(len, lists))
    if n_reads > limits.max_reads:
        raise InvalidPass(f"reads: {n_reads} read-outs in one pass; one step has at most {limits.max_reads}")
    tail = sum(n - min(positions) for positions, n in zip(lists, counts, strict=True) if positions)
    if tail > limits.max_tokens:
        raise InvalidPass(
            f"reads: from the earliest read-out to the end are {tail} tokens, which must run in one step of at most "
            f"{limits.max_tokens}: split the pass, or read later positions"
        )
    return lists


def _lists(tokens: Sequence[object], sets: int) -> list[Sequence[int]]:
    nested = bool(tokens) and isinstance(tokens[0], (list, tuple))
    lists = list(tokens) if nested else [tokens]
    if len(lists) != sets:
        raise InvalidPass(f"tokens: {len(lists)} lists of ids for {sets} working sets: give one list each")
    checked: list[Sequence[int]] = []
    for k, ids in enumerate(lists):
        field = f"tokens[{k}]" if nested else "tokens"
        if not isinstance(ids, (list, tuple)):
            raise InvalidPass(f"{field}: a list of ids is needed, got {type(ids).__name__}")
        if not ids:
            raise InvalidPass(f"{field} is empty: a pass needs at least one token for each working set")
        checked.append(ids)
    return checked
