"""WorkingSet: one sequence's state, a frozen prefix and a writable buffer over shared KV pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import EngineError, InvalidState
from pie_core.engine.order import Ordered
from pie_core.engine.pages import PageOwner, PagePool

if TYPE_CHECKING:
    from pie_core.engine.forward import Pass
    from pie_core.engine.pipeline import Pipeline
    from pie_core.engine.predict import Guess


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class WorkingSet:
    """`length` tokens, of which the first `frozen` never change again; the rest is the buffer. `pages` is the page table.

    `length` counts every token whose pass was scheduled; it is the only statement of KV length on the host. Passes that
    were scheduled ahead and turn out cancelled give their tokens back when the step is read (`restore`).
    Public operations are ordered after the passes accepted before them (`order`); a fault in one that nobody awaits is kept
    in `error` and raised by the next use.
    """

    __slots__ = (
        "_birth",
        "_owner",
        "_pool",
        "born",
        "dropped",
        "error",
        "fail_until",
        "fork_points",
        "frozen",
        "guess",
        "inherited",
        "last_step",
        "leaving",
        "length",
        "order",
        "pages",
        "pipe",
        "shared",
        "writers",
        "writing",
    )

    def __init__(self, pool: PagePool, owner: PageOwner, *, born: bool = True) -> None:
        self._pool = pool
        self._owner = owner
        self.order = Ordered()
        self.pages: list[int] = []
        self.frozen = 0
        self.length = 0
        self.fork_points = {0}
        self.born = born  # False: a fork that its pipeline has not reached yet
        self._birth = -1 if born else self.order.enter()  # operations wait for the fork to happen as they wait for passes
        self.leaving = False  # dropped by its owner, maybe still used by accepted passes
        self.dropped = False
        self.error: EngineError | None = None
        self.fail_until: int | None = None  # passes accepted after this one may use the set again; None: no pass may
        self.writers: list[Pass] = []  # passes scheduled on it, the last ones maybe in flight
        self.inherited: list[Pass] = []  # of the sets it was forked from, in flight at the fork: their failure is its own
        self.writing = False  # a pass of several steps is under way
        self.last_step = -1
        self.guess: Guess | None = None  # writes behind the length (see predict.py)
        self.pipe: Pipeline | None = None  # the first pipeline that used it, and whether another one did too
        self.shared = False

    @property
    def buffered(self) -> int:
        """Tokens in the buffer."""
        return self.length - self.frozen

    def steady(self) -> bool:
        """Whether nothing accepted is still to happen to the set, and nothing has failed."""
        return self.born and self.error is None and not self.inherited and self.order.idle

    def tail_is_shared(self) -> bool:
        """Whether the partial last page belongs to others too."""
        return bool(self.length % PAGE_TOKENS) and self._pool.refs(self.pages[self.length // PAGE_TOKENS]) > 1

    def pages_needed(self, tokens: int) -> int:
        """Pages to allocate before `tokens` more can be written, one of them for the copy of a shared partial page."""
        need = pages_for(self.length + tokens) - len(self.pages)
        if tokens and self.tail_is_shared():
            need += 1
        return need

    def reserve(self, tokens: int, copy_page: Callable[[int, int], None]) -> None:
        """Make room for `tokens` more: own the partial last page and allocate the others. The caller has checked the pool."""
        pool = self._pool
        if tokens and self.tail_is_shared():
            at = self.length // PAGE_TOKENS
            old = self.pages[at]
            new = pool.allocate(self._owner)
            copy_page(old, new)
            self.pages[at] = new
            pool.release((old,))
        for _ in range(pages_for(self.length + tokens) - len(self.pages)):
            self.pages.append(pool.allocate(self._owner))

    def written_by(self, work: Pass) -> None:
        """`work` starts to extend the set."""
        self.writers = [w for w in self.writers if not w.ended]
        self.writers.append(work)

    def advance(self, tokens: int, *, freeze: bool) -> None:
        """Count `tokens` as written; `freeze` moves the frozen prefix along."""
        self.length += tokens
        if freeze:
            self.frozen = self.length

    def restore(self, length: int, frozen: int) -> None:
        """Give back tokens of a cancelled pass."""
        self.length, self.frozen = length, frozen
        self._trim()

    def fork_into(self, child: WorkingSet, *, buffer: bool) -> None:
        """Let `child` share this prefix (and the buffer when asked). No device work: a partial page is copied at first write."""
        length = self.length if buffer else self.frozen
        child.pages = self.pages[: pages_for(length)]
        self._pool.share(child.pages)
        child.length, child.frozen = length, self.frozen
        child.last_step = self.last_step  # a copy of the partial page must come after the step that writes the parent's tokens
        child.fork_points = {length}
        child.inherited = [w for w in (*self.inherited, *self.writers) if not w.ended]
        self.fork_points.add(length)
        child.be_born()

    def be_born(self) -> None:
        """The fork has happened (or failed, see `error`): operations that waited for it run."""
        self.born = True
        self.order.leave(self._birth)

    def commit(self, n: int) -> None:
        """Freeze the first `n` buffered tokens. Raises InvalidState."""
        self._check_buffer("commit", n)
        self.frozen += n

    def discard(self, n: int) -> None:
        """Drop the last `n` buffered tokens. Raises InvalidState."""
        self._check_buffer("discard", n)
        self.length -= n
        self._trim()

    def truncate(self, length: int) -> None:
        """Cut back to `length`: inside the buffer, or to a point at which the set was created or forked. Raises InvalidState."""
        if length > self.length:
            raise InvalidState(f"truncate({length}) is past the end: the working set has {self.length} tokens", length=self.length)
        if length < self.frozen and length not in self.fork_points:
            points = ", ".join(map(str, sorted(self.fork_points)))
            raise InvalidState(
                f"truncate({length}) cuts into the frozen prefix of {self.frozen} tokens; allowed: the buffer, or a fork point ({points})",
                frozen=self.frozen,
            )
        self.restore(length, min(self.frozen, length))
        self.fork_points = {p for p in self.fork_points if p <= length}

    def fail(self, cause: EngineError, until: int | None) -> None:
        """Fail the uses of this set by passes accepted up to number `until` (None: all) with `cause`."""
        if self.error is None or self.fail_until is not None:
            self.error, self.fail_until = cause, until

    def failure(self, seq: int) -> EngineError | None:
        """Why pass number `seq` cannot use the set."""
        if self.inherited:
            for writer in self.inherited:
                if writer.failure is not None:
                    self.fail(writer.failure, None)
            self.inherited = [w for w in self.inherited if not w.ended]
        if self.error is None or (self.fail_until is not None and seq > self.fail_until):
            return None
        return self.error

    def drop(self) -> None:
        """Free every page. Twice is harmless."""
        self.dropped = True
        pages, self.pages = self.pages, []
        self.length = self.frozen = 0
        self._pool.release(pages)

    def _trim(self) -> None:
        keep = pages_for(self.length)
        if keep < len(self.pages):
            extra = self.pages[keep:]
            del self.pages[keep:]
            self._pool.release(extra)

    def _check_buffer(self, verb: str, n: int) -> None:
        if not 0 <= n <= self.buffered:
            raise InvalidState(f"{verb}({n}): the buffer of the working set holds {self.buffered} tokens", buffered=self.buffered)
