"""Checkpoint rows into the cpu device: staged in linear memory piece by piece, repacked there by the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pie_core.device.cpu_kernels import raw_row_bytes, weight_bytes
from pie_core.device.protocol import DeviceError, HostBytes, LimitError, Weight, flat

if TYPE_CHECKING:
    from pie_core.device.cpu import CpuBuffer, CpuDevice

STAGING_BYTES = 1 << 20  # checkpoint bytes repacked at a time


def upload_weight(device: CpuDevice, fmt: str, rows: int, cols: int, chunks: Iterable[memoryview | HostBytes], *, label: str) -> Weight:
    """The [rows, cols] weight in device layout (see `CpuDevice.upload` for errors)."""
    if rows < 1 or cols < 1:
        raise LimitError(f"weight {label!r} is [{rows}, {cols}]; both must be at least 1")
    row_bytes = raw_row_bytes(fmt, cols)
    quants_bytes, scales_bytes = weight_bytes(fmt, rows, cols)
    held: list[CpuBuffer] = []

    def hold(size: int, name: str) -> CpuBuffer:
        held.append(device.create_buffer(size, name))
        return held[-1]

    try:
        quants = hold(quants_bytes, label)
        parts = whole_rows(chunks, rows, row_bytes, label)
        if not scales_bytes:
            for first, part in parts:
                device.write(quants, first * row_bytes, part)
            return Weight(fmt, rows, cols, quants)
        weight = Weight(fmt, rows, cols, quants, hold(scales_bytes, f"{label}.scales"))
        staging = hold(max(STAGING_BYTES // row_bytes, 1) * row_bytes, f"{label}.staging")
        at_once = staging.size // row_bytes
        for first, part in parts:
            count = len(part) // row_bytes
            for start in range(0, count, at_once):
                n = min(at_once, count - start)
                device.write(staging, 0, part[start * row_bytes : (start + n) * row_bytes])
                device.repack(weight, staging, first + start, n)
        staging.destroy()
        return weight
    except BaseException:  # also when the caller's chunks raise
        for buffer in held:
            with suppress(DeviceError):  # a closed device has nothing to give back
                buffer.destroy()
        raise


def whole_rows(
    chunks: Iterable[memoryview | HostBytes], rows: int, row_bytes: int, label: str
) -> Iterator[tuple[int, memoryview | HostBytes]]:
    """(first row, bytes) of each chunk, checked to be whole rows and `rows` of them in all. Raises LimitError."""
    first = 0
    for chunk in chunks:
        part = flat(chunk)
        if len(part) % row_bytes:
            raise LimitError(f"weight {label!r}: a chunk of {len(part)} bytes is not a whole number of rows of {row_bytes} bytes")
        count = len(part) // row_bytes
        if first + count > rows:
            raise LimitError(f"weight {label!r}: chunks hold more than its {rows} rows of {row_bytes} bytes")
        yield first, part
        first += count
    if first != rows:
        raise LimitError(f"weight {label!r}: chunks hold {first} rows of {row_bytes} bytes, the weight has {rows}")
