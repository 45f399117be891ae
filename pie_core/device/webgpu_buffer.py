"""A buffer on the WebGPU device and the checks of a byte range in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pie_core.device.protocol import DeviceError


class WebGpuBuffer:
    """`size` bytes as asked for; the raw buffer is rounded up to 16 bytes so that it can be viewed as vec4.

    A submission that names a destroyed buffer ends the process in wgpu-native, so the state is kept here and checked first.
    """

    __slots__ = ("_released", "destroyed", "label", "raw", "size")

    def __init__(self, raw: Any, size: int, label: str, released: Callable[[], None]) -> None:
        self.raw = raw
        self.size = size
        self.label = label
        self.destroyed = False
        self._released = released

    def destroy(self) -> None:
        """Free the memory; work already enqueued still completes. Repeating it does nothing."""
        if not self.destroyed:
            self._released()  # submits recorded commands, which may name this buffer
            self.destroyed = True
            self.raw.destroy()

    def __repr__(self) -> str:
        return f"<WebGpuBuffer {self.label!r} {self.size} bytes>"


def check_alive(buffers: Iterable[WebGpuBuffer], doing: str) -> None:
    """Raise DeviceError when one of the buffers was destroyed."""
    for buffer in buffers:
        if buffer.destroyed:
            raise DeviceError(f"cannot {doing}: buffer {buffer.label!r} of {buffer.size} bytes was destroyed")


def check_range(buffer: WebGpuBuffer, offset: int, size: int, doing: str) -> None:
    """Raise DeviceError unless [offset, offset + size) lies in the living buffer and both are multiples of 4."""
    if offset % 4 or size % 4:
        raise DeviceError(f"cannot {doing} buffer {buffer.label!r}: offset {offset} and size {size} must be multiples of 4 bytes")
    if offset < 0 or size < 0 or offset + size > buffer.size:
        raise DeviceError(f"cannot {doing} buffer {buffer.label!r}: bytes {offset}..{offset + size} are outside its {buffer.size} bytes")
    if buffer.destroyed:
        raise DeviceError(f"cannot {doing} buffer {buffer.label!r}: it was destroyed")
