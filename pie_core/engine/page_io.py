"""Reads KV pages back from a device and fills pages again: through one staging buffer, with few copies where pages are neighbours."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence

from pie_core.device.protocol import PAGE_TOKENS, Buffer, Device

STAGED_BYTES = 4 << 20  # of the staging buffer; at least one page of one cache
Copy = tuple[Buffer, int, int, int]  # cache, offset in it, offset in the staging buffer, bytes


class PageIO:
    """The (k, v) caches of all layers as pages; `widths[i]` is the number of f32 in a row of layer i.

    The bytes of a list of pages: the K rows of layer 0 of all pages in their order, then its V rows, then those of layer 1, and so on.
    """

    def __init__(self, device: Device, caches: Sequence[tuple[Buffer, Buffer]], widths: Sequence[int]) -> None:
        self._device = device
        self._parts = [(cache, 4 * PAGE_TOKENS * width) for pair, width in zip(caches, widths, strict=True) for cache in pair]
        self.page_bytes = sum(size for _, size in self._parts)
        self._capacity = max((STAGED_BYTES, *(size for _, size in self._parts)))  # a model without attention has no parts
        self._staging: Buffer | None = None

    def read(self, pages: Sequence[int]) -> Awaitable[bytes]:
        """The bytes of `pages` as of everything enqueued before this call. Awaiting raises DeviceError."""
        staging, reads = self._buffer(), []
        for copies, size in self._pieces(pages):
            for cache, offset, at, length in copies:
                self._device.copy(cache, offset, staging, at, length)
            reads.append(self._device.read(staging, 0, size))
        return _joined(reads)

    def write(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Enqueue: `pages` hold `data`, as `read` gave it of as many. Raises DeviceError; ValueError when the sizes differ."""
        if len(data) != len(pages) * self.page_bytes:
            raise ValueError(f"{len(data)} bytes for {len(pages)} pages of {self.page_bytes} bytes")
        staging, view, start = self._buffer(), memoryview(data), 0
        for copies, size in self._pieces(pages):
            self._device.write(staging, 0, view[start : start + size])
            for cache, offset, at, length in copies:
                self._device.copy(staging, at, cache, offset, length)
            start += size

    def _pieces(self, pages: Sequence[int]) -> Iterator[tuple[list[Copy], int]]:
        """(copies, bytes) of each filling of the staging buffer."""
        copies: list[Copy] = []
        at = 0
        for cache, size in self._parts:
            for first, count in runs(pages):
                done = 0
                while done < count:
                    n = min(count - done, (self._capacity - at) // size)
                    if n == 0:
                        yield copies, at
                        copies, at = [], 0
                        continue
                    copies.append((cache, (first + done) * size, at, n * size))
                    done += n
                    at += n * size
        if copies:
            yield copies, at

    def _buffer(self) -> Buffer:
        if self._staging is None:
            self._staging = self._device.create_buffer(self._capacity, "pages")
        return self._staging


def runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, number) of each stretch of pages that follow each other."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found


async def _joined(reads: Sequence[Awaitable[bytes]]) -> bytes:
    return b"".join([await read for read in reads])
