"""The pool of KV pages: reference counts, exact at every moment, and pages that are kept for what they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PageOwner:
    """Who is charged for pages: each page that it references counts once, however many of its working sets share it."""

    __slots__ = ("held", "max_pages")

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.held: dict[int, int] = {}  # page -> references of this owner

    @property
    def pages(self) -> int:
        """Distinct pages that this owner references."""
        return len(self.held)


class PagePool:
    """Pages 0 .. total-1. The device runs in order, so a page that was freed may be reused by any later step at once.

    A *named* page holds content that somebody may ask for (prefix_cache.py). When nobody references it any more it is idle:
    it counts as free, and is taken, the longest idle first, when no blank page is left; `on_evict` hears of it.
    A free page can be lent: it still counts as free, and the pool takes it back when it is needed.
    """

    __slots__ = ("_blank", "_idle", "_lent", "_named", "_refs", "evicted", "on_evict", "shared", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.evicted = 0  # idle pages that were taken
        self.shared = 0  # pages with more than one reference
        self.on_evict: Callable[[int], None] | None = None
        self._blank = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._lent: dict[int, Callable[[], None]] = {}  # how to take each back
        self._named = bytearray(total)
        self._refs = [0] * total

    @property
    def free(self) -> int:
        """Pages that nobody references."""
        return len(self._blank) + len(self._idle) + len(self._lent)

    @property
    def unlent(self) -> int:
        """Free pages that are not lent either."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages with at least one reference."""
        return self.total - self.free

    @property
    def idle(self) -> int:
        """Free pages kept for what they hold."""
        return len(self._idle)

    def refs(self, page: int) -> int:
        """References to `page`."""
        return self._refs[page]

    def named(self, page: int) -> bool:
        """Whether the content of `page` may be asked for, so that it must not be written."""
        return bool(self._named[page])

    def name(self, page: int) -> None:
        """Keep a referenced page for its content."""
        self._named[page] = 1

    def unname(self, page: int) -> None:
        """The content of `page` is not to be kept any more."""
        self._named[page] = 0
        if self._refs[page] == 0 and page in self._idle:
            del self._idle[page]
            self._blank.append(page)

    def allocate(self, owner: PageOwner) -> int:
        """One page with one reference, charged to `owner`. The caller has checked `free`; KeyError otherwise."""
        if not self._blank and not self._idle and self._lent:
            next(iter(self._lent.values()))()
        page = self._take()
        self._refs[page] = 1
        owner.held[page] = 1
        return page

    def lend(self, recall: Callable[[], None]) -> int:
        """A free page; `recall` must give it back (`take_back`). The caller has checked `unlent`."""
        page = self._take()
        self._lent[page] = recall
        return page

    def take_back(self, page: int) -> None:
        """A lent page is free again."""
        del self._lent[page]
        self._blank.append(page)

    def hand_over(self, page: int, owner: PageOwner) -> None:
        """A lent page is allocated to `owner`."""
        del self._lent[page]
        self._refs[page] = 1
        owner.held[page] = 1

    def share(self, pages: Iterable[int], owner: PageOwner) -> None:
        """One more reference of `owner` to each page, which is in use or idle."""
        refs, held = self._refs, owner.held
        for page in pages:
            if refs[page] == 0:
                del self._idle[page]
            refs[page] += 1
            self.shared += refs[page] == 2
            held[page] = held.get(page, 0) + 1

    def release(self, pages: Iterable[int], owner: PageOwner) -> None:
        """One reference of `owner` less to each page; the last one frees it. Later pages are taken earlier when they idle."""
        refs, held = self._refs, owner.held
        for page in reversed(list(pages)):
            mine = held.get(page, 0)
            if mine == 0:
                raise RuntimeError(f"page {page} was released more often than it was shared")
            if mine == 1:
                del held[page]
            else:
                held[page] = mine - 1
            refs[page] -= 1
            self.shared -= refs[page] == 1
            if refs[page] == 0:
                if self._named[page]:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        page, _ = self._idle.popitem(last=False)
        self._named[page] = 0
        self.evicted += 1
        if self.on_evict is not None:
            self.on_evict(page)
        return page
