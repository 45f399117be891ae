"""Mask blocks: the words against NumPy's own bit packing, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pie_core.device.mask_block import mask_block, mask_block_words
from pie_core.device.protocol import DeviceError

SIZES = [(0, 1), (0, 31), (0, 32), (0, 33), (7, 7), (7, 8), (100, 131), (100, 132), (100, 133), (5, 500)]


@pytest.mark.parametrize(("first", "count"), SIZES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_words(first: int, count: int, share: float) -> None:
    seen = np.random.default_rng(count).random(count - first) < share
    padded = np.concatenate([seen, np.zeros(-len(seen) % 32, bool)])
    bits = np.packbits(padded, bitorder="little").view("<u4").tolist()
    keys = [int(key) for key in np.flatnonzero(seen) + first]
    assert mask_block(first, count, reversed(keys)) == [first, count, *bits]
    assert mask_block(first, count, keys * 2) == [first, count, *bits], "a key given twice is seen once"
    assert mask_block_words(first, count) == 2 + len(bits)


REFUSED = [
    (0, 0, [], "first 0 and count 0"),
    (-1, 3, [], "first -1"),
    (4, 3, [], "first 4 and count 3"),
    (0, 1 << 32, [], "count must be in 1"),
    (2, 5, [3, 5], "keys 2 .. 4 cannot show key 5"),
    (2, 5, [1], "key 1; keys below 2 follow window and sinks"),
]


@pytest.mark.parametrize(("first", "count", "visible", "message"), REFUSED)
def test_refused(first: int, count: int, visible: list[int], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        mask_block(first, count, visible)
