"""Moves KV rows between slots in every layer: what a commit by tree path does with the rows that it keeps."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pie_core.device.protocol import NONE, Buffer, Device, Launch, LimitError, Plan
from pie_core.device.templates import template

MAX_MOVES = 64  # pairs of one run of the plan; longer lists take several
_HEADER = (0, 1, 16, 16, 16)  # of the plan's own step buffer behind the row count: no reads, one sequence, offsets


class SlotMover:
    """Moves rows of the (k, v) caches of all layers; `widths[i]` is the number of f32 in a row of layer i, a multiple of 4.

    Raises LimitError when the caches of a layer are not whole rows, as many of K as of V.
    """

    def __init__(self, device: Device, caches: Sequence[tuple[Buffer, Buffer]], widths: Sequence[int]) -> None:
        self._device = device
        self._layers = [(k, v, 4 * width) for (k, v), width in zip(caches, widths, strict=True)]
        for k, v, row in self._layers:
            if row < 16 or row % 16 or k.size % row or k.size != v.size:
                raise LimitError(
                    f"caches of {k.size} and {v.size} bytes do not hold whole rows of {row} bytes (16 or a multiple), as many of K as of V"
                )
        self._slots = min((k.size // row for k, _, row in self._layers), default=0)
        self._job: Buffer | None = None
        self._plan: Plan | None = None

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue: for each (source, target) in list order, row `target` becomes row `source` as it is by then.

        A path that moves to lower slots therefore arrives whole when it is listed from its root. Raises LimitError for a slot
        outside the caches; nothing has moved then.
        """
        for source, target in pairs:
            if not (0 <= source < self._slots and 0 <= target < self._slots):
                raise LimitError(f"cannot move slot {source} to slot {target}: the caches have {self._slots} slots")
        for start in range(0, len(pairs), MAX_MOVES):
            self._run(pairs[start : start + MAX_MOVES])

    def _run(self, pairs: Sequence[tuple[int, int]]) -> None:
        """One write and one run: a `copy` a row would cost 40 us on the cpu device, and on webgpu two commands by way of a third buffer."""
        device = self._device
        if self._plan is None or self._job is None:
            self._job = step = device.create_buffer(4 * (16 + 8 * MAX_MOVES), "slot moves")
            self._plan = device.compile_plan(
                [
                    Launch(
                        device.compile(template("move_slots", width=row // 4, bucket=MAX_MOVES)), {"step": step, "k_cache": k, "v_cache": v}
                    )
                    for k, v, row in self._layers
                ]
            )
        words = [len(pairs), *_HEADER, *[0] * 10]
        for source, target in pairs:
            words += [source, NONE, 0, target, 0, 0, 0, 0]
        device.write(self._job, 0, struct.pack(f"<{len(words)}I", *words))
        self._plan.run()

    def close(self) -> None:
        """Free the list's buffer; the caches stay."""
        if self._job is not None:
            self._job.destroy()
        self._job = self._plan = None
