"""Which tokens of a pass need not be computed, because full pages with the same content are there, or will be in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS

if TYPE_CHECKING:
    from pie_core.engine.forward import Part, Pass
    from pie_core.engine.prefix_cache import PrefixCache


def find_pages(work: Pass, cache: PrefixCache) -> bool:
    """Note for each part of a pass that has not started the pages to continue on, from the page of its set's next token on. False
    while another pass computes the next page: then waiting costs less than computing it twice.

    Nothing at or behind the earliest read-out is skipped, and never the last token.
    """
    found: list[Sequence[int]] = []
    work.found, work.skip, skip = found, 0, 0
    for part in work.parts:
        pages: list[int] = []
        if work.reuse and covers(work, part):
            ws = part.ws
            first = ws.length // PAGE_TOKENS
            end = (ws.length + min(part.reads, default=part.n - 1)) // PAGE_TOKENS
            for name in names_of(part)[first:end] if end > first else ():
                page = cache.find(name)
                if page is None:
                    if cache.claimed(name, work):
                        return False
                    break
                pages.append(page)
        found.append(pages)
        if pages:
            skip += len(pages) * PAGE_TOKENS - part.ws.length % PAGE_TOKENS
    work.skip = skip
    return True


def attach_pages(work: Pass) -> None:
    """Continue on what `find_pages` noted; the pass starts behind it."""
    freeze = work.geometry.mode == "folding"
    for part, pages in zip(work.parts, work.found, strict=True):
        if pages and part.ids is not None:
            part.done = len(pages) * PAGE_TOKENS - part.ws.length % PAGE_TOKENS
            part.ws.attach(pages, part.ids[: part.done], freeze=freeze)
    work.remaining -= work.skip
    work.found, work.skip = [()] * len(work.parts), 0


def claim_pages(work: Pass, cache: PrefixCache) -> None:
    """Tell others which pages a pass that starts now will compute; before `attach_pages`. Short ones are not worth waiting for."""
    if not work.reuse or work.geometry.mode != "folding":
        return
    for part, pages in zip(work.parts, work.found, strict=True):
        if part.n >= PAGE_TOKENS and covers(work, part):
            cache.claim(work, names_of(part)[part.ws.length // PAGE_TOKENS + len(pages) :])


def covers(work: Pass, part: Part) -> bool:
    """Whether a recipe will cover the set once the part has run."""
    return work.plain and part.ids is not None and part.ws.recipe.known == part.ws.length and part.ws.public >= part.ws.length


def names_of(part: Part) -> list[bytes]:
    """The names of all full pages that the set will have; worked out once for a state of the set. Nothing of the part has run."""
    ws = part.ws
    state = (ws.length, ws.cuts)
    if part.named_for != state:
        assert part.ids is not None  # `covers`
        part.names, part.named_for = ws.names((ws.length + part.n) // PAGE_TOKENS, part.ids), state
    return part.names
