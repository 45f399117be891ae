"""Packs an attention mask into the words that kernels read: [first, count, bits…] (docs/architecture.md, section 4)."""

from __future__ import annotations

from collections.abc import Iterable

from pie_core.device.protocol import DeviceError

MASK_HEADER_WORDS = 2


def mask_block_words(first: int, count: int) -> int:
    """Words of the block of a mask over keys `first` … `count` - 1."""
    return MASK_HEADER_WORDS + (count - first + 31) // 32


def mask_block(first: int, count: int, visible: Iterable[int]) -> list[int]:
    """The u32 words of one token's mask. Of its `count` stored keys, those below `first` follow its window and sinks; of the others
    it sees those in `visible` (places in storage, in any order). The token's own place belongs to them: a row that sees no key is NaN.

    Raises DeviceError when the sizes contradict each other or a visible key is outside `first` … `count` - 1.
    """
    if not 0 <= first <= count or not 0 < count < 1 << 32:
        raise DeviceError(f"a mask has first {first} and count {count}: count must be in 1 .. 2^32 - 1 and first in 0 .. count")
    bits = [0] * ((count - first + 31) // 32)
    for key in visible:
        if not first <= key < count:
            raise DeviceError(f"a mask over keys {first} .. {count - 1} cannot show key {key}; keys below {first} follow window and sinks")
        bits[(key - first) // 32] |= 1 << (key - first) % 32
    return [first, count, *bits]
