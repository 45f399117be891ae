"""sha256 of large files, remembered for each state of a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from pie_server.build.cpu_module import cache_root
from pie_server.model_download import digest


def file_sha256(path: Path) -> str:
    """The sha256 of a large file, in hex: computed once for each state of it, then remembered under $PIE_CACHE/digests. Raises OSError."""
    path = path.resolve()
    stat = path.stat()
    state = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    memory = cache_root() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not remembered, or not readable: computed again
        known = json.loads(memory.read_bytes())
        if known["state"] == state:
            return str(known["sha256"])
    found = digest(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump({"state": state, "sha256": found}, file)
        os.replace(file.name, memory)
    return found
