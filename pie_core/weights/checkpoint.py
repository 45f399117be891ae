"""An open checkpoint: metadata, the table of tensors, and their raw rows streamed from a memory map."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from pie_core.weights.errors import MissingKey, NotReadable, TruncatedFile, WeightsError
from pie_core.weights.formats import require_runnable
from pie_core.weights.gguf import Header, TensorInfo, read_header
from pie_core.weights.metadata import Metadata

if TYPE_CHECKING:
    import mmap

CHUNK_BYTES: Final = 8 << 20


class Checkpoint:
    """A GGUF file. Views from `rows` stay valid until `close()`; one checkpoint may be read from several threads."""

    def __init__(self, data: memoryview, header: Header, source: str, mapping: mmap.mmap | None = None) -> None:
        self._data, self._mapping, self._digest = data, mapping, ""
        self.source = source
        self.metadata: Metadata = header.metadata
        self.tensors: dict[str, TensorInfo] = header.tensors
        self.size = len(data)

    def tensor(self, name: str) -> TensorInfo:
        """The entry of tensor `name`. Raises MissingKey."""
        info = self.tensors.get(name)
        if info is None:
            raise MissingKey(f"{self.source} has no tensor {name!r} (it has {len(self.tensors)} tensors)")
        return info

    def check_runnable(self) -> None:
        """Raise UnsupportedFormat, naming tensor and format, unless devices run every tensor's format."""
        for info in self.tensors.values():
            require_runnable(info.fmt, info.name)

    def rows(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
        """The raw blocks of tensor `name`, in order, as read-only views of whole rows, at most `chunk_bytes` each (at least one row).

        Pages of a chunk are given back to the system when the next one is asked for. Raises MissingKey or UnsupportedFormat at the call.
        """
        info = self.tensor(name)
        require_runnable(info.fmt, name)
        if chunk_bytes < 1:
            raise WeightsError(f"chunk_bytes is {chunk_bytes}, it must be at least 1")
        step = max(1, chunk_bytes // info.row_bytes) * info.row_bytes
        return self._chunks(info.offset, info.offset + info.nbytes, step)

    def _chunks(self, start: int, end: int, step: int) -> Iterator[memoryview]:
        for at in range(start, end, step):
            stop = min(at + step, end)
            yield self._live()[at:stop]
            self._release(at, stop)

    def _live(self) -> memoryview:
        if self._mapping is None and self._data.nbytes == 0:
            raise WeightsError(f"{self.source} was closed")
        return self._data

    def _release(self, start: int, stop: int) -> None:
        """Drop the mapped pages of [start, stop) from resident memory; a later read maps them again."""
        mapping = self._mapping
        if mapping is None or not hasattr(mapping, "madvise"):
            return
        import mmap

        first = start - start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def release(self) -> None:
        """Drop what is resident of the mapped file; it stays readable, later reads map it again."""
        self._release(0, self.size)

    @property
    def sha256(self) -> str:
        """The hex digest of the whole file, computed at the first use (about half a second for 100 MB)."""
        if not self._digest:
            digest = hashlib.sha256()
            for chunk in self._chunks(0, self.size, CHUNK_BYTES):
                digest.update(chunk)
            self._digest = digest.hexdigest()
        return self._digest

    def close(self) -> None:
        """Unmap the file; metadata stays readable, and calling twice is fine. Row views in use keep the map alive until they go."""
        mapping, self._mapping, self._data = self._mapping, None, memoryview(b"")
        if mapping is not None:
            self.metadata.detach()
            try:
                mapping.close()
            except BufferError:  # a caller still holds rows; the map goes with the last of them
                return

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_gguf(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Checkpoint:
    """Open a GGUF file by path (memory-mapped) or from bytes in memory.

    Raises NotReadable, BadHeader, TruncatedFile or UnsupportedFormat before anything larger than the header is touched.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        data = memoryview(source).toreadonly().cast("B")
        return Checkpoint(data, read_header(data, len(data), "the checkpoint"), "the checkpoint")
    import mmap

    path = Path(source)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise TruncatedFile(f"{path.name} is empty")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise NotReadable(f"cannot open {str(path)!r}: {error.strerror or error}") from None
    data = memoryview(mapping)
    return Checkpoint(data, read_header(data, size, path.name), path.name, mapping)
