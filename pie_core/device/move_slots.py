"""Moves KV rows between slots in every layer: what a commit by tree path does with the rows that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pie_core.device.protocol import Buffer, Device, LimitError


class SlotMover:
    """Moves rows of the (k, v) caches of all layers; `widths[i]` is the number of f32 in a row of layer i.

    Raises LimitError when the caches of a layer are not whole rows, as many of K as of V.
    """

    def __init__(self, device: Device, caches: Sequence[tuple[Buffer, Buffer]], widths: Sequence[int]) -> None:
        self._device = device
        self._layers = [(k, v, 4 * width) for (k, v), width in zip(caches, widths, strict=True)]
        for k, v, row in self._layers:
            if row < 4 or k.size % row or k.size != v.size:
                raise LimitError(f"caches of {k.size} and {v.size} bytes do not hold whole rows of {row} bytes, as many of K as of V")
        self._slots = min((k.size // row for k, _, row in self._layers), default=0)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue: for each (source, target) in list order, row `target` becomes row `source` as it is by then.

        A path that moves to lower slots therefore arrives whole when it is listed from its root. Raises LimitError for a slot
        outside the caches; nothing has moved then.
        """
        for source, target in pairs:
            if not (0 <= source < self._slots and 0 <= target < self._slots):
                raise LimitError(f"cannot move slot {source} to slot {target}: the caches have {self._slots} slots")
        for source, target, rows in runs(pairs):
            for k, v, row in self._layers:
                for cache in (k, v):
                    self._device.copy(cache, source * row, cache, target * row, rows * row)


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, rows) of copies that do what the moves do one after the other; a move to its own slot is left out.

    Neighbours join when both slots go up by one and no row of the run is overwritten before it is read.
    """
    source = target = rows = 0
    for a, b in pairs:
        if a == b:
            continue
        apart = target < source or target - source > rows
        if rows and apart and (a, b) == (source + rows, target + rows):
            rows += 1
            continue
        if rows:
            yield source, target, rows
        source, target, rows = a, b, 1
    if rows:
        yield source, target, rows
