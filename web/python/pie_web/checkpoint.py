"""PageCheckpoint: a checkpoint behind a ByteSource. Only its header enters Python; tensors pass as JavaScript arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pie_core.weights.checkpoint import Checkpoint
from pie_core.weights.errors import TruncatedFile, WeightsError
from pie_core.weights.gguf import Header, read_header
from pie_web.js_bytes import JsBytes

FIRST_PREFIX: Final = 4 << 20  # holds the header of a vocabulary of about 50,000 tokens and its merges
LONGEST_HEADER: Final = 64 << 20


class PageCheckpoint(Checkpoint):
    """`source` has `size`, `read(offset, size)` and `close()` (web/src/model/source.ts); the page checked its sha256 when it came."""

    def __init__(self, source: Any, name: str) -> None:
        super().__init__(memoryview(b""), _header(source, name), name)
        self._source = source
        self.size = int(source.size)

    def _chunks(self, start: int, end: int, step: int) -> Iterator[JsBytes]:  # type: ignore[override]  # what devices here take
        for at in range(start, end, step):
            yield JsBytes(self._source.read(at, min(step, end - at)))

    @property
    def sha256(self) -> str:
        """Never computed here. Raises WeightsError."""
        raise WeightsError("the page hashes a model while it downloads, not in Python")

    def close(self) -> None:
        """Give the file back; metadata stays readable."""
        self._source.close()


def _header(source: Any, name: str) -> Header:
    """The header, from a prefix that grows until it holds all of it. Raises BadHeader, TruncatedFile, UnsupportedFormat."""
    size = int(source.size)
    length = min(FIRST_PREFIX, size)
    while True:
        try:
            return read_header(memoryview(source.read(0, length).to_bytes()), size, name)
        except TruncatedFile:
            if length >= min(size, LONGEST_HEADER):
                raise
            length = min(2 * length, size, LONGEST_HEADER)
