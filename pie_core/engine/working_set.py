"""WorkingSet: one sequence's state, a frozen prefix and a writable buffer over shared KV pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import EngineError, InvalidState, OutOfPages
from pie_core.engine.order import Ordered
from pie_core.engine.pages import PageOwner, PagePool
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.recipe import Recipe
from pie_core.engine.recurrent import RecurrentState

if TYPE_CHECKING:
    from pie_core.engine.forward import Pass
    from pie_core.engine.pipeline import Pipeline
    from pie_core.engine.predict import Guess

EVERYTHING = 1 << 62


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def _cut(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The parts of `spans` in front of `length`."""
    return [(start, min(end, length)) for start, end in spans if start < length]


class WorkingSet:
    """`length` tokens, of which the first `frozen` never change again; the rest is the buffer. `pages` is the page table.

    `length` counts every token whose pass was scheduled; it is the only statement of KV length on the host. Passes that
    were scheduled ahead and turn out cancelled give their tokens back when the step is read (`restore`).
    `recipe` says what the tokens are; full frozen pages that it covers are named in the cache once their step was read
    (`publish`), up to token `public`. A paused set has given its pages back and is computed again before its next pass.
    Public operations are ordered after the passes accepted before them (`order`); a fault in one that nobody awaits is kept
    in `error` and raised by the next use.
    """

    __slots__ = (
        "_birth",
        "_cache",
        "_owner",
        "_pool",
        "_root",
        "born",
        "chain",
        "cuts",
        "dropped",
        "error",
        "fail_until",
        "fork_points",
        "frozen",
        "guess",
        "hits",
        "inherited",
        "last_step",
        "leaving",
        "length",
        "named",
        "number",
        "order",
        "pages",
        "parents",
        "paused",
        "pipe",
        "public",
        "recipe",
        "reuse",
        "shared",
        "state",
        "used_at",
        "writers",
        "writing",
    )

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        owner: PageOwner,
        root: bytes,
        number: int = 0,
        *,
        born: bool = True,
        state: RecurrentState | None = None,
        reuse: bool = True,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._owner = owner
        self._root = root
        self.number = number  # grows with each set made
        self.order = Ordered()
        self.pages: list[int] = []
        self.frozen = 0
        self.length = 0
        self.parents: list[int] | None = None  # in the buffer, where it is a tree; None: each token follows the one before
        self.recipe = Recipe()
        self.state = state  # of a model that has recurrent state
        self.chain: list[bytes] = []  # names of the leading full pages, as far as anybody asked
        self.cuts = 0  # times that tokens were taken away
        self.named = 0  # leading pages that `publish` is done with
        self.public = EVERYTHING  # pages of tokens behind this one get no name
        self.reuse = reuse  # whether its passes may use cached pages, and others its pages
        self.hits: list[tuple[int, int]] = []  # [from, to) of the tokens that cached pages brought
        self.paused = False
        self.used_at = 0.0  # when a pass was last accepted or answered
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

    @property
    def cached(self) -> int:
        """Tokens that nobody computed for this set: pages of earlier passes held them."""
        return sum(end - start for start, end in self.hits)

    def tree(self) -> list[int]:
        """The parent of each buffered token: an index in the buffer, -1 for the end of the frozen prefix."""
        return self.parents if self.parents is not None else list(range(-1, self.buffered - 1))

    def grow(self, parents: Sequence[int]) -> None:
        """`parents` are those of tokens that are about to be appended to the buffer."""
        self.parents = [*self.tree(), *parents]

    def steady(self) -> bool:
        """Whether nothing accepted is still to happen to the set, and nothing has failed."""
        return self.born and self.error is None and not self.inherited and self.order.idle

    def tail_is_shared(self) -> bool:
        """Whether the partial last page belongs to others too."""
        return bool(self.length % PAGE_TOKENS) and self._pool.refs(self.pages[self.length // PAGE_TOKENS]) > 1

    def tail_is_kept(self) -> bool:
        """Whether the partial last page must not be written as it is: others have it, or may ask for what it holds."""
        return self.tail_is_shared() or (bool(self.length % PAGE_TOKENS) and self._pool.named(self.pages[self.length // PAGE_TOKENS]))

    def pages_needed(self, tokens: int) -> int:
        """Pages to allocate before `tokens` more can be written, one of them for the copy of a shared partial page."""
        need = pages_for(self.length + tokens) - len(self.pages)
        if tokens and self.tail_is_shared():
            need += 1
        return need

    def reserve(self, tokens: int, copy_page: Callable[[int, int], None]) -> None:
        """Make room for `tokens` more: own the partial last page and allocate the others. The caller has checked the pool."""
        pool, owner = self._pool, self._owner
        if tokens and self.tail_is_kept():
            at = self.length // PAGE_TOKENS
            old = self.pages[at]
            if pool.refs(old) > 1:
                self.pages[at] = pool.allocate(owner)
                pool.release((old,), owner)  # others hold it
                copy_page(old, self.pages[at])
            else:
                self._cache.forget(old)
        for _ in range(pages_for(self.length + tokens) - len(self.pages)):
            self.pages.append(pool.allocate(owner))

    # --- pages of others

    def names(self, pages: int, ids: Sequence[int] = ()) -> list[bytes]:
        """The names of the first `pages` full pages once `ids` follow what the set holds. The recipe covers it all (`recipe.known`)."""
        chain, full = self.chain, self.length // PAGE_TOKENS
        if len(chain) < min(pages, full):
            self._cache.extend(chain, self._root, self.recipe.ids, min(pages, full))
        if pages <= full:
            return chain[:pages]
        longer = chain[:full]
        self._cache.extend(longer, self._root, [*self.recipe.ids, *ids], pages)
        return longer

    def attach(self, pages: Sequence[int], ids: Sequence[int], *, freeze: bool) -> None:
        """Continue on shared `pages`, which hold the tokens from the start of the partial last page to the end of `ids`."""
        at = self.length // PAGE_TOKENS
        old = self.pages[at:]
        self._pool.share(pages, self._owner)
        self.pages[at:] = pages
        self._pool.release(old, self._owner)
        self.hits.append((self.length, self.length + len(ids)))
        self.advance(len(ids), freeze=freeze)
        self.recipe.extend(ids)

    def publish(self, length: int) -> None:
        """The first `length` tokens are on the device: name the full pages that may be shared."""
        if not self.reuse:
            return
        pages = min(length, self.length, self.frozen, self.recipe.known, self.public) // PAGE_TOKENS
        if pages > self.named:
            names = self.names(pages)
            for at in range(self.named, pages):
                self._cache.publish(names[at], self.pages[at])
            self.named = pages

    # --- pausing

    def may_pause(self) -> bool:
        """Whether the pages can be given back now: nothing writes to them, and the recipe covers them, so that they can be computed
        again, or nobody may use them any more."""
        if self.paused or not self.length or self.leaving or self.dropped or not self.born or self.writing or self.guess is not None:
            return False
        if not all(w.ended for w in (*self.writers, *self.inherited)):
            return False
        if self.state is not None and self.buffered:
            return False  # computing it again folds every token
        self.failure(0)  # learns of what it inherited
        useless = self.error is not None and self.fail_until is None
        return useless or self.recipe.known >= self.length

    def pause(self) -> None:
        """Give every page back; `length` and `frozen` stay as they are."""
        pages, self.pages = self.pages, []
        self.paused = True
        self.named = 0
        if self.state is not None:
            self.state.clear()
        self._pool.release(pages, self._owner)

    def resume(self, again: WorkingSet) -> None:
        """Take the pages of `again`, which holds the same tokens, and maybe more than this set still has."""
        if self.state is not None and again.state is not None:
            if again.length != self.length:
                return  # cut meanwhile, and folded is folded: the next pass asks once more
            self.state.become(again.state)
        pages, again.pages = again.pages, []
        again.length = again.frozen = 0
        keep = pages_for(self.length)
        self.pages = pages[:keep]
        self.last_step = again.last_step
        self.named = min(again.named, self.length // PAGE_TOKENS)
        self.paused = False
        self._pool.release(pages[keep:], self._owner)

    def written_by(self, work: Pass) -> None:
        """`work` starts to extend the set."""
        self.writers = [w for w in self.writers if not w.ended]
        self.writers.append(work)

    def advance(self, tokens: int, *, freeze: bool) -> None:
        """Count `tokens` as written; `freeze` moves the frozen prefix along."""
        self.length += tokens
        if freeze:
            self.frozen = self.length

    def append(self, ids: Sequence[int] | None, n: int, *, plain: bool, freeze: bool) -> None:
        """Count `n` tokens as written: `ids`, or (None) what a channel holds; `plain` ones see everything before them."""
        self.advance(n, freeze=freeze)
        if plain and ids is not None:
            self.recipe.extend(ids)
        else:
            self.recipe.extend_unknown(n, pending=plain)

    def restore(self, length: int, frozen: int) -> None:
        """Cut back to `length` tokens, `frozen` of them frozen."""
        self.length, self.frozen = length, frozen
        self.cuts += 1
        self.fork_points = {p for p in self.fork_points if p <= length}
        if self.parents is not None:
            del self.parents[length - frozen :]
            self.parents = self.parents or None
        if length <= self.public:
            self.public = EVERYTHING
        self._trim()
        self.paused = self.paused and length > 0
        if self.state is not None and not self.state.cut(length):
            self.pause()

    def fork_into(self, child: WorkingSet, *, buffer: bool) -> None:
        """Let `child` share this prefix (and the buffer when asked). No device work: a partial page is copied at first write."""
        length = self.length if buffer else self.frozen
        child.paused, child.used_at = self.paused, self.used_at
        child.pages = self.pages[: pages_for(length)]
        child.recipe = self.recipe.copy(length)
        child.chain = self.chain[: length // PAGE_TOKENS]
        child.named, child.public = min(self.named, length // PAGE_TOKENS), self.public
        child.hits = _cut(self.hits, length)
        self._pool.share(child.pages, child._owner)
        if child.state is not None and self.state is not None:
            child.state.become(self.state, length)
        child.length, child.frozen = length, self.frozen
        child.parents = list(self.parents) if buffer and self.parents is not None else None
        child.last_step = self.last_step  # a copy of the partial page must come after the step that writes the parent's tokens
        child.fork_points = {length}
        child.inherited = [w for w in (*self.inherited, *self.writers) if not w.ended]
        self.fork_points.add(length)
        child.be_born()

    def reopen(self, pages: list[int] | None, length: int, frozen: int, parents: Sequence[int] | None, recipe: Recipe) -> None:
        """Be a set that was saved: with `pages` that hold it, or None: to be computed again from `recipe` before its next pass."""
        self.pages = pages or []
        self.paused = pages is None and length > 0
        self.length, self.frozen, self.recipe = length, frozen, recipe
        self.parents = list(parents) if parents is not None else None
        self.public = 0 if pages else self.public  # what a file says is not shared with others
        self.fork_points = {length}

    def be_born(self) -> None:
        """The fork has happened (or failed, see `error`): operations that waited for it run."""
        self.born = True
        self.order.leave(self._birth)

    def commit(self, n: int) -> None:
        """Freeze the first `n` buffered tokens. Raises InvalidState."""
        self._check_buffer("commit", n)
        if self.parents is not None and n:
            for k, parent in enumerate(self.parents):
                if parent != k - 1 if k < n else parent < n - 1:
                    raise InvalidState(
                        f"commit({n}): the buffer is a tree, and its token {k} does not continue the {min(k, n)} before it (its parent is "
                        f"{parent}): commit a path of indices instead, or discard what branches off",
                        parent=parent,
                    )
            self.parents = [parent - n for parent in self.parents[n:]] or None
        self.frozen += n

    def commit_path(
        self, path: Sequence[int], copy_page: Callable[[int, int], None], move_slots: Callable[[Sequence[tuple[int, int]]], None]
    ) -> None:
        """Freeze the buffered tokens of `path`, indices in the buffer from a root to a leaf, and drop the others. Their rows move to the
        slots that follow the prefix: a token's position is its depth, so that it fits there. Raises InvalidState, OutOfPages."""
        parents, before = self.tree(), -1
        for k, at in enumerate(path):
            if not 0 <= at < len(parents):
                raise InvalidState(f"commit: path[{k}] = {at} is not in the buffer of {len(parents)} tokens", buffered=len(parents))
            if parents[at] != before:
                raise InvalidState(
                    f"commit: path[{k}] = {at} does not follow {'the frozen prefix' if before < 0 else f'token {before}'}: "
                    f"its parent is {parents[at]}",
                    parent=parents[at],
                )
            before = at
        moved = [(self.frozen + at, self.frozen + k) for k, at in enumerate(path) if at != k]
        if moved:
            self._own(sorted({target // PAGE_TOKENS for _, target in moved}), copy_page)
            pages = self.pages
            move_slots([(pages[a // PAGE_TOKENS] * PAGE_TOKENS + a % PAGE_TOKENS, pages[b // PAGE_TOKENS] * PAGE_TOKENS + b % PAGE_TOKENS)
                        for a, b in moved])  # fmt: skip
            known = moved[0][1]  # behind it the recipe speaks of other tokens
            self.recipe.cut(known)
            self.recipe.extend_unknown(self.frozen + len(path) - known, pending=False)
            self.chain = self.chain[: known // PAGE_TOKENS]
        end = self.frozen + len(path)
        self.restore(end, end)

    def discard(self, n: int | None = None) -> None:
        """Drop the last `n` buffered tokens, or all of them. Raises InvalidState."""
        n = self.buffered if n is None else n
        self._check_buffer("discard", n)
        self.restore(self.length - n, self.frozen)

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
        if self.state is not None and 0 < length < self.state.at and self.recipe.known < length:
            raise InvalidState(
                f"truncate({length}): the recurrent state is folded to {self.state.at} tokens, which cannot be undone, and only the first "
                f"{self.recipe.known} are known by their ids to compute it again: use the fork that was made there",
                folded=self.state.at,
            )
        self.restore(length, min(self.frozen, length))

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
        if self.state is not None:
            self.state.clear()
        self._pool.release(pages, self._owner)

    def _trim(self) -> None:
        self.recipe.cut(self.length)
        del self.chain[self.length // PAGE_TOKENS :]
        self.hits = _cut(self.hits, self.length)
        self.named = min(self.named, self.length // PAGE_TOKENS)
        keep = pages_for(self.length)
        if keep < len(self.pages):
            extra = self.pages[keep:]
            del self.pages[keep:]
            self._pool.release(extra, self._owner)

    def _own(self, places: Sequence[int], copy_page: Callable[[int, int], None]) -> None:
        """Make the pages at `places` of the table ones that may be written. Raises OutOfPages; nothing has changed then."""
        pool, owner = self._pool, self._owner
        shared = [at for at in places if pool.refs(self.pages[at]) > 1]
        room = min(pool.free, owner.max_pages - owner.pages)
        if len(shared) > room:
            raise OutOfPages(
                f"commit: {len(shared)} pages of the path are shared with a fork and must be copied, and {max(0, room)} are free",
                needed=len(shared),
                free=room,
            )
        for at in places:
            old = self.pages[at]
            if at in shared:
                self.pages[at] = pool.allocate(owner)
                pool.release((old,), owner)  # others hold it
                copy_page(old, self.pages[at])
            elif pool.named(old):
                self._cache.forget(old)

    def _check_buffer(self, verb: str, n: int) -> None:
        if not 0 <= n <= self.buffered:
            raise InvalidState(f"{verb}({n}): the buffer of the working set holds {self.buffered} tokens", buffered=self.buffered)
