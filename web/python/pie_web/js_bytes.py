"""JavaScript byte arrays as `device.protocol.HostBytes`: weights pass from a file to a device without entering Python's heap."""

from __future__ import annotations

from typing import Any


class JsBytes:
    """A Uint8Array; slices are views of the same bytes."""

    __slots__ = ("_size", "array")

    def __init__(self, array: Any) -> None:
        self.array = array
        self._size = int(array.byteLength)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> JsBytes:
        start, stop, step = part.indices(self._size)
        if step != 1:
            raise ValueError("bytes of the host are sliced in steps of 1")
        return JsBytes(self.array.subarray(start, max(start, stop)))

    def __bytes__(self) -> bytes:
        data: bytes = self.array.to_bytes()
        return data
