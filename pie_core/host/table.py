"""The guest's side of its handles: what the port must know to refuse a wrong op at the call."""

from __future__ import annotations

from typing import TypeVar

from pie_core.eta.program import Program
from pie_core.host.budget import Budget, Refusal, over


class SetEntry:
    """A working set. `buffered` is the most its buffer can hold, None when a truncate made that unknown,
    or the set was opened. `most`: (tokens that it held at most, passes submitted by then), None where it is not known."""

    __slots__ = ("buffered", "most")
    kind = "working set"

    def __init__(self, buffered: int | None = 0, most: tuple[int, int] | None = None) -> None:
        self.buffered = buffered
        self.most = most


class PipeEntry:
    """A pipeline."""

    __slots__ = ("stops",)
    kind = "pipeline"

    def __init__(self) -> None:
        self.stops = False


class ChannelEntry:
    """A channel. Of a host writer: `puts` and `reserved` by submitted passes are counted in the guest's thread, `consumed` and
    `returned` (of cancelled passes) on the engine's loop."""

    __slots__ = ("capacity", "cell_words", "consumed", "dtype", "host", "put_by_pass", "puts", "reserved", "returned", "shape", "stops")
    kind = "channel"

    @property
    def words(self) -> int:
        """Of the ring, which has a cell more than its capacity."""
        return self.cell_words * (self.capacity + 1)

    def __init__(self, dtype: str, shape: tuple[int, ...], cell_words: int, capacity: int, *, host: str | None, seeded: bool) -> None:
        self.dtype = dtype
        self.shape = shape
        self.cell_words = cell_words
        self.capacity = capacity
        self.host = host
        self.puts = int(seeded)
        self.reserved = 0
        self.consumed = 0
        self.returned = 0
        self.put_by_pass = False
        self.stops = False


class ProgramEntry:
    """A verified program."""

    __slots__ = ("program",)
    kind = "program"

    def __init__(self, program: Program) -> None:
        self.program = program


class FutureEntry:
    """A future that has not settled."""

    __slots__ = ()
    kind = "future"


Entry = SetEntry | PipeEntry | ChannelEntry | ProgramEntry | FutureEntry
E = TypeVar("E", SetEntry, PipeEntry, ChannelEntry, ProgramEntry)
FUTURE = FutureEntry()


class Table:
    """All ids of one instance. Entries are added and used in the guest's thread; only futures leave it from the engine's loop.
    `cell_words`: of all channels' rings."""

    __slots__ = ("_budget", "_by_id", "cell_words", "handles", "programs")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._by_id: dict[int, Entry] = {}
        self.handles = 0
        self.programs = 0
        self.cell_words = 0

    def fresh(self, op: str, key: int) -> None:
        """Refuses an id that is taken."""
        entry = self._by_id.get(key)
        if entry is not None:
            raise Refusal("UsageError", f"{op}: id {key} is taken by a {entry.kind}; ids are unique within the instance")

    def add(self, op: str, key: int, entry: Entry) -> None:
        """Enter a new handle. Refuses a taken id and a used-up budget."""
        self.fresh(op, key)
        if isinstance(entry, ProgramEntry):
            if self.programs >= self._budget.programs:
                raise over("programs", self.programs, self._budget.programs,
                           "each new shape of an epilogue is one: submit passes before tracing more, or pad to one length")  # fmt: skip
            self.programs += 1
        elif not isinstance(entry, FutureEntry):
            if self.handles >= self._budget.handles:
                raise over("handles", self.handles, self._budget.handles, "let go of working sets, pipelines and channels")
            self.handles += 1
        self._by_id[key] = entry

    def get(self, op: str, key: int, kind: type[E]) -> E:
        """The entry of `key`. Refuses an id that is unknown, dropped or of another kind."""
        entry = self._by_id.get(key)
        if isinstance(entry, kind):
            return entry
        what = f"is a {entry.kind}" if entry is not None else "is unknown, or was dropped"
        raise Refusal("UsageError", f"{op}: id {key} {what}; a {kind.kind} is needed")

    def remove(self, key: int) -> None:
        """A handle was dropped."""
        entry = self._by_id.pop(key, None)
        if isinstance(entry, ProgramEntry):
            self.programs -= 1
        elif entry is not None:
            self.handles -= 1
            if isinstance(entry, ChannelEntry):
                self.cell_words -= entry.words

    def settle(self, future: int) -> None:
        """A future settled."""
        self._by_id.pop(future, None)

    def outstanding(self, future: int) -> bool:
        """Whether `future` was announced and has not settled."""
        return isinstance(self._by_id.get(future), FutureEntry)
