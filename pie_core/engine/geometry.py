"""Geometry: how a pass extends its working set and what its tokens see. Window and sinks, explicit masks, trees of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pie_core.engine.errors import InvalidPass, InvalidState, UnsupportedGeometry

if TYPE_CHECKING:
    from pie_core.engine.runner import RunnerLimits
    from pie_core.engine.working_set import WorkingSet

U32_END = 1 << 32
MAX_MASK_BITS = 1 << 24  # of all rows of one mask together
HEADER = 2  # words of a mask block before its bits


@dataclass(frozen=True, slots=True)
class Mask:
    """Bit p of `rows[i]`: new token i sees stored token p, counted from the working set's first; the pass's own tokens follow.

    `width`: entries of a row as they were given; None where only their `words` of 32 bits are known.
    """

    rows: tuple[int, ...]
    width: int | None
    words: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a pass extends and sees its working sets. `folding` freezes its tokens at once, `buffered` appends to the buffer.

    window > 0 limits attention to that many last positions; `sinks` keeps the first ones visible besides.
    mask: which stored tokens each new token sees, on top of that.
    tree: the parent of each new token, an index in the buffer, or -1 for the last token of the frozen prefix. A token sees the
        prefix and its ancestors, and its position is its depth behind the prefix.
    """

    mode: Literal["folding", "buffered"] = "folding"
    window: int = 0
    sinks: int = 0
    mask: Mask | None = None
    tree: tuple[int, ...] | None = None

    @property
    def shaped(self) -> bool:
        """Whether rows of the pass need mask blocks."""
        return self.mask is not None or self.tree is not None

    @staticmethod
    def check(
        mode: object = "folding",
        window: object = 0,
        sinks: object = 0,
        *,
        mask: object = None,
        width: object = None,
        tree: object = None,
        **other: object,
    ) -> Geometry:
        """A Geometry from untrusted fields. mask: a row a new token, of bools or of u32 words (32 tokens each, lowest bit first, `width`
        tokens in all). Raises UnsupportedGeometry for what no engine of this version runs, InvalidPass for bad values."""
        for name, value in other.items():
            if value is not None:
                raise UnsupportedGeometry(f"geometry field {name!r:.40} is unknown; known: mode, window, sinks, mask, width, tree")
        if mode not in ("folding", "buffered"):
            raise UnsupportedGeometry(f"geometry mode {mode!r:.40} is unknown; use 'folding' or 'buffered'")
        for name, value in (("window", window), ("sinks", sinks)):
            if type(value) is not int or not 0 <= value < U32_END:
                raise InvalidPass(f"geometry {name}={value!r:.40} must be a whole number >= 0")
        if sinks and not window:
            raise InvalidPass(f"geometry sinks={sinks} needs a window: without one every position is visible")
        rows = check_mask(mask, width)
        parents = check_tree(tree)
        if mode == "folding" and parents is not None:
            if parents != tuple(range(-1, len(parents) - 1)):
                raise UnsupportedGeometry(
                    f"geometry tree={list(parents)!r:.60} branches, and a folding pass freezes one sequence: use buffered(tree=…) and "
                    "commit a path"
                )
            parents = None  # a chain behind the prefix is what a folding pass is anyway
        return Geometry("folding" if mode == "folding" else "buffered", window, sinks, rows, parents)  # type: ignore[arg-type]


