"""Memory pressure: who is paused, that nobody notices, and what still fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import BudgetExceeded, EngineError, OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.pausing import PATIENCE
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import decode, greedy, running, settle


async def fill(inst: Instance, ws: WorkingSet, tokens: list[int], **more: Any) -> None:
    pipe = inst.pipeline()
    await inst.submit(pipe, greedy(tokens, ws, **more))[0]
    inst.close_pipeline(pipe)


@pytest.mark.parametrize("reuse", [True, False])
async def test_an_unused_set_makes_room_and_comes_back(reuse: bool) -> None:
    runner = FakeRunner(limits(pages=4))
    async with running(runner) as engine:
        first, second = engine.open_instance("first", reuse=reuse), engine.open_instance("second", reuse=reuse)
        ws = first.working_set()
        await fill(first, ws, [1] * 40)
        out = second.submit(second.pipeline(), greedy([2] * 33, second.working_set()))[0]
        assert await asyncio.wait_for(out, 20 * PATIENCE) == reference([2] * 33)
        assert ws.paused and first.pages == 0 and ws.length == 40
        assert (engine.metrics.paused, engine.metrics.revived) == (1, 0)
        assert await decode(first, [3], 3, ws) == generate([1] * 40 + [3], 3)
        assert not ws.paused and engine.metrics.revived == 1
        first.close()
        second.close()


async def test_computing_a_set_again_takes_nothing_from_the_budget() -> None:
    async with running(FakeRunner(limits(pages=4))) as engine:
        first = engine.open_instance("first", reuse=False, limits=InstanceLimits(outstanding=2))
        second = engine.open_instance("second", reuse=False)
        ws, pipe = first.working_set(), first.pipeline()
        await fill(first, ws, [1] * 40)
        await fill(second, second.working_set(), [2] * 33)
        assert ws.paused
        second.close()
        outs = [first.submit(pipe, greedy([3], ws))[0]]
        while not first.revivals:
            await asyncio.sleep(0)
        outs.append(first.submit(pipe, greedy([4], ws))[0])
        with pytest.raises(BudgetExceeded, match="2 passes are outstanding, the most is 2"):
            first.submit(pipe, greedy([5], ws))
        assert [await out for out in outs] == [reference([1] * 40 + [3]), reference([1] * 40 + [3, 4])]
        first.close()


async def test_cached_pages_go_before_anybody_is_paused() -> None:
    async with running(FakeRunner(limits(pages=6))) as engine:
        old, inst = engine.open_instance("old"), engine.open_instance("inst")
        await fill(old, old.working_set(), [1] * 40)
        old.close()
        await fill(inst, inst.working_set(), [2] * 33)
        assert engine.pool.idle == 2
        await fill(inst, inst.working_set(), [3] * 33)
        assert engine.metrics.paused == 0 and engine.pool.evicted == 2
        inst.close()


async def test_all_who_only_wait_take_turns_and_nobody_fails() -> None:
    """Eight requests that each grow to five pages in a pool of twelve: the young are paused, all end right."""
    runner = FakeRunner(limits(pages=12))
    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(8)]

        async def request(inst: Instance, k: int) -> list[int]:
            said = await decode(inst, [k] * 20, 50)
            inst.close()
            return said

        assert await asyncio.gather(*(request(i, k) for k, i in enumerate(insts))) == [generate([k] * 20, 50) for k in range(8)]
        assert engine.metrics.failed_passes == 0


@pytest.mark.parametrize("reuse", [True, False])
async def test_sets_of_one_instance_take_turns(reuse: bool) -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        inst = engine.open_instance("branches", reuse=reuse)
        root = inst.working_set()
        await fill(inst, root, [1] * 24)
        children = [inst.fork(root) for _ in range(4)]
        got = await asyncio.gather(*(decode(inst, [k], 40, ws) for k, ws in enumerate(children)))
        assert got == [generate([1] * 24 + [k], 40) for k in range(4)]
        assert engine.metrics.paused > 0 and engine.metrics.failed_passes == 0
        inst.close()


async def test_a_pass_over_two_paused_sets_gets_both() -> None:
    async with running(FakeRunner(limits(pages=6))) as engine:
        a, b = engine.open_instance("a"), engine.open_instance("b")
        sets = [a.working_set(), a.working_set()]
        for k, ws in enumerate(sets):
            await fill(a, ws, [k + 1] * 30)
        await fill(b, b.working_set(), [9] * 90)
        assert all(ws.paused for ws in sets)
        b.close()
        out = a.submit(a.pipeline(), greedy([[5], [6]], *sets))[0]
        assert await out == reference([1] * 30 + [5])
        a.close()


async def test_buffers_forks_and_cuts_of_a_paused_set() -> None:
    async with running(FakeRunner(limits(pages=6))) as engine:
        inst, other = engine.open_instance("paused"), engine.open_instance("other")
        ws = inst.working_set()
        await fill(inst, ws, [1] * 20)
        await fill(inst, ws, [2] * 20, geometry=BUFFERED)
        await fill(other, other.working_set(), [9] * 90)
        assert ws.paused and (ws.length, ws.frozen) == (40, 20)
        other.close()
        child, bare = inst.fork(ws, buffer=True), inst.fork(ws)
        inst.commit(ws, 5)
        inst.discard(ws, 12)
        assert child.paused and (ws.length, ws.frozen) == (28, 25)
        pipe = inst.pipeline()
        assert await inst.submit(pipe, greedy([3], bare))[0] == reference([1] * 20 + [3])
        assert await inst.submit(pipe, greedy([3], ws, geometry=BUFFERED))[0] == reference([1] * 20 + [2] * 8 + [3])
        inst.truncate(child, 20)
        assert await inst.submit(pipe, greedy([4], child))[0] == reference([1] * 20 + [4])
        assert engine.pool.used == inst.pages
        inst.close()


async def test_what_has_no_recipe_is_never_paused() -> None:
    async with running(FakeRunner(limits(pages=4))) as engine:
        first, second = engine.open_instance("first"), engine.open_instance("second")
        ws = first.working_set()
        await fill(first, ws, [1] * 40, geometry=Geometry(window=8))
        out = second.submit(second.pipeline(), greedy([2] * 33, second.working_set()))[0]
        await asyncio.sleep(3 * PATIENCE)
        assert not out.done() and not ws.paused, "it is silent and may still free them"
        first.close()
        assert await out == reference([2] * 33)
        second.close()


async def test_what_can_never_fit_fails_with_numbers() -> None:
    """Sets without a recipe that need more than there is together: the youngest gives way."""
    async with running(FakeRunner(limits(pages=6))) as engine:
        old, young = engine.open_instance("old"), engine.open_instance("young")
        window = Geometry(window=100)
        sets = [old.working_set(), young.working_set()]
        await fill(old, sets[0], [1] * 48, geometry=window)
        await fill(young, sets[1], [2] * 48, geometry=window)
        outs = [i.submit(i.pipeline(), greedy([3], ws, geometry=window))[0] for i, ws in zip((old, young), sets, strict=True)]
        with pytest.raises(
            OutOfPages,
            match=r"the pass needs 1 more KV pages, 0 of 6 are free, and everybody.*youngest instance, gives way: its working sets hold 3",
        ):
            await outs[1]
        young.close()
        assert await outs[0] == reference([1] * 48 + [3], 100)
        old.close()


async def test_two_sets_of_one_pass_that_can_never_be_there_together() -> None:
    async with running(FakeRunner(limits(pages=6))) as engine:
        a, b = engine.open_instance("a"), engine.open_instance("b")
        sets = [a.working_set(), a.working_set()]
        await fill(a, sets[0], [1] * 48)
        await fill(a, sets[1], [2] * 48)
        out = a.submit(a.pipeline(), greedy([[5], [6]], *sets))[0]
        alone = "the pass needs 2 more KV pages, 0 of 6 are free, and the instance's own working sets hold the other 6: drop"
        with pytest.raises(OutOfPages, match=alone):
            await asyncio.wait_for(out, 40 * PATIENCE)
        assert await decode(b, [1], 2) == generate([1], 2)
        a.close()
        b.close()


async def test_two_paused_sets_of_one_pass_that_can_never_be_there_together() -> None:
    """Neither is paused for the other over and over."""
    async with running(FakeRunner(limits(pages=6))) as engine:
        a, b = engine.open_instance("a"), engine.open_instance("b")
        sets = [a.working_set(), a.working_set()]
        for k, ws in enumerate(sets):
            await fill(a, ws, [k + 1] * 60)
        await fill(b, b.working_set(), [9] * 90)
        b.close()
        assert all(ws.paused for ws in sets)
        out = a.submit(a.pipeline(), greedy([[5], [6]], *sets))[0]
        alone = "computed again needs 4 more KV pages, 2 of 6 are free, and the instance's own working sets hold the other 4: drop"
        with pytest.raises(OutOfPages, match=alone):
            await asyncio.wait_for(out, 40 * PATIENCE)
        assert engine.metrics.revived <= 2
        a.close()


async def test_a_set_that_is_dropped_or_closed_while_it_comes_back() -> None:
    runner = FakeRunner(limits(pages=6, max_tokens=8))
    async with running(runner) as engine:
        inst, other = engine.open_instance("paused"), engine.open_instance("other")
        for ending in ("close", "drop"):
            ws = inst.working_set()
            await fill(inst, ws, [1] * 40)
            await fill(other, other.working_set(), [9] * 90)
            assert ws.paused
            engine.cache.clear()
            for held in list(other.working_sets):
                other.drop(held)
            runner.hold = True
            out = inst.submit(inst.pipeline(), greedy([2], ws))[0]
            await settle()
            assert engine.pool.used == 3 and inst.revivals
            if ending == "drop":
                inst.close()
            else:
                inst.drop(ws)
                assert engine.pool.used == 3, "after the pass that was accepted"
            runner.hold = False
            runner.release()
            if ending == "drop":
                assert engine.pool.used == 0
                with pytest.raises(EngineError):
                    await out
            else:
                assert await out == reference([1] * 40 + [2])
                await settle()
                assert engine.pool.used == 0
        other.close()


async def test_dropping_a_set_whose_pass_was_cancelled_ends_its_revival() -> None:
    runner = FakeRunner(limits(pages=6, max_tokens=8))
    async with running(runner) as engine:
        inst, other = engine.open_instance("paused"), engine.open_instance("other")
        ws = inst.working_set()
        await fill(inst, ws, [1] * 40)
        await fill(other, other.working_set(), [9] * 90)
        engine.cache.clear()
        other.close()
        pipe = inst.pipeline()
        runner.hold = True
        inst.submit(pipe, PassSpec([2], [ws]))
        await settle()
        assert inst.revivals
        pipe.stop()
        inst.drop(ws)
        assert not inst.revivals and engine.pool.used == 0 and inst.outstanding == 0
        runner.hold = False
        runner.release()
        await settle()
        assert await decode(inst, [3], 3) == generate([3], 3)
        inst.close()


async def test_a_fault_while_a_set_comes_back_is_its_fault_only() -> None:
    runner = FakeRunner(limits(pages=6, max_tokens=8))
    async with running(runner) as engine:
        inst, other = engine.open_instance("paused"), engine.open_instance("other")
        ws = inst.working_set()
        await fill(inst, ws, [1] * 40)
        await fill(other, other.working_set(), [9] * 90)
        engine.cache.clear()
        other.close()
        at = len(runner.batches) + 2
        runner.fail_results = lambda batch: DeviceError("injected") if len(runner.batches) == at else None
        with pytest.raises(PassFailed):
            await inst.submit(inst.pipeline(), greedy([2], ws))[0]
        assert await decode(inst, [3], 3) == generate([3], 3)
        inst.close()


async def test_limits_of_an_instance_count_what_was_set_aside() -> None:
    from pie_core.engine.instance import InstanceLimits

    async with running(FakeRunner(limits(pages=6))) as engine:
        capped = engine.open_instance("capped", limits=InstanceLimits(pages=4))
        other = engine.open_instance("other")
        ws = capped.working_set()
        await fill(capped, ws, [1] * 40)
        await fill(other, other.working_set(), [9] * 90)
        other.close()
        with pytest.raises(OutOfPages, match="holds 3 KV pages and the pass needs 2 more; its limit is 4"):
            await fill(capped, capped.working_set(), [2] * 20)
        assert await decode(capped, [3], 2, ws) == generate([1] * 40 + [3], 2)
        capped.close()
