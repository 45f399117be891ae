"""Read-back: a small pool of mappable buffers, several reads in flight, each awaited on its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from pie_core.device.webgpu_buffer import WebGpuBuffer, check_range

if TYPE_CHECKING:
    from pie_core.device.webgpu import WebGpuDevice

POOLED_BYTES = 4 << 20  # larger staging buffers are freed after use
POOLED_PER_SIZE = 8


async def _nothing() -> bytes:
    return b""


class ReadPool:
    """Staging buffers by power-of-two size."""

    def __init__(self, device: WebGpuDevice) -> None:
        self._device = device
        self._free: dict[int, list[Any]] = {}

    def read(self, buffer: WebGpuBuffer, offset: int, size: int, tail: tuple[Any, int, int] | None = None) -> Coroutine[Any, Any, bytes]:
        """Enqueue the copy NOW, so that later writes cannot be seen, and return a coroutine of the bytes; `tail`, the (raw buffer,
        offset, size) of bytes to add behind them, costs no map of its own."""
        check_range(buffer, offset, size, "read")
        copies = [(buffer.raw, offset, size)] if size else []
        if tail is not None:
            copies.append(tail)
        if not copies:
            return _nothing()
        size = sum(length for _, _, length in copies)
        device = self._device
        capacity = max(256, 1 << (size - 1).bit_length())
        staging = self._take(capacity)
        try:
            filled = 0
            for source, start, length in copies:
                device.encoder().copy_buffer_to_buffer(source, start, staging, filled, length)
                filled += length
            device.flush()
            mapping = staging.map_async(device.map_read, 0, size)
        except device.gpu.GPUError as error:
            staging.destroy()
            raise device.failed(error, f"read {size} bytes of buffer {buffer.label!r}") from error
        return self._finish(staging, mapping, capacity, size, buffer.label)

    async def _finish(self, staging: Any, mapping: Any, capacity: int, size: int, label: str) -> bytes:
        try:
            await mapping
            data = bytes(staging.read_mapped(0, size))
            staging.unmap()
        except (self._device.gpu.GPUError, RuntimeError) as error:  # a failed map is a plain RuntimeError in wgpu-py
            staging.destroy()
            raise self._device.failed(error, f"read {size} bytes of buffer {label!r}") from error
        except BaseException:  # cancelled: the map is still pending, so the buffer cannot serve another read
            staging.destroy()
            raise
        free = self._free.setdefault(capacity, [])
        if capacity <= POOLED_BYTES and len(free) < POOLED_PER_SIZE:
            free.append(staging)
        else:
            staging.destroy()
        return data

    def _take(self, capacity: int) -> Any:
        free = self._free.get(capacity)
        if free:
            return free.pop()
        usage = self._device.gpu.BufferUsage
        return self._device.allocate(capacity, usage.MAP_READ | usage.COPY_DST, "read-back")

    def close(self) -> None:
        """Free the pooled buffers."""
        for free in self._free.values():
            for staging in free:
                staging.destroy()
        self._free.clear()
