"""What a working set holds: tokens, their recipe, and the pages that they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.pages import PageOwner, PagePool
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.recipe import Recipe
from pie_core.engine.recurrent import RecurrentState
from pie_core.engine.slack import Slack

EVERYTHING = 1 << 62


def branching(parents: list[int]) -> list[int] | None:
    """The parents of a buffer that is a tree; None where each token follows the one before, as `SetTokens.parents` has it."""
    return parents if any(parent != k - 1 for k, parent in enumerate(parents)) else None


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def cut_spans(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The parts of `spans` in front of `length`."""
    return [(start, min(end, length)) for start, end in spans if start < length]


def forget_rows(state: RecurrentState, start: int, end: int) -> None:
    """Tokens `start` .. `end` - 1 are gone from a state: they were not folded, and are replayed no more, or a fold behind them skipped
    them, and it stands at fewer tokens."""
    if state.at >= end:
        state.at -= end - start
    else:
        del state.replay[start - state.at : end - state.at]


class SetTokens:
    """`length` tokens, of which the first `frozen` never change again; the rest is the buffer. `pages` is the page table.

    `length` counts every token whose pass was scheduled; it is the only statement of KV length on the host. Where `slack` has something
    pending it is an upper bound, as is `frozen`. `recipe` says what the tokens are; full frozen pages that it covers are named in the
    cache once their step was read (`publish`), up to token `public`.
    """

    __slots__ = (
        "_cache",
        "_owner",
        "_pool",
        "_public",
        "_root",
        "chain",
        "cuts",
        "fork_points",
        "frozen",
        "hits",
        "length",
        "named",
        "pages",
        "parents",
        "paused",
        "recipe",
        "reuse",
        "slack",
        "state",
        "unseen",
    )

    def __init__(
        self, pool: PagePool, cache: PrefixCache, owner: PageOwner, root: bytes, *, state: RecurrentState | None, reuse: bool
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._owner = owner
        self._root = root
        self.pages: list[int] = []
        self.frozen = 0
        self.length = 0
        # (number, length, frozen before it) of the first pass that took ids which neither the host nor a read-out behind it has seen
        self.unseen: tuple[int, int, int] | None = None
        self.parents: list[int] | None = None  # in the buffer, where it is a tree; None: each token follows the one before
        self.recipe = Recipe()
        self.state = state  # of a model that has recurrent state
        self.slack: Slack | None = None  # of a set that was committed by counts on the device
        self.chain: list[bytes] = []  # names of the leading full pages, as far as anybody asked
        self.cuts = 0  # times that tokens were taken away
        self.named = 0  # leading pages that `publish` is done with
        self._public = EVERYTHING
        self.reuse = reuse  # whether its passes may use cached pages, and others its pages
        self.hits: list[tuple[int, int]] = []  # [from, to) of the tokens that cached pages brought
        self.paused = False
        self.fork_points = {0}

    @property
    def public(self) -> int:
        """Pages of tokens behind this one get no name, and none are looked for."""
        return self._public if not self.pending else min(self._public, self.slack.base)  # type: ignore[union-attr]

    @public.setter
    def public(self, tokens: int) -> None:
        self._public = tokens

    @property
    def pending(self) -> bool:
        """Whether the length is an upper bound: a count that only the device knows is to come."""
        return self.slack is not None and bool(self.slack.pending)

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
        self.parents = branching([*self.tree(), *parents])

    def tail_is_shared(self) -> bool:
        """Whether the partial last page belongs to others too."""
        return bool(self.length % PAGE_TOKENS) and self._pool.refs(self.pages[self.length // PAGE_TOKENS]) > 1

    def tail_is_kept(self) -> bool:
        """Whether the partial last page must not be written as it is: others have it, or may ask for what it holds."""
        return self.tail_is_shared() or (bool(self.length % PAGE_TOKENS) and self._pool.named(self.pages[self.length // PAGE_TOKENS]))

    def is_kept(self, page: int) -> bool:
        """Whether others have a page of the set, or may ask for what it holds."""
        return self._pool.refs(page) > 1 or self._pool.named(page)

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

    def pause(self) -> None:
        """Give every page back; `length` and `frozen` stay as they are."""
        pages, self.pages = self.pages, []
        self.paused = True
        self.named = 0
        if self.state is not None:
            self.state.clear()
        self._pool.release(pages, self._owner)

    # --- tokens that come and go

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
        if self.unseen is not None and length <= self.unseen[1]:
            self.unseen = None
        self.length, self.frozen = length, frozen
        if self.slack is not None:
            self.slack.cut(length)
        self.cuts += 1
        self.fork_points = {p for p in self.fork_points if p <= length}
        if self.parents is not None:
            self.parents = branching(self.parents[: length - frozen])
        if length <= self._public:
            self._public = EVERYTHING
        self._trim()
        self.paused = self.paused and length > 0
        if self.state is not None and not self.state.cut(length):
            self.pause()

    def forget(self, start: int, end: int) -> None:
        """The device dropped tokens `start` .. `end` - 1 and wrote what came behind them in their place: count them no more."""
        gone, recipe = end - start, self.recipe
        self.length -= gone
        self.frozen -= gone
        self.cuts += 1
        if self.unseen is not None and self.unseen[1] >= end:
            seq, length, frozen = self.unseen
            self.unseen = seq, length - gone, frozen - gone
        self.fork_points = {p for p in self.fork_points if p <= start}
        if start < self._public < EVERYTHING:
            self._public = max(start, self._public - gone)
        if self.state is not None:
            forget_rows(self.state, start, end)
        del recipe.ids[start:end]
        recipe.known = min(recipe.known, start)
        recipe.fill(start, ())  # counts what is known behind
        del self.chain[start // PAGE_TOKENS :]
        self.hits = cut_spans(self.hits, start)
        self._trim()

    def _trim(self) -> None:
        self.recipe.cut(self.length)
        del self.chain[self.length // PAGE_TOKENS :]
        self.hits = cut_spans(self.hits, self.length)
        self.named = min(self.named, self.length // PAGE_TOKENS)
        keep = pages_for(self.length)
        if keep < len(self.pages):
            extra = self.pages[keep:]
            del self.pages[keep:]
            self._pool.release(extra, self._owner)
