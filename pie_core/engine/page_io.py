"""Reads KV pages back from a device and fills pages again: through one staging buffer, a few pages at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from pie_core.device.protocol import PAGE_TOKENS, Buffer, Device

STAGED_BYTES = 4 << 20  # of the staging buffer; at least one page


class PageIO:
    """The (k, v) caches of all layers as pages; `widths[i]` is the number of f32 in a row of layer i. A page's bytes are the K rows
    of layer 0, its V rows, then those of layer 1, and so on."""

    def __init__(self, device: Device, caches: Sequence[tuple[Buffer, Buffer]], widths: Sequence[int]) -> None:
        self._device = device
        self._parts = [(cache, 4 * PAGE_TOKENS * width) for pair, width in zip(caches, widths, strict=True) for cache in pair]
        self.page_bytes = sum(size for _, size in self._parts)
        self._at_once = max(1, STAGED_BYTES // max(1, self.page_bytes))  # a model without attention has nothing in its pages
        self._staging: Buffer | None = None

    def read(self, pages: Sequence[int]) -> Awaitable[bytes]:
        """The bytes of `pages`, one after another, as of everything enqueued before this call. Awaiting raises DeviceError."""
        staging, reads = self._buffer(), []
        for some in self._pieces(pages):
            for at, page in enumerate(some):
                offset = at * self.page_bytes
                for cache, size in self._parts:
                    self._device.copy(cache, page * size, staging, offset, size)
                    offset += size
            reads.append(self._device.read(staging, 0, len(some) * self.page_bytes))
        return _joined(reads)

    def write(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Enqueue: `pages` hold `data`, as `read` gave it. Raises DeviceError; ValueError when the sizes differ."""
        if len(data) != len(pages) * self.page_bytes:
            raise ValueError(f"{len(data)} bytes for {len(pages)} pages of {self.page_bytes} bytes")
        staging, view, start = self._buffer(), memoryview(data), 0
        for some in self._pieces(pages):
            end = start + len(some) * self.page_bytes
            self._device.write(staging, 0, view[start:end])
            for at, page in enumerate(some):
                offset = at * self.page_bytes
                for cache, size in self._parts:
                    self._device.copy(staging, offset, cache, page * size, size)
                    offset += size
            start = end

    def _pieces(self, pages: Sequence[int]) -> list[Sequence[int]]:
        return [pages[at : at + self._at_once] for at in range(0, len(pages), self._at_once)]

    def _buffer(self) -> Buffer:
        if self._staging is None:
            self._staging = self._device.create_buffer(self._at_once * self.page_bytes, "pages")
        return self._staging


async def _joined(reads: Sequence[Awaitable[bytes]]) -> bytes:
    return b"".join([await read for read in reads])
