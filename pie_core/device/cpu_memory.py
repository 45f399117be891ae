"""Who owns which bytes of the cpu device's linear memory: a first-fit allocator that really frees."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

from pie_core.device.protocol import DeviceOutOfMemory, LimitError

ALIGN = 64  # bytes; a cache line


def align(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


class Allocator:
    """Hands out ranges of [base, limit), aligned to 64 bytes, lowest address first; neighbours that are free merge.

    `used` is the sum of what is handed out, `end` the highest address ever handed out (everything above was never written).
    Safe to use from several threads.
    """

    def __init__(self, base: int, limit: int) -> None:
        self._base = align(base)
        self.limit = limit
        self.used = 0
        self.end = self._base
        self._free: list[tuple[int, int]] = [(self._base, limit // ALIGN * ALIGN - self._base)]  # (address, size), by address
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()  # re-entrant: a finaliser may free in the middle of an allocation

    def allocate(self, size: int, label: str) -> int:
        """Address of `size` bytes. Raises LimitError when size < 1 and DeviceOutOfMemory with the numbers when nothing fits."""
        if size < 1:
            raise LimitError(f"buffer {label!r}: size is {size} bytes; it must be at least 1")
        need = align(size)
        with self._lock:
            for index, (address, room) in enumerate(self._free):
                if room >= need:
                    self._free[index : index + 1] = [(address + need, room - need)] if room > need else []
                    self._sizes[address] = need
                    self.used += need
                    self.end = max(self.end, address + need)
                    return address
            largest = max((room for _, room in self._free), default=0)
        raise DeviceOutOfMemory(
            f"buffer {label!r} needs {need} bytes, but the cpu device has {self.limit - self._base - self.used} of "
            f"{self.limit - self._base} bytes free, the largest piece {largest}: use a smaller model or KV pool"
        )

    def free(self, address: int) -> None:
        """Give back what `allocate` returned."""
        with self._lock:
            size = self._sizes.pop(address)
            self.used -= size
            index = bisect_left(self._free, (address, 0))
            if index < len(self._free) and self._free[index][0] == address + size:
                size += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == address:
                address, before = self._free.pop(index - 1)
                size += before
            insort(self._free, (address, size))
