"""A buffer on the WebGPU device and the checks of a byte range in it."""

from __future__ import annotations

from typing import Any

from pie_core.device.protocol import DeviceError


class WebGpuBuffer:
    """`size` bytes as asked for; the raw buffer is rounded up to 16 bytes so that it can be viewed as vec4."""

    __slots__ = ("label", "raw", "size")

    def __init__(self, raw: Any, size: int, label: str) -> None:
        self.raw = raw
        self.size = size
        self.label = label

    def destroy(self) -> None:
        """Free the memory; work already enqueued still completes."""
        self.raw.destroy()

    def __repr__(self) -> str:
        return f"<WebGpuBuffer {self.label!r} {self.size} bytes>"


def check_range(buffer: WebGpuBuffer, offset: int, size: int, doing: str) -> None:
    """Raise DeviceError unless [offset, offset + size) lies in the buffer and both are multiples of 4."""
    if offset % 4 or size % 4:
        raise DeviceError(f"cannot {doing} buffer {buffer.label!r}: offset {offset} and size {size} must be multiples of 4 bytes")
    if offset < 0 or size < 0 or offset + size > buffer.size:
        raise DeviceError(f"cannot {doing} buffer {buffer.label!r}: bytes {offset}..{offset + size} are outside its {buffer.size} bytes")
