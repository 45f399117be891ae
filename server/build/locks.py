"""A lock between processes, so that a slow build is made once and the others wait for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. Without flock nothing is held: builds are atomic, so that only costs time. Raises OSError."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes, also by a crash
        yield
