"""Folders of built files: one process builds while the others wait, damaged results are seen, and only the recent ones are kept."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEEP = 4  # results of one kind; a source tree under work makes a new one for each state of its sources


_SEAL = b"\x00\x2b\x0apie.sha256"  # a custom section of WebAssembly: id, size, name; the digest's 32 bytes end the file


def seal(path: Path) -> None:
    """Append the sha256 of a WebAssembly file to it, as a section that engines pass over. Raises OSError."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(_SEAL + digest)


def sound(path: Path) -> bool:
    """Whether the file is there with the bytes that were sealed."""
    try:
        data = memoryview(path.read_bytes())
    except OSError:
        return False
    end = len(data) - len(_SEAL) - 32
    return end > 0 and data[end:] == _SEAL + hashlib.sha256(data[:end]).digest()


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. Without flock nothing is held: builds are atomic, so that only costs time. Raises OSError."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes, also by a crash
        yield


def prune(folder: Path, pattern: str, keep: int = KEEP) -> None:
    """Remove all but the `keep` newest files and folders that match `pattern`. A file that a process has open stays whole for it."""
    aged: list[tuple[float, Path]] = []
    for path in folder.glob(pattern):
        try:
            aged.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process pruned it
            continue
    for _, path in sorted(aged, reverse=True)[keep:]:
        try:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except PermissionError:  # in use, where the system forbids removing such files: it stays until the next build
            continue
