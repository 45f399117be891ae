"""Who decides about prefix reuse: sets that stay out of it, pages made ahead, prefixes that all tenants share, and what was reused."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_core.device.protocol import PAGE_TOKENS, DeviceError
from pie_core.engine.errors import ContextLengthExceeded, EngineError, InstanceClosed, InvalidPass, OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.pages import PagePool
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import VOCAB, FakeRunner, limits, reference
from tests.engine.support import greedy, running, settle
from tests.engine.test_reuse import PROMPT, first_token, rows


class Heard:
    """A sink."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def __call__(self, n: Any, error: EngineError | None) -> None:
        self.got.append(n if error is None else error)


def cached(inst: Instance, ws: WorkingSet) -> Any:
    """How many tokens of a set, behind which nothing waits, came out of the cache."""
    heard = Heard()
    inst.cached(ws, heard)
    (n,) = heard.got
    return n


async def used_alone(inst: Instance) -> WorkingSet:
    ws = inst.working_set(reuse=False)
    assert await inst.submit(inst.pipeline(), greedy(PROMPT, ws))[0] == reference(PROMPT)
    return ws


async def used_by_a_fork(inst: Instance) -> WorkingSet:
    ws = inst.working_set(reuse=False)
    child = inst.fork(inst.fork(ws))
    inst.drop(ws)
    assert await inst.submit(inst.pipeline(), greedy(PROMPT, child))[0] == reference(PROMPT)
    return child


async def used_in_parts(inst: Instance) -> WorkingSet:
    ws, pipe = inst.working_set(reuse=False), inst.pipeline()
    await inst.submit(pipe, PassSpec(PROMPT[:30], [ws]))[0]
    inst.truncate(ws, 0)
    await inst.submit(pipe, greedy(PROMPT[:30], ws, geometry=BUFFERED))[0]
    inst.commit(ws, 30)
    assert await inst.submit(pipe, greedy(PROMPT[30:], ws))[0] == reference(PROMPT)
    return ws


@pytest.mark.parametrize("use", [used_alone, used_by_a_fork, used_in_parts])
async def test_a_set_without_reuse_takes_nothing_from_the_cache_and_leaves_nothing(use: Any) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        for known in (False, True):
            if known:
                await first_token(engine, PROMPT)
            before, named = rows(runner), len(engine.cache)
            inst = engine.open_instance("alone")
            ws = await use(inst)
            assert (rows(runner) - before, cached(inst, ws)) == (100 if use is used_in_parts else 70, 0)
            inst.close()
            assert len(engine.cache) == named and engine.pool.idle == named == 4 * known


async def test_of_two_sets_of_a_pass_each_decides_for_itself() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        inst, before = engine.open_instance("both"), rows(runner)
        sets = [inst.working_set(reuse=False), inst.working_set()]
        await inst.submit(inst.pipeline(), PassSpec([PROMPT, PROMPT], sets))[0]
        assert rows(runner) - before == 70 + 6
        assert [cached(inst, ws) for ws in sets] == [0, 64]
        inst.close()


async def test_a_paused_set_without_reuse_comes_back_without_it() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("paused")
        ws, pipe = inst.working_set(reuse=False), inst.pipeline()
        await inst.submit(pipe, greedy(PROMPT, ws))[0]
        await first_token(engine, PROMPT)
        assert ws.may_pause()
        ws.pause()
        before = rows(runner)
        assert await inst.submit(pipe, greedy([5], ws))[0] == reference([*PROMPT, 5])
        assert rows(runner) - before == 71
        inst.close()


async def test_what_was_reused_is_counted_where_it_is_still_there() -> None:
    async with running(FakeRunner()) as engine:
        await first_token(engine, PROMPT)
        inst = engine.open_instance("counted")
        ws, pipe = inst.working_set(), inst.pipeline()
        early, late = Heard(), Heard()
        inst.cached(ws, early)
        first = inst.submit(pipe, greedy(PROMPT, ws, geometry=BUFFERED))[0]
        inst.cached(ws, late)
        assert (early.got, late.got) == ([0], []), "in the order of acceptance"
        await first
        assert late.got == [64]
        child = inst.fork(ws, buffer=True)
        inst.discard(ws, 30)
        assert (cached(inst, ws), cached(inst, child), cached(inst, inst.fork(ws))) == (40, 64, 0)
        await inst.submit(pipe, greedy(PROMPT[40:], ws, geometry=BUFFERED))[0]
        assert cached(inst, ws) == 64, "32 that are there from before, and the pages behind them"
        await inst.submit(inst.pipeline(), greedy([9] * 40, child, geometry=BUFFERED))[0]
        assert cached(inst, child) == 64
        inst.close()


