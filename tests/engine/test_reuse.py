"""Prefix reuse: what is shared, what never is, joins of prefills in flight, eviction, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.device.protocol import PAGE_TOKENS, DeviceError
from pie_core.engine.errors import InstanceClosed, InvalidPass, PassFailed
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.recipe import OPAQUE, PENDING, Recipe
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import channel as ch
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import argmax, decode, greedy, running, settle, spec

PROMPT = [(7 * i + 3) % VOCAB for i in range(70)]  # four full pages and six tokens


def rows(runner: FakeRunner) -> int:
    return sum(batch.n_tokens for batch in runner.batches)


async def first_token(engine: Engine, tokens: list[int], tenant: str = "", **more: Any) -> Any:
    inst = engine.open_instance("one", tenant)
    try:
        return await inst.submit(inst.pipeline(), greedy(tokens, inst.working_set(), **more))[0]
    finally:
        inst.close()


async def test_a_repeated_prompt_computes_its_last_page_only() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert (rows(runner), engine.pool.used, engine.pool.idle) == (70, 0, 4)
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert rows(runner) == 76 and engine.metrics.reused_tokens == 64
        longer = [*PROMPT[:60], *range(20)]
        assert await first_token(engine, longer) == reference(longer)
        assert rows(runner) == 76 + 80 - 48, "three pages are the same"
        status = engine.status()
        assert (status["pages_cached"], status["reused_tokens"]) == (6, 112)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 64])
async def test_a_read_out_is_always_computed(n: int) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        before = rows(runner)
        assert await first_token(engine, PROMPT[:n]) == reference(PROMPT[:n])
        assert rows(runner) - before == (n - 1) % PAGE_TOKENS + 1


async def test_nothing_from_the_earliest_read_out_on_is_skipped() -> None:
    runner = FakeRunner(limits(max_tokens=64))
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        before = rows(runner)
        assert await first_token(engine, PROMPT, reads=[[20, 69]]) == reference(PROMPT[:21])
        assert rows(runner) - before == 70 - 16


async def test_a_pass_without_read_outs_skips_full_pages_too() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        before = rows(runner)
        inst = engine.open_instance("fill")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, PassSpec(PROMPT[:64], [ws]))[0]
        assert rows(runner) - before == 16
        assert await inst.submit(pipe, greedy([5], ws))[0] == reference([*PROMPT[:64], 5])
        inst.close()


async def test_decoded_pages_are_shared_with_the_next_turn() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("turn")
        said = await decode(inst, PROMPT, 40)
        inst.close()
        before = rows(runner)
        whole = [*PROMPT, *said]
        assert await first_token(engine, [*whole, 1, 2]) == reference([*whole, 1, 2])
        assert rows(runner) - before == 112 - 96, "what the loop never fed is not there"


async def test_a_partial_page_is_exchanged_for_the_shared_one() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        inst = engine.open_instance("late")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(PROMPT[:5], ws))[0]
        before = rows(runner)
        assert await inst.submit(pipe, greedy(PROMPT[5:], ws))[0] == reference(PROMPT)
        assert rows(runner) - before == 6 and inst.pages == 5 and engine.pool.used == 5
        inst.close()


@pytest.mark.parametrize("tenant", ["a", "b"])
async def test_tenants_share_nothing(tenant: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT, "a")
        before = rows(runner)
        assert await first_token(engine, PROMPT, tenant) == reference(PROMPT)
        assert rows(runner) - before == (6 if tenant == "a" else 70)


def test_names_depend_on_tenant_layout_and_engine() -> None:
    from pie_core.engine.pages import PagePool
    from pie_core.engine.prefix_cache import PrefixCache

    cache, other = PrefixCache(PagePool(4)), PrefixCache(PagePool(4))
    chains: list[list[bytes]] = [[] for _ in range(4)]
    for chain, (c, tenant) in zip(chains, [(cache, "a"), (cache, "a"), (cache, "b"), (other, "a")], strict=True):
        c.extend(chain, c.root(tenant), list(range(32)), 2)
    assert chains[0] == chains[1] and len({name for chain in chains for name in chain}) == 6
    assert PrefixCache(PagePool(4), "f16").root("a") != PrefixCache(PagePool(4)).root("a")
    moved: list[bytes] = []
    cache.extend(moved, cache.root("a"), [*range(16, 32), *range(16)], 2)
    assert not set(moved) & set(chains[0])


async def windowed(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT, ws, geometry=Geometry(window=8)))[0]


async def sunk(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT, ws, geometry=Geometry(window=8, sinks=2)))[0]


async def never_committed(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT, ws, geometry=BUFFERED))[0]


async def discarded(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT, ws, geometry=BUFFERED))[0]
    inst.discard(ws, 70)
    await inst.submit(pipe, greedy([9] * 70, ws))[0]


async def windowed_first(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT[:1], ws, geometry=Geometry(window=8)))[0]
    await inst.submit(pipe, greedy(PROMPT[1:], ws))[0]


async def opted_out(inst: Instance, ws: WorkingSet, pipe: Any) -> None:
    await inst.submit(pipe, greedy(PROMPT, ws, reuse=False))[0]


@pytest.mark.parametrize("make", [windowed, sunk, never_committed, discarded, windowed_first, opted_out])
async def test_what_has_no_recipe_is_not_shared(make: Callable[[Instance, WorkingSet, Any], Any]) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("opaque")
        ws = inst.working_set()
        await make(inst, ws, inst.pipeline())
        before = rows(runner)
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert rows(runner) - before == 70
        inst.close()


async def test_a_pass_or_an_instance_can_refuse_shared_pages() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        before = rows(runner)
        assert await first_token(engine, PROMPT, reuse=False) == reference(PROMPT)
        assert rows(runner) - before == 70
        inst = engine.open_instance("alone", reuse=False)
        assert await decode(inst, PROMPT, 2) == generate(PROMPT, 2)
        assert rows(runner) - before == 141
        inst.close()


async def test_committed_drafts_are_shared_and_may_still_be_cut() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("drafts")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(PROMPT[:40], ws, geometry=BUFFERED))[0]
        inst.commit(ws, 40)
        await inst.submit(pipe, greedy(PROMPT[40:41], ws))[0]
        before = rows(runner)
        assert await first_token(engine, PROMPT[:41]) == reference(PROMPT[:41])
        assert rows(runner) - before == 9
        inst.close()


async def test_what_was_refused_and_is_gone_refuses_nothing_more() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("again")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy([4] * 40, ws, geometry=BUFFERED, reuse=False))[0]
        inst.discard(ws, 40)
        await inst.submit(pipe, greedy(PROMPT, ws))[0]
        before = rows(runner)
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert rows(runner) - before == 6
        inst.close()


async def test_cutting_into_a_shared_page_leaves_the_others_theirs() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("cut")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(PROMPT[:10], ws))[0]
        inst.drop(inst.fork(ws))
        await inst.submit(pipe, greedy(PROMPT[10:40], ws))[0]
        inst.truncate(ws, 10)
        assert ws.tail_is_kept() and not engine.predictor._page(ws, inst), "nobody may write behind the length here"
        assert await inst.submit(pipe, greedy([1] * 30, ws))[0] == reference([*PROMPT[:10], *[1] * 30])
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert await first_token(engine, [*PROMPT[:10], *[1] * 30]) == reference([*PROMPT[:10], *[1] * 30])
        inst.close()


async def test_a_kept_page_is_written_only_once_it_is_forgotten() -> None:
    """A guess writes behind the length: never into a page that somebody may ask for."""
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("guess")
        ws, pipe = inst.working_set(), inst.pipeline()
        said = await decode(inst, PROMPT[:14], 6, ws, pipe)
        child = inst.fork(ws)
        tail = await decode(inst, said[-1:], 40, child, pipe)
        inst.truncate(child, 19)
        feed = said[-1:]
        for k in range(30):
            token = await inst.submit(pipe, greedy(feed, child))[0]
            assert token == tail[k]
            feed = [token]  # type: ignore[list-item]
        whole = [*PROMPT[:14], *said, *tail]
        assert await first_token(engine, whole) == reference(whole)
        inst.close()


# --- joins


async def test_identical_prefills_in_flight_are_computed_once() -> None:
    runner = FakeRunner(limits(max_tokens=16))
    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(5)]
        outs = [i.submit(i.pipeline(), greedy([*PROMPT, k], i.working_set()))[0] for k, i in enumerate(insts)]
        assert [await out for out in outs] == [reference([*PROMPT, k]) for k in range(5)]
        assert rows(runner) == 71 + 4 * 7
        assert engine.pool.shared == 4
        for inst in insts:
            inst.close()


@pytest.mark.parametrize("how", ["cancelled", "failed at submit", "failed at its end", "dropped before it began"])
async def test_who_joined_computes_by_itself_when_the_first_does_not_finish(how: str) -> None:
    runner = FakeRunner(limits(max_tokens=16))
    runner.hold = True
    async with running(runner) as engine:
        first, second = engine.open_instance("first"), engine.open_instance("second")
        lost = first.submit(first.pipeline(), greedy(PROMPT, first.working_set()))[0]
        if how != "dropped before it began":
            await settle()
        joined = second.submit(second.pipeline(), greedy(PROMPT, second.working_set()))[0]
        if how == "failed at submit":
            runner.fail_submit = lambda batch: DeviceError("injected") if len(runner.batches) == 3 else None
        elif how == "failed at its end":
            runner.fail_results = lambda batch: DeviceError("injected") if len(runner.batches) == 4 else None
        else:
            await settle()
            first.close()
        runner.hold = False
        runner.release()
        assert await joined == reference(PROMPT)
        with pytest.raises((InstanceClosed, PassFailed)):
            await lost
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        first.close()
        second.close()


async def test_pages_of_a_failed_step_are_not_shared() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        runner.fail_results = lambda batch: DeviceError("injected") if len(runner.batches) == 1 else None
        with pytest.raises(PassFailed):
            await first_token(engine, PROMPT[:32])
        before = rows(runner)
        assert await first_token(engine, PROMPT[:32]) == reference(PROMPT[:32])
        assert rows(runner) - before == 32


async def test_pages_written_behind_a_step_that_fails_are_not_shared() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        runner.fail_results = lambda batch: DeviceError("injected") if len(runner.batches) == 1 else None
        inst = engine.open_instance("two in flight")
        ws, pipe = inst.working_set(), inst.pipeline()
        outs = [inst.submit(pipe, greedy(part, ws))[0] for part in (PROMPT[:20], PROMPT[20:50])]
        await settle()
        assert len(runner.batches) == 2
        runner.hold = False
        runner.release()
        for out in outs:
            with pytest.raises(PassFailed):
                await out
        before = rows(runner)
        assert await first_token(engine, PROMPT) == reference(PROMPT)
        assert rows(runner) - before == 70
        inst.close()


# --- the pool


async def test_of_one_prompt_the_end_goes_first() -> None:
    runner = FakeRunner(limits(pages=5))
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        await first_token(engine, [1] * 17)
        assert engine.pool.evicted == 1
        before = rows(runner)
        assert await first_token(engine, PROMPT[:60]) == reference(PROMPT[:60])
        assert rows(runner) - before == 12, "the first three pages are there"


async def test_cached_pages_make_room_the_longest_unused_first() -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        prompts = [[k] * 33 for k in range(3)]
        for prompt in prompts:
            await first_token(engine, prompt)
        assert (engine.pool.free, engine.pool.idle) == (8, 6)
        await first_token(engine, prompts[0])
        await first_token(engine, [7] * 65)
        assert engine.pool.evicted == 3
        before = rows(runner)
        await first_token(engine, prompts[0])
        assert rows(runner) - before == 1, "used lately, so still there"
        await first_token(engine, prompts[1])
        assert rows(runner) - before == 34


async def test_pre_warming() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        assert await engine.prewarm(PROMPT, "a") == 64
        before = rows(runner)
        assert await first_token(engine, PROMPT, "a") == reference(PROMPT)
        assert rows(runner) - before == 6
        with pytest.raises(InvalidPass, match="not a token id"):
            await engine.prewarm([VOCAB])
        engine.cache.clear()
        assert engine.pool.idle == 0 and len(engine.cache) == 0


async def test_an_instance_is_charged_for_what_it_references() -> None:
    async with running(FakeRunner()) as engine:
        a, b = engine.open_instance("a"), engine.open_instance("b")
        sets = [a.working_set(), b.working_set(), b.working_set()]
        for inst, ws in zip((a, b, b), sets, strict=True):
            await inst.submit(inst.pipeline(), greedy(PROMPT, ws))[0]
        assert (a.pages, b.pages, engine.pool.used, engine.pool.shared) == (5, 6, 7, 4)
        a.close()
        assert (a.pages, b.pages, engine.pool.used) == (0, 6, 6)
        b.close()


# --- recipes of tokens that the device fed itself


def test_recipes() -> None:
    recipe = Recipe()
    recipe.extend([1, 2])
    recipe.extend_unknown(2, pending=True)
    recipe.extend([5])
    assert (recipe.ids, recipe.known) == ([1, 2, PENDING, PENDING, 5], 2)
    recipe.fill(3, [4])
    assert recipe.known == 2
    recipe.fill(2, [3])
    assert recipe.known == 5
    recipe.extend_unknown(1, pending=False)
    recipe.extend([7])
    recipe.fill(5, [6])
    assert (recipe.ids[5], recipe.known) == (OPAQUE, 5)
    part = recipe.copy(3)
    recipe.cut(4)
    assert (recipe.known, recipe.ids, part.ids, part.known) == (4, [1, 2, 3, 4], [1, 2, 3], 3)


async def test_device_fed_pages_are_shared_once_their_ids_are_read_back() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("self-feeding")
        cell = inst.channel("i32", (1,), 2)

        def step() -> Any:
            token = argmax()
            ch.put(cell, token)
            return token

        ws, pipe = inst.working_set(), inst.pipeline()
        outs = [inst.submit(pipe, spec(PROMPT[:20], [ws], step))[0]]
        outs += [inst.submit(pipe, spec(cell, [ws], step))[0] for _ in range(30)]
        said = [await out for out in outs]
        assert said == generate(PROMPT[:20], 31)
        assert ws.recipe.known == 50 and ws.recipe.ids[20:] == said[:30]
        inst.close()
        before = rows(runner)
        whole = [*PROMPT[:20], *said]
        assert await first_token(engine, whole) == reference(whole)
        assert rows(runner) - before == 51 - 48


async def test_ids_that_the_host_fed_are_known() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("fed")
        cell = inst.channel("u32", (4,), 3, host="writer")
        ws, pipe = inst.working_set(), inst.pipeline()
        fed = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        flat = [token for ids in fed for token in ids]
        for ids in fed:
            inst.put(cell, ids)
        outs = [inst.submit(pipe, greedy(cell, ws))[0] for _ in fed]
        assert await asyncio.gather(*outs) == [reference(flat[: 4 * k + 4]) for k in range(3)]
        assert (ws.recipe.ids, ws.recipe.known) == (flat, 12)
        inst.put(cell, [VOCAB, 0, 0, 0])
        with pytest.raises(PassFailed):
            await inst.submit(pipe, greedy(cell, ws))[0]
        assert ws.recipe.known == 12
        inst.close()


async def test_geometry_modes_share_alike() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        await first_token(engine, PROMPT)
        for geometry in (FOLDING, BUFFERED):
            before = rows(runner)
            assert await first_token(engine, PROMPT, geometry=geometry) == reference(PROMPT)
            assert rows(runner) - before == 6
        before = rows(runner)
        assert await first_token(engine, PROMPT, geometry=Geometry(window=8)) == reference(PROMPT, 8)
        assert rows(runner) - before == 70