def check_mask(mask: object, width: object = None) -> Mask | None:
    """A Mask from rows of bools or of words. Raises InvalidPass with the row, its size and the fix."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, (list, tuple)) or not mask or not all(isinstance(row, (list, tuple)) and row for row in mask):
        raise InvalidPass(f"geometry mask={mask!r:.60} must be a list of rows, one a new token, each a list of bools or of 32-bit words")
    size = len(mask[0])
    packed = type(mask[0][0]) is not bool
    if len(mask) * size * (32 if packed else 1) > MAX_MASK_BITS:
        raise InvalidPass(f"geometry mask: {len(mask)} rows of {size} are over the cap of {MAX_MASK_BITS} bits: split the pass")
    for k, row in enumerate(mask):
        if len(row) != size:
            raise InvalidPass(f"geometry mask[{k}] has {len(row)} entries and mask[0] has {size}: all rows are equally long")
        good = all(type(w) is int and 0 <= w < U32_END for w in row) if packed else set(map(type, row)) == {bool}
        if not good:
            raise InvalidPass(f"geometry mask[{k}] must hold {'whole numbers 0 .. 2^32-1' if packed else 'bools'}, like mask[0]")
    if not packed:
        return Mask(tuple(int("".join("1" if seen else "0" for seen in reversed(row)), 2) for row in mask), size, -(-size // 32))
    if width is not None and (type(width) is not int or -(-width // 32) != size):
        raise InvalidPass(f"geometry width={width!r:.40} does not fit rows of {size} words: {32 * size - 31} .. {32 * size} tokens do")
    rows = tuple(int.from_bytes(b"".join(w.to_bytes(4, "little") for w in row), "little") for row in mask)
    return Mask(rows, width, size)


def check_tree(tree: object) -> tuple[int, ...] | None:
    """Parents from untrusted values. Raises InvalidPass."""
    if tree is None:
        return None
    if not isinstance(tree, (list, tuple)) or not tree:
        raise InvalidPass(f"geometry tree={tree!r:.60} must list the parent of each new token: an index in the buffer, or -1")
    for k, parent in enumerate(tree):
        if type(parent) is not int or not -1 <= parent < 1 << 31:
            raise InvalidPass(f"geometry tree[{k}] = {parent!r:.40} must be an index in the buffer, or -1 for the end of the frozen prefix")
    return tuple(tree)


def check_shape(geometry: Geometry, counts: Sequence[int]) -> None:
    """What can be said of mask and tree at submit; `counts` are the tokens of each working set. Raises InvalidPass."""
    if not geometry.shaped:
        return
    if len(counts) != 1:
        raise InvalidPass(f"a pass with a mask or a tree extends one working set, this one has {len(counts)}: submit a pass for each")
    rows = geometry.mask.rows if geometry.mask is not None else None
    for name, given in (("mask", rows), ("tree", geometry.tree)):
        if given is not None and len(given) != counts[0]:
            raise InvalidPass(f"geometry {name} has {len(given)} entries for the {counts[0]} tokens of the pass: give one for each")


def check_fit(geometry: Geometry, ws: WorkingSet, n: int, tail: int, limits: RunnerLimits) -> None:
    """What only the set's length tells, before the first token of a pass of `n`. Raises InvalidPass, InvalidState."""
    length, buffered = ws.length, ws.buffered
    if geometry.tree is None and ws.parents is not None:
        raise InvalidState(
            f"the buffer of {buffered} tokens is a tree, and the pass does not say where it continues: give tree=, or commit a path first"
        )
    for k, parent in enumerate(geometry.tree or ()):
        if parent >= buffered + k:
            raise InvalidPass(
                f"geometry tree[{k}] = {parent} is not in the buffer yet: it holds {buffered} tokens before the pass, so the parent of "
                f"its token {k} is -1 .. {buffered + k - 1}"
            )
    mask = geometry.mask
    if mask is not None:
        total = length + n
        if mask.width != total and (mask.width is not None or mask.words != -(-total // 32)):
            got = f"{mask.width} entries" if mask.width is not None else f"{mask.words} words"
            raise InvalidPass(
                f"geometry mask: its rows have {got}, but the set holds {length} tokens and the pass adds {n}: "
                f"{total} entries, or {-(-total // 32)} words, are needed",
                tokens=total,
            )
        for k, row in enumerate(mask.rows):
            if row.bit_length() > length + k + 1:
                raise InvalidPass(
                    f"geometry mask[{k}] shows token {row.bit_length() - 1}, which comes after the token's own place {length + k}"
                )
            if not row >> (length + k) & 1:
                raise InvalidPass(f"geometry mask[{k}] hides the token's own place {length + k}: every token sees itself")
    words = block_words(geometry, ws, n)
    most = max(tail, min(n, 16)) * words
    if most > limits.mask_words:
        raise InvalidPass(
            f"the masks of {most // words} tokens that must run in one step take {most} words, a step has {limits.mask_words}: "
            "split the pass, or read later positions"
        )


def block_words(geometry: Geometry, ws: WorkingSet, n: int) -> int:
    """Words that the mask block of a token takes at most, when `n` more tokens are to come."""
    hidden = ws.length + n - (0 if geometry.mask is not None else ws.frozen)
    return HEADER + -(-hidden // 32)


def lineage(parents: Sequence[int]) -> list[int]:
    """For each token of a tree the bits of its ancestors, itself included."""
    seen: list[int] = []
    for k, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << k)
    return seen


def sights(geometry: Geometry, ws: WorkingSet, done: int, n: int) -> list[tuple[int, list[int]]]:
    """(position, mask block) of the next `n` tokens of a shaped pass, of which `done` are in the set already."""
    length, frozen, mask, tree = ws.length, ws.frozen, geometry.mask, geometry.tree
    buffer = [] if tree is None else lineage([*ws.tree(), *tree[done : done + n]])
    out = []
    for k in range(n):
        place = length + k
        pos, seen = place, (2 << place) - 1
        path = 0
        if tree is not None:
            path = buffer[place - frozen]
            pos = frozen + path.bit_count() - 1
            seen = (1 << frozen) - 1 | path << frozen
        if mask is not None:
            seen &= mask.rows[done + k]
        first = (seen ^ (seen + 1)).bit_length() - 1  # keys below are seen as far as window and sinks go
        if geometry.window:
            seen &= _near(geometry, pos, frozen, path) if path else _span(geometry, pos)
        bits = seen >> first
        count = place + 1
        size = -(-(count - first) // 32)
        block = [first, count]
        if size:
            block.extend(memoryview((bits).to_bytes(4 * size, "little")).cast("I"))
        out.append((pos, block))
    return out


def _span(geometry: Geometry, pos: int) -> int:
    """Bits of the positions that window and sinks leave to a token at `pos`."""
    low = max(0, pos - geometry.window + 1)
    return (2 << pos) - (1 << low) | (1 << min(geometry.sinks, pos + 1)) - 1


def _near(geometry: Geometry, pos: int, frozen: int, path: int) -> int:
    """The same in storage, for a token whose ancestors in the buffer are the bits of `path`: the d-th of them is at `frozen` + d."""
    span = _span(geometry, pos)
    seen = span & (1 << frozen) - 1
    span >>= frozen
    while path:
        low = path & -path
        if span & 1:
            seen |= low << frozen
        span >>= 1
        path ^= low
    return seen
