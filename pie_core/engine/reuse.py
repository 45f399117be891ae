"""Which tokens of a pass need not be computed, because full pages with the same content are there, or will be in a moment; and making
such pages ahead of their first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import ContextLengthExceeded, EngineError
from pie_core.engine.forward import Part, Pass, PassSpec
from pie_core.engine.pass_checks import check_ids
from pie_core.engine.values import Value

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
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
    """Whether a recipe will cover the set once the part has run, and its pages may be shared."""
    ws = part.ws
    return work.plain and ws.reuse and part.ids is not None and ws.recipe.known == ws.length and ws.public >= ws.length


def names_of(part: Part) -> list[bytes]:
    """The names of all full pages that the set will have; worked out once for a state of the set. Nothing of the part has run."""
    ws = part.ws
    state = (ws.length, ws.cuts)
    if part.named_for != state:
        assert part.ids is not None  # `covers`
        part.names, part.named_for = ws.names((ws.length + part.n) // PAGE_TOKENS, part.ids), state
    return part.names


def prewarm(
    instance: Instance, ids: Sequence[int], sink: Callable[[int | None, EngineError | None], None], *, everyone: bool = False
) -> None:
    """Compute and cache the full pages of `ids` that are not cached yet, for whatever of the instance's tenant (or `everyone`'s) begins
    with them later. They outlive the instance and go by LRU; what is cached already counts as used now.

    `sink` gets how many tokens are cached then, from the first on: 0 of less than a page, and where the instance shares nothing. The
    pass, its pages and handles are the instance's until then, and end with it. Raises InvalidPass, ContextLengthExceeded, BudgetExceeded
    and the cause of an instance that is closed; other errors reach the sink.
    """
    engine = instance.engine
    instance.check_open()
    if ids:
        check_ids("ids", ids, engine.limits.vocab)
    if len(ids) > engine.limits.context:
        raise ContextLengthExceeded(
            f"prewarm: {len(ids)} tokens exceed the context of {engine.limits.context_text}", tokens=len(ids), context=engine.limits.context
        )
    pages, cache = len(ids) // PAGE_TOKENS, engine.cache
    if not pages or not instance.reuse:
        sink(0, None)
        return
    if everyone:
        cache.open_to_all(ids, pages)
    names: list[bytes] = []
    cache.extend(names, instance.root, ids, pages)
    if len(cache.leading(names)) == pages:
        cache.refresh(names, instance)
        sink(pages * PAGE_TOKENS, None)
        return

    def ended(_: Pass, values: list[Value] | None, error: EngineError | None) -> None:
        if error is not None:
            sink(None, error)
        else:
            sink(len(cache.leading(names)) * PAGE_TOKENS, None)

    pipe = instance.pipeline()
    try:
        ws = instance.working_set()
        try:
            instance.submit_with(pipe, PassSpec(ids[: pages * PAGE_TOKENS], [ws]), ended)
        finally:
            instance.drop(ws)  # behind the pass
    finally:
        instance.close_pipeline(pipe)