async def test_pages_are_made_ahead_and_stay_when_the_instance_is_gone() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst, heard = engine.open_instance("ahead", "a"), Heard()
        inst.prewarm(PROMPT, heard)
        assert heard.got == []
        inst.prewarm(PROMPT[:15], heard)
        inst.prewarm([], heard)
        assert heard.got == [0, 0]
        await settle(50)
        assert (heard.got, rows(runner)) == ([0, 0, 64], 64)
        assert (inst.pages, inst.outstanding, len(inst.working_sets), len(inst.pipelines)) == (0, 0, 0, 0)
        inst.close()
        assert await engine.prewarm(PROMPT[:60], "a") == 48 and rows(runner) == 64, "nothing is left to compute"
        assert await first_token(engine, PROMPT, "a") == reference(PROMPT)
        assert rows(runner) == 64 + 6
        assert await engine.prewarm(PROMPT, "b") == 64 and rows(runner) == 70 + 64


async def test_making_pages_ahead_joins_who_computes_them_now() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst, heard = engine.open_instance("first"), Heard()
        inst.prewarm(PROMPT, heard)
        other = engine.open_instance("second")
        out = other.submit(other.pipeline(), greedy(PROMPT, other.working_set()))[0]
        assert await out == reference(PROMPT)
        assert (heard.got, rows(runner)) == ([64], 64 + 6)
        inst.close()
        other.close()


async def test_what_is_made_ahead_again_counts_as_used() -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        prompts = [[k] * 32 for k in range(4)]
        for prompt in (*prompts[:3], prompts[0]):
            assert await engine.prewarm(prompt) == 32
        before = rows(runner)
        await first_token(engine, [7] * 60)
        assert await engine.prewarm(prompts[0]) == 32 and rows(runner) - before == 60
        assert await engine.prewarm(prompts[1]) == 32 and rows(runner) - before == 92


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        ([0] * 20 + [VOCAB], InvalidPass, f"ids\\[20\\] = {VOCAB} is not a token id"),
        ([True], InvalidPass, "ids\\[0\\] = True"),
        ([1] * 129, ContextLengthExceeded, "129 tokens exceed the context of 128"),
    ],
)
async def test_what_cannot_be_made_ahead(ids: list[int], kind: type[EngineError], words: str) -> None:
    async with running(FakeRunner(limits(context=128))) as engine:
        inst = engine.open_instance("wrong")
        with pytest.raises(kind, match=words):
            inst.prewarm(ids, Heard())
        with pytest.raises(kind, match=words):
            await engine.prewarm(ids, None)
        assert not engine.cache._open
        inst.close()


async def test_faults_and_ends_reach_who_waits_for_pages_ahead() -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        small = engine.open_instance("small", "", InstanceLimits(pages=2, handles=2))
        heard = Heard()
        small.prewarm(PROMPT, heard)
        await settle(50)
        runner.fail_submit = lambda batch: DeviceError("injected")
        small.prewarm(PROMPT[:32], heard)
        await settle(50)
        runner.fail_submit = lambda batch: None
        assert [type(error) for error in heard.got] == [OutOfPages, PassFailed]
        kept = small.working_set()
        with pytest.raises(EngineError, match="handles, the most is 2"):
            small.prewarm(PROMPT, heard)
        small.drop(kept)
        assert not small.working_sets and not small.pipelines, "nothing is left of any of them"
        small.prewarm(PROMPT[:32], heard)
        small.close()
        await settle(50)
        assert [type(error) for error in heard.got[2:]] == [InstanceClosed]
        with pytest.raises(InstanceClosed):
            small.prewarm(PROMPT, heard)


async def test_an_instance_without_reuse_makes_nothing_ahead() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst, heard = engine.open_instance("alone", reuse=False), Heard()
        inst.prewarm(PROMPT, heard)
        assert heard.got == [0] and not rows(runner)
        inst.close()


async def test_what_is_made_for_everyone_is_shared_by_all_tenants_and_nothing_behind_it() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        system = PROMPT[:40]
        assert await engine.prewarm(system, None) == 32

        async def computed(tokens: list[int], tenant: str) -> int:
            before = rows(runner)
            assert await first_token(engine, tokens, tenant) == reference(tokens)
            return rows(runner) - before

        assert await computed(PROMPT, "a") == 70 - 32
        assert await computed(PROMPT, "b") == 70 - 32, "what a tenant said behind it is its own"
        assert await computed(PROMPT, "a") == 6
        assert await computed([*range(50)], "a") == 50
        assert await computed([*range(50)], "b") == 50


async def test_what_is_everyones_stays_so_when_its_pages_had_to_go() -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        assert await engine.prewarm(PROMPT[:32], None) == 32
        await first_token(engine, [7] * 128, "a")
        before = rows(runner)
        await first_token(engine, PROMPT[:40], "a")
        await first_token(engine, PROMPT[:40], "b")
        assert rows(runner) - before == 40 + 8, "the first of any tenant brings them back"


