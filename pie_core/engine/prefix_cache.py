"""Page identity: a full page is named by a hash chain over its tenant, the model's layout, its attention and all ids up to its end.

Only what a recipe covers has a name. Names of different tenants never meet (each chain starts from the tenant, under a key drawn
anew for each engine), so that nobody can learn from timing what others asked. The one exception is what the host itself says beforehand
(`open_to_all`): such prefixes have the same names for everyone, and a chain becomes its tenant's own where it leaves them.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS

if TYPE_CHECKING:
    from pie_core.engine.forward import Pass
    from pie_core.engine.pages import PageOwner, PagePool

_DIGEST = 16
PLAIN = b"causal"  # the one attention whose pages have names


class PrefixCache:
    """Names of pages whose content is complete on the device, and claims on names that a pass is computing now."""

    __slots__ = ("_claims", "_key", "_layout", "_names", "_open", "_open_root", "_pages", "_pool")

    def __init__(self, pool: PagePool, layout: str = "") -> None:
        self._pool = pool
        self._key = os.urandom(32)
        self._layout = layout
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._claims: dict[bytes, Pass] = {}
        self._open: set[bytes] = set()  # names that every tenant shares, whether or not their pages are there
        self._open_root = self._hash(repr(("everyone", layout)).encode() + PLAIN)
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._pages)

    def root(self, tenant: str) -> bytes:
        """Where the chains of a tenant start."""
        return self._hash(repr(("tenant", tenant, self._layout)).encode() + PLAIN)

    def open_to_all(self, ids: Sequence[int], pages: int) -> None:
        """From now on the first `pages` full pages of `ids` have one name for all tenants; sets that hold them already keep their own."""
        parent = self._open_root
        for at in range(0, pages * PAGE_TOKENS, PAGE_TOKENS):
            parent = self._hash(parent + _words(ids, at))
            self._open.add(parent)

    def extend(self, chain: list[bytes], root: bytes, ids: Sequence[int], pages: int) -> None:
        """Add names to `chain` until it names the first `pages` full pages of `ids` (all of them >= 0)."""
        at, end = len(chain) * PAGE_TOKENS, pages * PAGE_TOKENS
        if at >= end:
            return
        parent = chain[-1] if chain else root
        if self._open and (not chain or parent in self._open):
            shared = parent if chain else self._open_root
            while at < end and (name := self._hash(shared + _words(ids, at))) in self._open:
                chain.append(name)
                shared, at = name, at + PAGE_TOKENS
            parent = self._hash(root + shared) if chain else root  # what follows is the tenant's own
        for start in range(at, end, PAGE_TOKENS):
            parent = self._hash(parent + _words(ids, start))
            chain.append(parent)

    def _hash(self, text: bytes) -> bytes:
        return blake2b(text, digest_size=_DIGEST, key=self._key).digest()

    # --- pages that are there

    def find(self, name: bytes) -> int | None:
        """The page with this content, in use or idle."""
        return self._pages.get(name)

    def leading(self, names: Sequence[bytes]) -> list[int]:
        """The pages of `names` that are there, up to the first that is not."""
        return [self._pages[name] for name in takewhile(self._pages.__contains__, names)]

    def refresh(self, names: Sequence[bytes], owner: PageOwner) -> None:
        """The pages of `names`, all there, are used now: those that nobody references are the last to make room."""
        pages = self.leading(names)
        self._pool.share(pages, owner)
        self._pool.release(pages, owner)

    def publish(self, name: bytes, page: int) -> None:
        """`page`, in use, holds what `name` says; the first page of a name keeps it."""
        if name not in self._pages and page not in self._names:
            self._pages[name] = page
            self._names[page] = name
            self._pool.name(page)
        self._claims.pop(name, None)

    def forget(self, page: int) -> None:
        """The content of `page` is about to change."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._pages[name]
            self._pool.unname(page)

    def clear(self) -> None:
        """Forget every page that has a name."""
        for page in list(self._names):
            self.forget(page)

    def _evicted(self, page: int) -> None:
        del self._pages[self._names.pop(page)]

    # --- pages that somebody computes

    def claim(self, work: Pass, names: Sequence[bytes]) -> None:
        """`work` will compute these pages, unless somebody else does already."""
        for name in names:
            if name not in self._pages and name not in self._claims:
                self._claims[name] = work
                work.claims.append(name)

    def claimed(self, name: bytes, by: Pass) -> bool:
        """Whether another pass computes this page now."""
        holder = self._claims.get(name)
        return holder is not None and holder is not by

    def release_claims(self, work: Pass) -> None:
        """`work` has ended, however it did."""
        for name in work.claims:
            if self._claims.get(name) is work:
                del self._claims[name]
        work.claims = []


def _words(ids: Sequence[int], at: int) -> bytes:
    """The ids of the page that begins at token `at`."""
    return array("I", ids[at : at + PAGE_TOKENS]).tobytes()
