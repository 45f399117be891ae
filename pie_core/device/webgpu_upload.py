"""Weights to the device: raw checkpoint blocks stream through one staging buffer and are repacked by a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pie_core.device.protocol import DeviceError, HostBytes, KernelError, LimitError, Weight, flat
from pie_core.device.webgpu_buffer import WebGpuBuffer
from pie_core.device.webgpu_plan import bind

if TYPE_CHECKING:
    from pie_core.device.webgpu import WebGpuDevice

STAGING_BYTES = 8 << 20  # most raw bytes in one repack
DRAIN_BYTES = 32 << 20  # most bytes enqueued before waiting for the device to take them
BLOCK = 32
# (raw bytes, quant bytes, scale bytes) of a block of 32 weights
QUANTISED = {"q4_1": (20, 16, 4), "q8_0": (34, 32, 4)}
PLAIN = {"f32": 4, "f16": 2}  # bytes a weight


def raw_bytes(fmt: str, rows: int, cols: int, label: str) -> int:
    """Bytes of [rows, cols] in the checkpoint. Raises KernelError for an unknown format or a width that its blocks do not divide."""
    if rows < 1 or cols < 1:
        raise DeviceError(f"tensor {label!r} has shape [{rows}, {cols}]; both sizes must be at least 1")
    if fmt in PLAIN:
        return rows * cols * PLAIN[fmt]
    if fmt not in QUANTISED:
        raise KernelError(f"tensor {label!r} has format {fmt!r}; this device takes {', '.join([*PLAIN, *QUANTISED])}")
    if cols % BLOCK:
        raise KernelError(f"tensor {label!r} has {cols} columns; format {fmt} packs blocks of {BLOCK}")
    return rows * (cols // BLOCK) * QUANTISED[fmt][0]


def pieces(chunks: Iterable[memoryview | HostBytes], unit: int, most: int, expected: int, label: str) -> Iterator[memoryview | HostBytes]:
    """`chunks` cut into pieces of at most `most` bytes at multiples of `unit`. Raises DeviceError when the bytes are not `expected`."""
    step, seen = most - most % unit, 0
    for chunk in chunks:
        view = flat(chunk)
        seen += len(view)
        if len(view) % unit or seen > expected:
            raise DeviceError(f"tensor {label!r}: a chunk of {len(view)} bytes (unit {unit}) brings {seen} of {expected} bytes")
        for start in range(0, len(view), step):
            yield view[start : start + step]
    if seen != expected:
        raise DeviceError(f"tensor {label!r} has {seen} bytes of {expected}; the file is truncated or its shape is wrong")


def _padded(tail: bytes) -> bytes:
    """`tail` with zeros up to a multiple of 4 bytes."""
    return tail + bytes(-len(tail) % 4)


class Uploader:
    """Uploads weights of one device; holds the staging buffer."""

    def __init__(self, device: WebGpuDevice) -> None:
        self._device = device
        self._staging: WebGpuBuffer | None = None
        self._job: WebGpuBuffer | None = None
        self._undrained = 0

    def upload(self, fmt: str, rows: int, cols: int, chunks: Iterable[memoryview | HostBytes], label: str) -> Weight:
        """See Device.upload."""
        expected = raw_bytes(fmt, rows, cols, label)
        if fmt in PLAIN:
            return Weight(fmt, rows, cols, self._plain(fmt, chunks, label, expected))
        quants, scales = self._quantised(fmt, chunks, label, expected)
        return Weight(fmt, rows, cols, quants, scales)

    def _allocate(self, size: int, label: str) -> WebGpuBuffer:
        try:
            return self._device.create_buffer(size, label)
        except LimitError as error:
            raise LimitError(f"{error}. A smaller quantisation of the model would fit, or the cpu device (--device cpu)") from error

    def _plain(self, fmt: str, chunks: Iterable[memoryview | HostBytes], label: str, expected: int) -> WebGpuBuffer:
        quants = self._allocate(expected + -expected % 4, label)
        offset, carry = 0, b""
        for piece in pieces(chunks, PLAIN[fmt], STAGING_BYTES, expected, label):
            # An f16 row of odd width ends inside a word: its half word waits for the next piece.
            data = memoryview(carry + bytes(piece)) if carry else piece
            whole = len(data) - len(data) % 4
            if whole:
                self._device.write(quants, offset, data[:whole])
                offset += whole
            carry = bytes(data[whole:])
            self._drain(len(piece))
        if carry:
            self._device.write(quants, offset, _padded(carry))
        return quants

    def _quantised(
        self, fmt: str, chunks: Iterable[memoryview | HostBytes], label: str, expected: int
    ) -> tuple[WebGpuBuffer, WebGpuBuffer]:
        unit, quant_bytes, scale_bytes = QUANTISED[fmt]
        blocks = expected // unit
        device = self._device
        quants = self._allocate(blocks * quant_bytes, label)
        scales = self._allocate(blocks * scale_bytes, f"{label} scales")
        if self._staging is None or self._job is None:
            self._staging = device.create_buffer(STAGING_BYTES + 64, "upload staging")
            self._job = device.create_buffer(16, "upload job")
        buffers = {"job": self._job, "raw": self._staging, "quants": quants, "scales": scales}
        group, first = None, 0
        for piece in pieces(chunks, unit, STAGING_BYTES, expected, label):
            count = len(piece) // unit
            kernel = device.kernels.repack(fmt, count)
            if group is None:
                group = bind(device, kernel, buffers)
            whole = len(piece) - len(piece) % 4
            device.write(self._staging, 0, piece[:whole] if whole < len(piece) else piece)
            if whole < len(piece):
                device.write(self._staging, whole, _padded(bytes(piece[whole:])))
            device.write(self._job, 0, count.to_bytes(4, "little") + first.to_bytes(4, "little"))
            device.dispatch(kernel, group)
            first += count
            self._drain(len(piece))
        return quants, scales

    def _drain(self, nbytes: int) -> None:
        """Bound the host's staging memory: wait now and then until the device has taken what was written."""
        self._undrained += nbytes
        if self._undrained >= DRAIN_BYTES:
            self._undrained = 0
            self._device.drain()

    def close(self) -> None:
        """Free the staging buffers."""
        for buffer in (self._staging, self._job):
            if buffer is not None:
                buffer.destroy()
        self._staging = self._job = None