async def test_a_prewarm_that_is_cancelled_leaves_nothing() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        runner.hold = True
        task = asyncio.ensure_future(engine.prewarm(PROMPT))
        await settle()
        assert engine.pool.used == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.pool.used == 0 and not engine.instances
        runner.release()
        runner.hold = False
        await settle()
        assert await engine.prewarm(PROMPT) == 64


PAGES = st.lists(st.sampled_from([0, 1]), max_size=5)  # a page is sixteen times its number


@given(st.lists(PAGES, max_size=3), st.lists(st.tuples(st.sampled_from("ab"), PAGES), max_size=6), st.integers(0, 5))
def test_names_are_equal_exactly_for_equal_pages_of_a_tenant_or_of_everyone(
    everyones: list[list[int]], sequences: list[tuple[str, list[int]]], first: int
) -> None:
    cache = PrefixCache(PagePool(4))
    for pages in everyones:
        cache.open_to_all([n for n in pages for _ in range(PAGE_TOKENS)], len(pages))
    shared = {tuple(pages[: n + 1]) for pages in everyones for n in range(len(pages))}
    named: dict[bytes, object] = {}
    known: dict[object, bytes] = {}
    for tenant, pages in sequences:
        chain: list[bytes] = []
        ids = [n for n in pages for _ in range(PAGE_TOKENS)]
        for end in (min(first, len(pages)), len(pages)):
            cache.extend(chain, cache.root(tenant), ids, end)
        assert len(chain) == len(pages)
        for n, name in enumerate(chain):
            begin = tuple(pages[: n + 1])
            what = begin if begin in shared else (tenant, *begin)
            assert named.setdefault(name, what) == what and known.setdefault(what, name) == name


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask alone", "prewarm", "prewarm for everyone"]), st.sampled_from("ab"), PAGES, st.integers(0, 20)),
    max_size=10,
)


@settings(deadline=None, max_examples=60)
@given(REQUESTS)
def test_each_request_finds_what_a_naive_cache_says(requests: list[tuple[str, str, list[int], int]]) -> None:
    """With room for everything, and one request after the other."""
    everyones: set[tuple[int, ...]] = set()
    there: set[tuple[object, ...]] = set()

    def keys(tenant: str, ids: list[int]) -> list[tuple[object, ...]]:
        begins = [tuple(ids[:end]) for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS)]
        shared = len(list(takewhile(everyones.__contains__, begins)))
        return [*begins[:shared], *((tenant, shared, *begin) for begin in begins[shared:])]

    async def go() -> None:
        runner = FakeRunner()
        async with running(runner) as engine:
            for what, tenant, pages, more in requests:
                ids = [n for n in pages for _ in range(PAGE_TOKENS)] + [5] * more
                if what == "prewarm for everyone":
                    everyones.update(tuple(ids[:end]) for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS))
                names = keys(tenant, ids)
                known = len(list(takewhile(there.__contains__, names)))
                before = rows(runner)
                if what.startswith("ask") and ids:
                    inst = engine.open_instance("one", tenant)
                    ws = inst.working_set(reuse=what == "ask")
                    assert await inst.submit(inst.pipeline(), greedy(ids, ws))[0] == reference(ids)
                    expected = min(known, (len(ids) - 1) // PAGE_TOKENS) * PAGE_TOKENS if what == "ask" else 0
                    assert (cached(inst, ws), rows(runner) - before) == (expected, len(ids) - expected)
                    inst.close()
                elif not what.startswith("ask"):
                    assert await engine.prewarm(ids, tenant if what == "prewarm" else None) == len(names) * PAGE_TOKENS
                    assert rows(runner) - before == (len(names) - known) * PAGE_TOKENS
                if what != "ask alone":
                    there.update(names)
            assert len(engine.cache) == len(there)

    asyncio.run(go())


def test_names_of_everyones_prefixes() -> None:
    cache = PrefixCache(PagePool(4))
    ids, other = list(range(64)), [*range(32), *range(16), *range(48, 64)]

    def names(tenant: str, ids: list[int], *steps: int) -> list[bytes]:
        chain: list[bytes] = []
        for pages in steps:
            cache.extend(chain, cache.root(tenant), ids, pages)
        return chain

    before = names("a", ids, 4)
    cache.open_to_all(ids, 3)
    a, b, c = names("a", ids, 4), names("b", ids, 4), names("a", other, 4)
    assert a[:3] == b[:3] and a[3] != b[3] and not set(before) & set(a)
    assert c[:2] == a[:2] and not set(c[2:]) & {*a, *b, *names("b", other, 4)}
    for steps in [(1, 2, 3, 4), (3, 4), (2, 4), (0, 4)]:  # however a chain grows
        assert names("a", ids, *steps) == a and names("a", other, *steps) == c
    chain = before[:2]
    cache.extend(chain, cache.root("a"), ids, 4)
    assert chain == before, "a chain that began before goes on as it was"
    assert len(before) * PAGE_TOKENS == len(ids)
