"""Times of steps on a device that answers a clock in queue order (the cpu device)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pie_core.device.protocol import Buffer, Device, Times

Clock = Callable[[], Awaitable[float]]  # device seconds spent on all that was enqueued before the call


class ClockTimer:
    """`StepTimer` by a clock that is asked around the parts of each step."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._marks: list[Awaitable[float]] = []

    def start(self) -> None:
        """A step begins."""
        self._marks = [self._clock()]

    def epilogues(self) -> None:
        """Its epilogues begin."""
        self._marks.append(self._clock())

    def read(self, buffer: Buffer, offset: int, size: int) -> Awaitable[tuple[bytes, Times | None]]:
        """`Device.read` with the times of the step. Awaiting raises DeviceError."""
        marks, self._marks = [*self._marks, self._clock()], []
        return _timed(self._device.read(buffer, offset, size), marks)


async def _timed(read: Awaitable[bytes], marks: Sequence[Awaitable[float]]) -> tuple[bytes, Times | None]:
    """`marks`: before the step, behind its body and head, behind its epilogues."""
    times = None
    try:
        data = await read
    finally:  # marks are awaited in any case: the errors of a device that failed would be reported as never retrieved
        start, middle, end = await asyncio.gather(*marks, return_exceptions=True)
    if isinstance(start, float) and isinstance(middle, float) and isinstance(end, float):
        times = (end - start, end - middle)
    return data, times
