"""Saved working sets: their pages are read back from the device and kept under a name, and fill fresh pages when they are opened."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import (
    BudgetExceeded,
    EngineError,
    InvalidState,
    OutOfPages,
    PassFailed,
    SavedSetMismatch,
    SavedSetsFull,
    UnknownSavedSet,
)
from pie_core.engine.recipe import Recipe
from pie_core.engine.working_set import WorkingSet, pages_for

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.loop import Engine

_logger = logging.getLogger(__name__)

_SETTLING = 0.002  # seconds between looks at passes that are about to settle
MEMORY_CAP = 256 << 20  # bytes of sets that are kept in memory
READING_CAP = 1 << 30  # bytes of all sets that are being saved
AT_ONCE = 8  # saves and opens of one instance
OPENED = "this working set could not be opened"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
Sink = Callable[[int | None, EngineError | None], None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a working set was: lengths in tokens, `parents` of a buffer that is a tree, the recipe, and the bytes of its pages in the
    order of the table (none where the recipe alone tells how to compute them)."""

    length: int
    frozen: int
    parents: tuple[int, ...] | None
    ids: tuple[int, ...]
    known: int
    kv: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it takes, about."""
        return len(self.kv) + 8 * len(self.ids) + 256


class SetStore(Protocol):
    """Where snapshots are kept, by tenant and name. One tenant never sees another's."""

    async def put(self, tenant: str, name: str, snapshot: Snapshot) -> None:
        """Keep it, instead of an earlier one of this name. Raises SavedSetsFull."""
        ...

    async def get(self, tenant: str, name: str) -> Snapshot:
        """Raises UnknownSavedSet, SavedSetMismatch, SavedSetDamaged."""
        ...


class MemoryStore:
    """Within the process only: at most `cap` bytes, those not used for longest go first."""

    def __init__(self, cap: int = MEMORY_CAP) -> None:
        self._cap = cap
        self._bytes = 0
        self._sets: OrderedDict[tuple[str, str], Snapshot] = OrderedDict()

    async def put(self, tenant: str, name: str, snapshot: Snapshot) -> None:
        """Keep it. Raises SavedSetsFull when it alone is over the cap."""
        check_size(name, snapshot.nbytes, self._cap)
        before = self._sets.pop((tenant, name), None)
        self._bytes += snapshot.nbytes - (before.nbytes if before is not None else 0)
        self._sets[tenant, name] = snapshot
        while self._bytes > self._cap:
            _, gone = self._sets.popitem(last=False)
            self._bytes -= gone.nbytes

    async def get(self, tenant: str, name: str) -> Snapshot:
        """Raises UnknownSavedSet."""
        snapshot = self._sets.get((tenant, name))
        if snapshot is None:
            raise unknown(name)
        self._sets.move_to_end((tenant, name))
        return snapshot


