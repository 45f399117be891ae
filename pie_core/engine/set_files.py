"""Saved working sets as files: one a set, checked against model and layout, whole or not there, the longest unused go first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pie_core.engine.errors import SavedSetDamaged, SavedSetMismatch, SavedSetsFull
from pie_core.engine.saved_sets import Snapshot, check_size, unknown

DISK_CAP = 8 << 30  # bytes of all files
_MAGIC = b"PIE-SET1"
_SUFFIX = ".pieset"
_HEAD_BYTES = 64 << 20  # most of a header: ids of the longest context
T = TypeVar("T")


class FileStore:
    """Snapshots in `folder`. `model` identifies the weights (a sha256) and whatever else decides what KV rows mean.

    A file: magic, length of the header (u64, little endian), header (JSON), pages, sha256 of all that. Its name is a hash of tenant and
    name, so that no name reaches outside the folder and nobody's key can be read from it. `sync` writes through to the disk.
    """

    def __init__(self, folder: Path, model: str, *, cap: int = DISK_CAP, run: Callable[..., Any] = asyncio.to_thread) -> None:
        self._folder = folder
        self._model = model
        self._cap = cap
        self._run = run

    async def put(self, tenant: str, name: str, snapshot: Snapshot) -> None:
        """Write it, then let the longest unused files go. Raises SavedSetsFull."""
        await self._run(self._write, tenant, name, snapshot)

    async def get(self, tenant: str, name: str) -> Snapshot:
        """Raises UnknownSavedSet, SavedSetMismatch, SavedSetDamaged."""
        snapshot: Snapshot = await self._run(self._read, tenant, name)
        return snapshot

    def path(self, tenant: str, name: str) -> Path:
        """Where the set is, or would be."""
        return self._folder / (hashlib.sha256(json.dumps([tenant, name]).encode()).hexdigest() + _SUFFIX)

    # --- in a thread of its own

    def _write(self, tenant: str, name: str, snapshot: Snapshot) -> None:
        head = json.dumps(
            {
                "model": self._model, "owner": _digest(tenant), "name": name, "length": snapshot.length, "frozen": snapshot.frozen,
                "parents": snapshot.parents, "ids": snapshot.ids, "known": snapshot.known, "bytes": len(snapshot.kv),
            }
        ).encode()  # fmt: skip
        start = _MAGIC + len(head).to_bytes(8, "little") + head
        digest = hashlib.sha256(start)
        digest.update(snapshot.kv)
        size = len(start) + len(snapshot.kv) + digest.digest_size
        check_size(name, size, self._cap)
        path, part = self.path(tenant, name), None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(size, but=path)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                part = Path(file.name)
                file.write(start)
                file.write(snapshot.kv)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            if part is not None:
                part.unlink(missing_ok=True)
            raise SavedSetsFull(
                f"the working set {name!r} of {size} bytes could not be written: {error.strerror or error}", needed=size
            ) from None

    def _make_room(self, size: int, but: Path) -> None:
        found = [(entry.stat().st_mtime_ns, entry.stat().st_size, entry) for entry in self._folder.glob("*" + _SUFFIX) if entry != but]
        total = size + sum(length for _, length, _ in found)
        for _, length, entry in sorted(found):
            if total <= self._cap:
                return
            entry.unlink(missing_ok=True)
            total -= length

    def _read(self, tenant: str, name: str) -> Snapshot:
        path = self.path(tenant, name)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now
        except FileNotFoundError:
            raise unknown(name) from None
        except OSError as error:
            raise SavedSetDamaged(f"the working set {name!r} cannot be read: {error.strerror or error}") from None
        body = memoryview(data)[:-32]
        at = len(_MAGIC) + 8
        if len(data) < at + 32 or body[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[-32:]:
            raise SavedSetDamaged(f"the file of the working set {name!r} is damaged: save it again")
        size = int.from_bytes(body[len(_MAGIC) : at], "little")
        head = json.loads(bytes(body[at : at + min(size, _HEAD_BYTES)]))
        if head["owner"] != _digest(tenant) or head["name"] != name:
            raise unknown(name)
        if head["model"] != self._model:
            raise SavedSetMismatch(f"the set {name!r} was saved from another model: {head['model']:.16}, this one is {self._model:.16}")
        kv = bytes(body[at + size :])
        parents = tuple(head["parents"]) if head["parents"] is not None else None
        return Snapshot(head["length"], head["frozen"], parents, tuple(head["ids"]), head["known"], kv)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
