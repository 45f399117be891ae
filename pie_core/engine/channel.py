"""Channel: a ring of capacity + 1 cells in the device arena, with the host's side of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from pie_core.device.protocol import DeviceError, DeviceLost
from pie_core.engine.arena import Arena
from pie_core.engine.errors import ChannelEmpty, ChannelError, ChannelFull, EngineError, EngineLost, PassFailed
from pie_core.engine.order import Ordered
from pie_core.engine.values import DTYPES, Value, elements, pack_words

if TYPE_CHECKING:
    from pie_core.engine.pipeline import Pipeline

HostRole = Literal["reader", "writer"] | None
Sink = Callable[[Value | None, EngineError | None], None]
WriteArena = Callable[[int, bytes], None]

MAX_CELL_WORDS = 1 << 20
MAX_CAPACITY = 1 << 12


class Channel:
    """Single producer, single consumer. Cells are numbered from 0 on; cell n lives in ring slot n % (capacity + 1).

    `head` is the next cell to take, `tail` the next to put, both counted when a pass is scheduled, so the device never
    searches. The spare slot keeps the cell that a pass scheduled ahead took, until it is known not to be cancelled.
    A host-written cell is reserved when its pass is accepted (`reserved`). Host readers see a cell once its step was read.
    """

    __slots__ = (
        "_arena",
        "_base",
        "_host_cells",
        "_steps",
        "_waiters",
        "_write",
        "capacity",
        "cell_words",
        "closed",
        "dropped",
        "dtype",
        "feeds",
        "gate_word",
        "head",
        "host",
        "order",
        "pending",
        "pipe",
        "poison",
        "promised",
        "reserved",
        "seen",
        "shape",
        "shared",
        "skipped",
        "stops",
        "tail",
        "users",
    )

    def __init__(
        self,
        arena: Arena,
        write: WriteArena,
        dtype: str,
        shape: tuple[int, ...],
        capacity: int,
        *,
        seed: Iterable[int] | None = None,
        host: HostRole = None,
    ) -> None:
        check_channel(dtype, shape, capacity, host)
        self.dtype = dtype
        self.shape = shape
        self.capacity = capacity
        self.host: HostRole = host
        self.cell_words = elements(shape)
        self._arena = arena
        self._write = write
        self.closed = False
        self.dropped = False  # its author has let go of it; the cells are there until nobody needs them (`needed`)
        self.users = 0  # passes accepted and not ended
        self.head = 0
        self.tail = 0
        self.reserved = 0
        self.pending = 0  # puts of passes accepted and not settled
        self.skipped: EngineError | None = None  # of the passes accepted last, what cancelled some that would have put
        self.order = Ordered()  # orders `set` of a host writer against the passes that use the cell it replaces
        self.poison: tuple[int, EngineError] | None = None  # (first bad cell, cause): that cell and all later ones
        self.pipe: Pipeline | None = None
        self.shared = False
        self.stops: Pipeline | None = None  # the pipeline that the first true value ends
        self.promised: dict[int, bool] = {}  # cells that commits made early take when they are read; whether the device needs them no more
        self.gate_word = -1  # arena word that the device sets once it has ended it
        self.feeds = False  # passes take their tokens from here: what is put is read back, for recipes
        self.seen: dict[int, memoryview] = {}  # words of cells not taken yet, as far as the host knows them
        self._steps = [-1] * (capacity + 1)  # step in which each slot was written; -1 for host-written cells
        self._host_cells: deque[Value] = deque()
        self._waiters: deque[tuple[bool, Sink]] = deque()  # (take?, sink)
        words = None if seed is None else pack_words(seed, self.cell_words, f"the seed of a {self.describe()}")
        self._base = arena.allocate(self.words)
        if words is not None:
            try:
                self._store(self._base, words)
            except EngineError:
                arena.release(self._base, self.words)
                raise
            self.see(0, words)
            self.tail = 1

    def describe(self) -> str:
        """dtype and shape, for messages."""
        return f"{self.dtype}{list(self.shape)} channel"

    @property
    def words(self) -> int:
        """Arena words of the ring."""
        return self.cell_words * (self.capacity + 1)

    def offset(self, cell: int) -> int:
        """Arena word offset of cell number `cell`."""
        return self._base + (cell % (self.capacity + 1)) * self.cell_words

    # --- the device's side, called by the scheduler

    @property
    def read_back(self) -> bool:
        """Whether values put by a pass must be copied to the results region."""
        return self.watched or self.feeds

    def may_be_read_back(self, max_tokens: int) -> bool:
        """Whether what is put must be copied there, now or once a pass takes its tokens from here (`max_tokens` at most)."""
        return self.read_back or (self.host is None and self.cell_words <= max_tokens and self.dtype in ("i32", "u32"))

    @property
    def watched(self) -> bool:
        """Whether somebody on the host waits for the values that passes put."""
        return self.host == "reader" or self.stops is not None

    def see(self, cell: int, words: bytes | memoryview) -> None:
        """The host knows what cell number `cell` holds; the oldest is forgotten when there are more than the ring has."""
        seen = self.seen
        seen[cell] = memoryview(words).cast("B").cast("I")
        if len(seen) > self.capacity + 1:
            del seen[min(seen)]

    def full_for(self, step: int) -> bool:
        """Whether a pass of `step` can take or read the front cell: it exists and an earlier step wrote it."""
        return self.tail > self.head and self._steps[self.head % (self.capacity + 1)] < step

    def room(self) -> bool:
        """Whether a pass can put. A host reader's cells count until the host takes them, or has promised to (`promise`); the stop
        watcher alone never fills a ring."""
        if self.tail - self.head < self.capacity or (self.stops is not None and self.host is None):
            return True
        if not self.promised:
            return False
        needed = min((cell for cell, counted in self.promised.items() if not counted), default=self.tail)
        return self.tail - self.head - len(self.promised) < self.capacity and self.tail - needed <= self.capacity

    def next_take(self) -> int:
        """The number of the cell that a take of the host's gets that asks now."""
        return self.head + sum(1 for take, _ in self._waiters if take)

    def promise(self, cell: int, *, counted: bool = False) -> None:
        """A commit takes cell number `cell` as soon as it is read; `counted`: no later step needs it on the device."""
        self.promised[cell] = counted

    def keep_promise(self, cell: int) -> None:
        """The commit is settled, or never happened."""
        self.promised.pop(cell, None)

    def step_of(self, cell: int) -> int:
        """The step in which cell number `cell` is written, one of the last that the ring holds."""
        return self._steps[cell % (self.capacity + 1)]

    def predictable(self, pipe: Pipeline) -> bool:
        """Whether only passes of `pipe` put and take here (the host may take), and their cells are good."""
        if self.pipe is not pipe or self.shared or self.closed or self.dropped:
            return False
        return self.host != "writer" and self.stops is None and self.poison is None

    def add_gate(self) -> None:
        """Become a stop channel: with a word that gates latch in, and cells that say no until a pass says yes. Raises ArenaFull."""
        self.gate_word = self._arena.allocate(1)
        self._store(self.gate_word, bytes(4))
        self._store(self._base, bytes(4 * self.words))

    def produce(self, step: int) -> int:
        """The number of the cell that a pass of `step` puts."""
        cell = self.tail
        self._steps[cell % (self.capacity + 1)] = step
        self.tail = cell + 1
        return cell

    def poisoned_at(self, cell: int) -> EngineError | None:
        """The cause when cell number `cell` holds nothing usable."""
        return self.poison[1] if self.poison is not None and cell >= self.poison[0] else None

    def refusal(self, cell: int) -> EngineError | None:
        """Why a pass cannot take or put cell number `cell`: it comes behind one that failed."""
        cause = self.poisoned_at(cell)
        return cause.told_later(f"an earlier value of the {self.describe()} failed", "make a new channel") if cause is not None else None

    def fail_from(self, cell: int, cause: EngineError) -> None:
        """Poison cell number `cell` and all later ones; whoever waits for them gets `cause`."""
        if self.poison is None or cell < self.poison[0]:
            self.poison = (cell, cause.kept())
        self._settle_waiters()

    # --- the host's side

    def put(self, words: Iterable[int]) -> None:
        """Write the next cell. Raises ChannelFull, ChannelError."""
        self._require("writer", "put")
        data = pack_words(words, self.cell_words, f"put into a {self.describe()}")
        if not self.room():
            raise ChannelFull(
                f"put: the ring holds {self.tail - self.head} of {self.capacity} cells; await a pass that takes one, or raise the capacity",
                capacity=self.capacity,
            )
        self._store(self.offset(self.tail), data)
        self.see(self.tail, data)
        self._steps[self.tail % (self.capacity + 1)] = -1
        self.tail += 1

    def set(self, words: Iterable[int]) -> None:
        """Replace the front cell that no accepted pass takes (put when there is none). Which one that is, is settled now; passes accepted
        so far still read what it held, so it is written once they are submitted, and those accepted later wait for that."""
        self._require("writer", "set")
        data = pack_words(words, self.cell_words, f"set of a {self.describe()}")
        cell = self.reserved
        fresh = cell == self.tail
        self.tail += fresh

        def replace() -> None:
            if self.closed:
                return
            try:
                self._store(self.offset(cell), data)
            except EngineError as error:  # who called `set` may be gone: whoever uses the cell is told
                self.fail_from(cell, error)
            self.see(cell, data)
            if fresh:
                self._steps[cell % (self.capacity + 1)] = -1

        self.order.run(replace)

    def reserve(self, *, take: bool) -> int:
        """The host-written cell that a pass accepted now will use. Raises ChannelEmpty."""
        if self.reserved >= self.tail:
            raise ChannelEmpty(
                f"the pass {'takes' if take else 'reads'} a cell of a host-written {self.describe()}, "
                "but every cell put so far is spoken for: put one before submit"
            )
        cell = self.reserved
        if take:
            self.reserved += 1
        return cell

    def receive(self, take: bool, sink: Sink) -> None:
        """Give `sink` the front value (removed when `take`), now or when a pass has put it. Raises ChannelError, ChannelEmpty."""
        self._require("reader", "take" if take else "read")
        self._waiters.append((take, sink))
        self._settle_waiters()

    def deliver(self, value: Value) -> None:
        """A value that a settled pass put, in order."""
        if self.host == "reader":
            self._host_cells.append(value)
            self._settle_waiters()
        else:
            self.head += 1  # only the stop watcher looks at it

    def expect(self) -> None:
        """A pass was accepted that puts."""
        self.pending += 1
        self.skipped = None

    def settled(self) -> None:
        """A put that was accepted is settled or cancelled."""
        self.pending -= 1
        self._settle_waiters()

    def drop(self) -> None:
        """Its author lets go of it, and will take no more: values that only takes of the host would make room for are gone."""
        self.dropped = True
        self._settle_waiters()

    @property
    def needed(self) -> bool:
        """Whether something accepted so far still has to do with it: passes, takes and commits of the host, a pipeline that it stops."""
        if self.users or self._waiters or self.promised:
            return True
        return self.stops is not None and self.stops in self.stops.instance.pipelines

    def close(self, cause: EngineError) -> None:
        """Give the cells back; waiting host takes get `cause`."""
        if self.closed:
            return
        self.closed = True
        self._arena.release(self._base, self.words)
        if self.gate_word >= 0:
            self._arena.release(self.gate_word, 1)
        waiters, self._waiters = self._waiters, deque()
        for _, sink in waiters:
            sink(None, cause)
        self.order.end()
        self.stops = self.pipe = None

    # --- inside

    def _store(self, word: int, data: bytes) -> None:
        """Write words of the arena. Raises EngineLost, PassFailed."""
        try:
            self._write(word, data)
        except DeviceLost as error:
            raise EngineLost(f"the device was lost: {error}") from error
        except DeviceError as error:
            raise PassFailed(f"the device failed to write a {self.describe()}: {type(error).__name__}: {error}") from error

    def _settle_waiters(self) -> None:
        waiters, cells = self._waiters, self._host_cells
        while waiters and cells:
            take, sink = waiters.popleft()
            value = cells[0]
            if take:
                cells.popleft()
                self.head += 1
            sink(value, None)
        if self.dropped and not waiters:
            self.head += len(cells)
            cells.clear()
        while waiters and not cells:
            cause = self.poisoned_at(self.head)
            if cause is None and self._reachable(len(waiters)):
                return
            _, sink = waiters.pop()
            empty = f"no submitted pass puts the value that this take of a {self.describe()} waits for"
            sink(None, cause or self.skipped or ChannelEmpty(empty))

    def _reachable(self, waiters: int) -> bool:
        reads = sum(1 for take, _ in self._waiters if not take)
        return self.pending > 0 and waiters - reads <= self.pending

    def _require(self, role: HostRole, verb: str) -> None:
        if self.closed:
            raise ChannelError(f"{verb}: the channel is closed")
        if self.host != role:
            what = "device-only" if self.host is None else f"host-{self.host}"
            raise ChannelError(f"{verb} on a {what} {self.describe()}; create it with host={role!r}")


def check_channel(dtype: str, shape: tuple[int, ...], capacity: int, host: str | None) -> None:
    """Raises ChannelError naming the wrong field."""
    if dtype not in DTYPES:
        raise ChannelError(f"channel dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    if len(shape) > 4 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ChannelError(f"channel shape {list(shape)} needs at most 4 extents, each >= 1")
    if elements(shape) > MAX_CELL_WORDS:
        raise ChannelError(f"a channel cell of shape {list(shape)} has {elements(shape)} elements; the most is {MAX_CELL_WORDS}")
    if not isinstance(capacity, int) or not 1 <= capacity <= MAX_CAPACITY:
        raise ChannelError(f"channel capacity {capacity!r} must be 1 .. {MAX_CAPACITY}")
    if host not in (None, "reader", "writer"):
        raise ChannelError(f"channel host role {host!r} must be 'reader', 'writer' or null")