def check_name(name: object) -> str:
    """The name of a saved set, if it is one. Raises InvalidState."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidState(f"a saved set cannot be named {name!r:.120}: use 1 to 100 letters, digits, '_', '-' and '.', not '.' first")
    return name


def check_size(name: str, size: int, cap: int) -> None:
    """Raises SavedSetsFull when a set of `size` bytes can never be kept."""
    if size > cap:
        raise SavedSetsFull(f"the working set {name!r} takes {size} bytes, all saved ones together may have {cap}", needed=size, cap=cap)


def unknown(name: str) -> UnknownSavedSet:
    """The error of a name that nothing is kept under."""
    return UnknownSavedSet(f"no working set is saved as {name!r}: it never was, or it had to make room for later ones")


class _Name:
    """A name under which sets are being saved: how many, and the place in the order of acceptance of the one that is kept."""

    __slots__ = ("name", "saves", "stored", "writing")

    def __init__(self, name: str) -> None:
        self.name = name
        self.saves = 0
        self.stored = -1
        self.writing = asyncio.Lock()


class SavedSets:
    """Saves and opens the working sets of one engine. Reads, files and writes go on beside the steps."""

    def __init__(self, engine: Engine, store: SetStore) -> None:
        self._engine = engine
        self._store = store
        self._reading = 0  # bytes of pages that are on their way from the device to the store
        self._names: dict[tuple[str, str], _Name] = {}  # those of saves that were asked for and have not ended, by tenant and name
        self._tasks: set[asyncio.Task[int]] = set()
        self._cause: EngineError | None = None  # of the end

    async def close(self, cause: EngineError) -> None:
        """End what goes on; whoever waits gets `cause`."""
        self._cause = cause
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def save(self, instance: Instance, ws: WorkingSet, name: str, sink: Sink) -> None:
        """Keep what `ws` is after the passes accepted so far; `sink` gets its tokens, or the error. Of several saves under one name,
        the one asked for last is kept, whichever is ready first. Raises InvalidState."""
        key = instance.tenant, name
        saved = self._names.setdefault(key, _Name(name))
        saved.saves += 1

        def leave() -> None:
            saved.saves -= 1
            if not saved.saves:
                del self._names[key]

        def ended(n: int | None, error: EngineError | None) -> None:
            leave()
            sink(n, error)

        try:
            instance.ask(ws, lambda seq: self._save(instance, ws, seq, saved, ended), ended)
        except EngineError:
            leave()
            raise

    def _save(self, instance: Instance, ws: WorkingSet, seq: int, saved: _Name, sink: Sink) -> None:
        """Keep what `ws` is now: the pages are read as they are at this call. `seq`: when it was asked for."""
        if not self._may_begin(instance, len(ws.pages), sink):
            return
        recipe, length, pages = ws.recipe, ws.length, list(ws.pages)
        if ws.state is not None:  # its slot is not read back: the ids are kept, and the set is computed again
            if ws.buffered or recipe.known < length:
                sink(
                    None,
                    InvalidState(
                        f"save: of the {length} tokens {ws.buffered} are buffered and {recipe.known} known by their ids; with recurrent "
                        "state a set is saved by its ids: commit or discard the buffer, and use no window, mask or unread device tokens"
                    ),
                )
                return
            pages = []
        parents = tuple(ws.parents) if ws.parents is not None else None
        empty = Snapshot(length, ws.frozen, parents, tuple(recipe.ids), recipe.known, b"")
        behind = list(ws.inherited)  # passes in flight when it was forked: their failure is its own
        try:
            reading = self._engine.runner.read_pages(pages) if pages else None  # a paused set has a recipe instead
        except DeviceError as error:
            sink(None, _told(error))
            return

        async def keep() -> int:
            kv = await reading if reading is not None else b""
            while not all(work.ended for work in behind):  # read on the device, not settled here
                await asyncio.sleep(_SETTLING)
            failed = ws.failure(seq)
            if failed is not None:
                raise failed
            kept = Snapshot(empty.length, empty.frozen, empty.parents, empty.ids, empty.known, kv)
            async with saved.writing:
                if saved.stored < seq:  # else it would have been replaced already
                    await self._store.put(instance.tenant, saved.name, kept)
                    saved.stored = seq
            return length

        self._go(instance, keep(), len(pages), sink)

    def open(self, instance: Instance, ws: WorkingSet, name: str, sink: Sink) -> None:
        """Make `ws`, not born yet, what was saved as `name`; `sink` gets its tokens. A fault is every use's of the set."""

        def refuse(error: EngineError | None) -> None:
            if error is not None:
                ws.fail(error, OPENED)
            ws.be_born()
            sink(None, error)

        async def fill() -> int:
            try:
                snapshot = await self._store.get(instance.tenant, name)
                if not ws.dropped:
                    self._fill(instance, ws, name, snapshot)
            except Exception as error:
                cause = _told(error)
                ws.fail(cause, OPENED)
                raise cause.again() from error
            finally:
                if not ws.dropped:
                    ws.be_born()
            return snapshot.length

        if self._may_begin(instance, 0, lambda _, error: refuse(error)):
            self._go(instance, fill(), 0, sink)

    def _fill(self, instance: Instance, ws: WorkingSet, name: str, snapshot: Snapshot) -> None:
        engine = self._engine
        pool, runner, length = engine.pool, engine.runner, snapshot.length
        need = pages_for(length)
        covered = snapshot.known >= length and snapshot.parents is None
        beyond = length > engine.limits.context and need <= pool.total  # of this model; what only the pool cannot hold is told below
        if beyond or (snapshot.kv and len(snapshot.kv) != need * runner.page_bytes) or not (snapshot.kv or covered):
            raise SavedSetMismatch(
                f"the working set {name!r} of {length} tokens and {len(snapshot.kv)} bytes was saved from another model: pages of this one "
                f"have {runner.page_bytes} bytes, its context {engine.limits.context} tokens"
            )
        room = min(pool.free, instance.max_pages - instance.pages)
        if need > room and (not covered or need > min(pool.total, instance.max_pages)):
            raise OutOfPages(f"the working set {name!r} needs {need} KV pages, {max(0, room)} are free", needed=need, free=room)
        if snapshot.kv and need <= room:
            pages = [pool.allocate(instance) for _ in range(need)]
            ws.reopen(pages, length, snapshot.frozen, snapshot.parents, Recipe(snapshot.ids, snapshot.known))
            runner.write_pages(pages, snapshot.kv)
        else:  # to be computed again, like a set that was paused
            ws.reopen(None, length, snapshot.frozen, None, Recipe(snapshot.ids, snapshot.known))

    def _may_begin(self, instance: Instance, pages: int, sink: Sink) -> bool:
        """Whether one more may go on beside the others; else `sink` is told why not."""
        size = pages * self._engine.runner.page_bytes
        if instance.busy >= AT_ONCE:
            sink(None, BudgetExceeded(f"{instance.busy} saves and opens go on, the most is {AT_ONCE}: await some first", limit=AT_ONCE))
        elif self._reading and self._reading + size > READING_CAP:
            sink(None, BudgetExceeded(f"saves of {self._reading} bytes go on, the most is {READING_CAP}: try again in a moment"))
        else:
            return True
        return False

    def _go(self, instance: Instance, work: Coroutine[Any, Any, int], pages: int, sink: Sink) -> None:
        size = pages * self._engine.runner.page_bytes
        instance.busy += 1
        self._reading += size

        def ended(task: asyncio.Task[int]) -> None:
            self._tasks.discard(task)
            instance.busy -= 1
            self._reading -= size
            error: EngineError | None = None
            if task.cancelled():
                error = self._cause or PassFailed("saving or opening a working set was cancelled")
            elif (fault := task.exception()) is not None:
                error = _told(fault)
            sink(None if error is not None else task.result(), error)
            self._engine.poke()

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)


def _told(fault: BaseException) -> EngineError:
    """What whoever awaits a save or an open is told of its fault."""
    if isinstance(fault, EngineError):
        return fault
    if isinstance(fault, DeviceError):
        return PassFailed(f"the device failed to read or write the pages of a saved set: {fault}")
    _logger.error("saving or opening a working set failed", exc_info=fault)  # a fault of our own
    return PassFailed(f"saving or opening a working set failed: {type(fault).__name__}")
