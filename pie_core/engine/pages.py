"""The pool of KV pages: a free list with reference counts, exact at every moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PageOwner:
    """Who is charged for pages. A shared page is charged once, to whoever allocated it, until its last reference goes."""

    __slots__ = ("max_pages", "pages")

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.pages = 0


class PagePool:
    """Pages 0 .. total-1. The device runs in order, so a page that was freed may be reused by any later step at once.

    A free page can be lent: it still counts as free, and the pool takes it back when it is needed.
    """

    __slots__ = ("_free", "_lent", "_owners", "_refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._lent: dict[int, Callable[[], None]] = {}  # how to take each back
        self._refs = [0] * total
        self._owners: list[PageOwner | None] = [None] * total

    @property
    def free(self) -> int:
        """Pages that nobody references."""
        return len(self._free) + len(self._lent)

    @property
    def unlent(self) -> int:
        """Free pages that are not lent either."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with at least one reference."""
        return self.total - self.free

    def refs(self, page: int) -> int:
        """References to `page`."""
        return self._refs[page]

    def allocate(self, owner: PageOwner) -> int:
        """One page with one reference, charged to `owner`. The caller has checked `free`; IndexError otherwise."""
        if not self._free and self._lent:
            next(iter(self._lent.values()))()
        page = self._free.pop()
        self._own(page, owner)
        return page

    def lend(self, recall: Callable[[], None]) -> int:
        """A free page; `recall` must give it back (`take_back`). The caller has checked `unlent`."""
        page = self._free.pop()
        self._lent[page] = recall
        return page

    def take_back(self, page: int) -> None:
        """A lent page is free again."""
        del self._lent[page]
        self._free.append(page)

    def hand_over(self, page: int, owner: PageOwner) -> None:
        """A lent page is allocated to `owner`."""
        del self._lent[page]
        self._own(page, owner)

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        refs = self._refs
        for page in pages:
            refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; the last one frees it."""
        for page in pages:
            left = self._refs[page] - 1
            if left < 0:
                raise RuntimeError(f"page {page} was released more often than it was shared")
            self._refs[page] = left
            if left == 0:
                owner = self._owners[page]
                if owner is not None:
                    owner.pages -= 1
                self._owners[page] = None
                self._free.append(page)

    def _own(self, page: int, owner: PageOwner) -> None:
        self._refs[page] = 1
        self._owners[page] = owner
        owner.pages += 1
