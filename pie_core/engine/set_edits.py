"""Edits of a working set: what is committed, discarded and cut. Who calls them has ordered them after the passes before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import InvalidState, OutOfPages
from pie_core.engine.set_tokens import SetTokens, branching


class ShortOfPages(Exception):
    """An edit has to copy what lies at `places` of the page table and finds too few free pages now; nothing has changed."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(f"{len(places)} pages to copy")
        self.places = places


class SetEdits(SetTokens):
    """What authors may change of the tokens of a set. An edit that raises has changed nothing."""

    __slots__ = ()

    def commit(self, n: int) -> None:
        """Freeze the first `n` buffered tokens. Raises InvalidState."""
        self.check_commit(n)
        if self.parents is not None and n:
            self.parents = branching([parent - n for parent in self.parents[n:]])
        self.frozen += n

    def check_commit(self, n: int) -> None:
        """Raises the InvalidState of `commit`."""
        self._check_buffer("commit", n)
        for k, parent in enumerate(self.parents or ()) if n else ():
            if parent != k - 1 if k < n else parent < n - 1:
                raise InvalidState(
                    f"commit({n}): the buffer is a tree, and its token {k} does not continue the {min(k, n)} before it (its parent is "
                    f"{parent}): commit a path of indices instead, or discard what branches off",
                    parent=parent,
                )

    def commit_path(
        self, path: Sequence[int], copy_page: Callable[[int, int], None], move_slots: Callable[[Sequence[tuple[int, int]]], None]
    ) -> None:
        """Freeze the buffered tokens of `path`, indices in the buffer from a root to a leaf, and drop the others. Their rows move to the
        slots that follow the prefix: a token's position is its depth, so that it fits there. Raises InvalidState, OutOfPages where
        the owner may never have as many pages, ShortOfPages where they are missing now."""
        self.check_path(path)
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

    def check_path(self, path: Sequence[int]) -> None:
        """Raises the InvalidState of `commit_path`."""
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

    def discard(self, n: int | None = None) -> None:
        """Drop the last `n` buffered tokens, or all of them. Raises InvalidState."""
        n = self.buffered if n is None else n
        self.check_discard(n)
        self.restore(self.length - n, self.frozen)

    def check_discard(self, n: int) -> None:
        """Raises the InvalidState of `discard`."""
        self._check_buffer("discard", n)

    def truncate(self, length: int) -> None:
        """Cut back to `length`: inside the buffer, or to a length or frozen prefix at which it was made or forked. Raises InvalidState."""
        self.check_truncate(length)
        self.restore(length, min(self.frozen, length))

    def check_truncate(self, length: int) -> None:
        """Raises the InvalidState of `truncate`."""
        if length > self.length:
            raise InvalidState(f"truncate({length}) is past the end: the working set has {self.length} tokens", length=self.length)
        if length < self.frozen and length not in self.fork_points:
            points = ", ".join(map(str, sorted(p for p in self.fork_points if p < self.frozen)))
            buffer = f" to {self.length}" if self.buffered else ""
            raise InvalidState(
                f"truncate({length}) cuts into the frozen prefix of {self.frozen} tokens; allowed: {self.frozen}{buffer}"
                + (f", or where it was made or forked: {points}" if points else ""),
                frozen=self.frozen,
            )
        if self.state is not None and 0 < length < self.state.at and self.recipe.known < length:
            raise InvalidState(
                f"truncate({length}): the recurrent state is folded to {self.state.at} tokens, which cannot be undone, and only the first "
                f"{self.recipe.known} are known by their ids to compute it again: use the fork that was made there",
                folded=self.state.at,
            )

    def shared_at(self, places: Sequence[int]) -> list[int]:
        """The pages at `places` of the table that others hold too."""
        return [page for page in (self.pages[at] for at in places) if self._pool.refs(page) > 1]

    def _own(self, places: Sequence[int], copy_page: Callable[[int, int], None]) -> None:
        """Make the pages at `places` of the table ones that may be written. Raises OutOfPages, ShortOfPages; nothing has changed then."""
        pool, owner = self._pool, self._owner
        need = len(self.shared_at(places))
        if owner.max_pages < pool.total and owner.pages + need > owner.max_pages:
            raise OutOfPages(
                f"commit: {need} pages of the path are shared with a fork and must be copied; the instance holds {owner.pages} KV pages, "
                f"its limit is {owner.max_pages}",
                needed=need,
                held=owner.pages,
                limit=owner.max_pages,
            )
        if need > pool.free:
            raise ShortOfPages(places)
        for at in places:
            old = self.pages[at]
            if pool.refs(old) > 1:
                self.pages[at] = pool.allocate(owner)
                pool.release((old,), owner)  # others hold it
                copy_page(old, self.pages[at])
            elif pool.named(old):
                self._cache.forget(old)

    def _check_buffer(self, verb: str, n: int) -> None:
        if not 0 <= n <= self.buffered:
            raise InvalidState(f"{verb}({n}): the buffer of the working set holds {self.buffered} tokens", buffered=self.buffered)
