"""Which folders of the page are in use: a process that serves one holds it, and builds of other checkouts remove only what nobody holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

REMOVED = "pie-removed-"  # a folder on its way out has another name: nobody finds half of one


class Held:
    """A folder that is in use until `close`, or until this process ends, however it ends. A context manager."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        self.folder, self._descriptor = folder, descriptor

    def touch(self) -> None:
        """Used just now: where locks are not to be had, this keeps the folder."""
        with contextlib.suppress(OSError):  # a cache that is complete may be read-only
            os.utime(self.folder)

    def close(self) -> None:
        """The folder may be removed from now on. Twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def hold(folder: Path) -> Held | None:
    """Mark `folder` as used now and for as long as it is held; None when it is not there (any more).

    The lock is a shared flock of the folder itself: no file is added, and a read-only cache will do. Where the system or the file system
    has none, the time of last use (`touch`) is all that protects the folder.
    """
    held = _lock(folder)
    if held is not None:
        held.touch()
    return held


def _lock(folder: Path) -> Held | None:
    if sys.platform == "win32":
        return Held(folder, None) if folder.is_dir() else None
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:  # its files may be readable by name still
        return Held(folder, None)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a removal that has begun
        if _is(folder, descriptor):
            return Held(folder, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def prune_unheld(folder: Path, pattern: str, keep: int) -> None:
    """Remove all but the `keep` folders that were used last of those that match `pattern`, except where a process holds one."""
    for left in folder.glob(f"{REMOVED}*"):  # by a process that was killed meanwhile
        shutil.rmtree(left, ignore_errors=True)
    aged: list[tuple[float, Path]] = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process pruned it
            aged.append((path.stat().st_mtime, path))
    for _, path in sorted(aged, reverse=True)[keep:]:
        with contextlib.suppress(FileNotFoundError, PermissionError), _unheld(path) as free:  # stays until the next build
            if free:
                gone = folder / f"{REMOVED}{os.getpid()}-{path.name}"
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _unheld(path: Path) -> Iterator[bool]:
    """Whether nobody holds the folder; while this lasts, nobody begins to. Raises OSError."""
    if sys.platform == "win32":
        yield True
        return
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks: nobody can hold it
            free = True
        yield free
    finally:
        os.close(descriptor)


def _is(folder: Path, descriptor: int) -> bool:
    """Whether the open folder is still the one at this path."""
    try:
        there = folder.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
