"""Times of steps by timestamp queries: written by the compute passes of a step, read back in the buffer that carries its results."""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from pie_core.device.protocol import Buffer, Times

if TYPE_CHECKING:
    from pie_core.device.webgpu import WebGpuDevice

SLOTS = 8  # steps that may be in flight (`RunnerLimits.ahead` is 4 at most), each with queries of its own
QUERIES = 4  # of a step: begin and end of body and head, begin and end of the epilogues
QUERY_BYTES = 8
RESOLVE_ALIGN = 256  # bytes; WebGPU's alignment of a resolve's destination
FEATURE = "timestamp-query"


class QueryTimer:
    """`StepTimer` on a device with the feature "timestamp-query"; `period` is the nanoseconds of one tick.

    No pass is added or split: the first pass of each part writes its begin, and every pass of it the end, so that the last one's stays.
    """

    def __init__(self, device: WebGpuDevice, period: float) -> None:
        self._device, self._period = device, period
        try:
            self._queries = device.raw.create_query_set(label="step times", type="timestamp", count=SLOTS * QUERIES)
        except device.gpu.GPUError as error:
            raise device.failed(error, f"create {SLOTS * QUERIES} timestamp queries") from error
        usage = device.gpu.BufferUsage
        self._resolved = device.allocate(SLOTS * RESOLVE_ALIGN, usage.QUERY_RESOLVE | usage.COPY_SRC, "step times")
        self._slot = 0
        self._part = 0  # 0: body and head, 1: epilogues
        self._written = 0  # queries of the step, from its first one on

    def start(self) -> None:
        """A step begins: its passes ask for `writes`."""
        self._slot = (self._slot + 1) % SLOTS
        self._part = self._written = 0
        self._device.timing = self

    def epilogues(self) -> None:
        """The step's epilogues begin."""
        self._part = 1

    def writes(self) -> dict[str, Any]:
        """The `timestamp_writes` of the pass that is recorded next."""
        begin = self._slot * QUERIES + 2 * self._part
        writes = {"query_set": self._queries, "end_of_pass_write_index": begin + 1}
        if self._written <= 2 * self._part:
            writes["beginning_of_pass_write_index"] = begin
            self._written = 2 * self._part + 2
        return writes

    def read(self, buffer: Buffer, offset: int, size: int) -> Coroutine[Any, Any, tuple[bytes, Times | None]]:
        """`Device.read` with the times of the step, in one submission and one map. Raises DeviceError, as awaiting does."""
        device, count, at = self._device, self._written, self._slot * RESOLVE_ALIGN
        device.timing = None
        if not count:  # the step had no passes
            return _untimed(device.read(buffer, offset, size))
        try:
            device.encoder().resolve_query_set(self._queries, self._slot * QUERIES, count, self._resolved, at)
        except device.gpu.GPUError as error:
            raise device.failed(error, f"resolve {count} timestamp queries") from error
        read = device.read(buffer, offset, size, tail=(self._resolved, at, count * QUERY_BYTES))
        return self._split(read, size, count)

    async def _split(self, read: Coroutine[Any, Any, bytes], size: int, count: int) -> tuple[bytes, Times | None]:
        data = await read
        return data[:size], step_times(struct.unpack_from(f"<{count}Q", data, size), self._period)


async def _untimed(read: Coroutine[Any, Any, bytes]) -> tuple[bytes, None]:
    return await read, None


def step_times(ticks: Sequence[int], period: float) -> Times | None:
    """(seconds of the step, of its epilogues) from its begin, the end of body and head and, where it has epilogues, their begin and
    end, in ticks of `period` ns. None where a tick is missing (0) or out of order (the counter wrapped or was reset), and for a step of
    no time at all."""
    begin, middle, end = ticks[0], ticks[1], ticks[-1]
    first = ticks[2] if len(ticks) > 2 else middle
    if not begin or not begin <= min(middle, first) or not max(middle, first) <= end or begin == end:
        return None
    second = period * 1e-9
    # An adapter may note the begin of a pass while the one before still runs: only what is behind it was spent on epilogues.
    return (end - begin) * second, (end - max(middle, first)) * second
