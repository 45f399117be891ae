"""Device errors, closing at any moment, memory pressure: typed ends, nothing leaked, the others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError, DeviceLost
from pie_core.engine.errors import EngineLost, EngineStopped, InstanceClosed, OutOfPages, PassFailed
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import decode, greedy, running, settle


@pytest.mark.parametrize("where", ["fail_submit", "fail_results"])
async def test_pitfall_17_a_failed_step_fails_its_passes_and_the_engine_goes_on(where: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("device")
        ws, pipe = inst.working_set(), inst.pipeline()
        assert await decode(inst, [1, 2], 3, ws, pipe) == generate([1, 2], 3)
        setattr(runner, where, lambda batch: DeviceError("the queue hiccuped"))
        doomed = inst.submit(pipe, greedy([4], ws))[0]
        with pytest.raises(PassFailed, match="the queue hiccuped"):
            await doomed
        setattr(runner, where, lambda batch: None)
        with pytest.raises(PassFailed, match="the queue hiccuped"):
            await inst.submit(pipe, greedy([4], ws))[0]  # its pages are not to be trusted
        assert await decode(inst, [7], 3) == generate([7], 3)
        assert engine.metrics.failed_steps == 1
        inst.close()


async def test_a_step_in_flight_behind_a_failed_one_fails_too() -> None:
    runner = FakeRunner()
    runner.hold = True
    runner.fail_results = lambda batch: DeviceError("first") if len(runner.batches) == 1 else None
    async with running(runner) as engine:
        inst = engine.open_instance("behind")
        ws, pipe = inst.working_set(), inst.pipeline()
        outs = [inst.submit(pipe, greedy([k], ws))[0] for k in range(3)]
        await settle()
        runner.hold = False
        runner.release()
        for out in outs:
            with pytest.raises(PassFailed, match="first"):
                await out
        inst.close()


async def test_a_fork_of_a_failed_set_fails_too() -> None:
    runner = FakeRunner()
    runner.hold = True
    runner.fail_results = lambda batch: DeviceError("the parent's step") if len(runner.batches) == 1 else None
    async with running(runner) as engine:
        inst = engine.open_instance("fork")
        ws, pipe, side = inst.working_set(), inst.pipeline(), inst.pipeline()
        parent = inst.submit(pipe, greedy([1, 2], ws))[0]
        await settle()
        child = inst.submit(side, greedy([3], inst.fork(ws, pipe)))[0]
        pipe.silent = True  # so that the child's step goes out behind the parent's
        engine.poke()
        await settle()
        assert len(runner.batches) == 2
        runner.hold = False
        runner.release()
        for out in (parent, child):
            with pytest.raises(PassFailed, match="the parent's step"):
                await out
        inst.close()


@pytest.mark.parametrize("where", ["fail_submit", "fail_results"])
async def test_a_lost_device_ends_everything_in_words(where: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("lost")
        setattr(runner, where, lambda batch: DeviceLost("unplugged"))
        out = inst.submit(inst.pipeline(), greedy([1], inst.working_set()))[0]
        with pytest.raises(EngineLost, match="unplugged"):
            await out
        with pytest.raises(EngineLost, match="unplugged"):
            engine.open_instance("late")


async def test_a_runner_bug_is_a_failed_step_not_a_dead_loop() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("bug")
        runner.fail_submit = lambda batch: ZeroDivisionError("oops")
        with pytest.raises(PassFailed, match="ZeroDivisionError: oops"):
            await inst.submit(inst.pipeline(), greedy([1], inst.working_set()))[0]
        runner.fail_submit = lambda batch: None
        assert await decode(inst, [1], 2) == generate([1], 2)
        inst.close()


async def test_stop_fails_what_is_left() -> None:
    runner = FakeRunner(delay=0.01)
    engine = Engine(runner)
    engine.start()
    inst = engine.open_instance("left")
    ws, pipe = inst.working_set(), inst.pipeline()
    outs = [inst.submit(pipe, greedy([k], ws))[0] for k in range(6)]
    await settle()
    await engine.stop()
    await engine.stop()
    ends = await asyncio.gather(*outs, return_exceptions=True)
    assert ends[0] == reference([0])
    assert isinstance(ends[-1], EngineStopped)
    assert engine.pool.used == 0
    with pytest.raises(EngineStopped):
        engine.open_instance("late")


@pytest.mark.parametrize("after", range(0, 24, 2))
async def test_closing_at_every_moment_frees_everything(after: int) -> None:
    runner = FakeRunner(limits(max_tokens=8), delay=0.0)
    async with running(runner) as engine:
        victim, other = engine.open_instance("victim"), engine.open_instance("other")
        healthy = asyncio.ensure_future(decode(other, list(range(20)), 6))
        ws, pipe, ch = victim.working_set(), victim.pipeline(), victim.channel("i32", host="reader")
        outs = [victim.submit(pipe, greedy(list(range(20)), ws))[0]]
        child = victim.fork(ws, pipe)
        outs += [victim.submit(pipe, greedy([k], s))[0] for k in range(4) for s in (ws, child)]
        await settle(after)
        victim.close()
        victim.close()
        assert victim.pages == 0 and victim.outstanding == 0
        for out in outs:
            assert out.done()
            if out.exception() is not None:
                assert isinstance(out.exception(), InstanceClosed)
        with pytest.raises(InstanceClosed):
            victim.pipeline()
        assert ch.closed
        assert await healthy == generate(list(range(20)), 6)
        other.close()


async def test_a_closed_pipeline_still_settles_and_still_ends_with_its_instance() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        first, second = engine.open_instance("first"), engine.open_instance("second")
        outs = []
        for inst in (first, second):
            pipe = inst.pipeline()
            outs.append(inst.submit(pipe, greedy([1], inst.working_set()))[0])
            inst.close_pipeline(pipe)
        await settle()
        first.close()
        with pytest.raises(InstanceClosed):
            await outs[0]
        runner.hold = False
        runner.release()
        assert await outs[1] == reference([1])
        assert not second.pipelines
        second.close()


async def test_what_can_never_fit_fails_with_numbers() -> None:
    async with running(FakeRunner(limits(pages=3))) as engine:
        inst, capped = engine.open_instance("big"), engine.open_instance("capped", limits=InstanceLimits(pages=1))
        with pytest.raises(OutOfPages, match="4 KV pages, more than the 3"):
            await inst.submit(inst.pipeline(), greedy([1] * 49, inst.working_set()))[0]
        with pytest.raises(OutOfPages, match="2 KV pages, more than the 1"):
            await capped.submit(capped.pipeline(), greedy([1] * 17, capped.working_set()))[0]
        pipe = capped.pipeline()
        await capped.submit(pipe, greedy([1], capped.working_set()))[0]
        with pytest.raises(OutOfPages, match="holds 1 KV pages and the pass needs 1 more"):
            await capped.submit(pipe, greedy([1], capped.working_set()))[0]
        inst.close()
        capped.close()


async def test_what_could_fit_later_waits() -> None:
    async with running(FakeRunner(limits(pages=4))) as engine:
        first, second = engine.open_instance("first"), engine.open_instance("second")
        await first.submit(first.pipeline(), greedy([1] * 48, first.working_set()))[0]
        waiting = second.submit(second.pipeline(), greedy([2] * 33, second.working_set()))[0]
        await asyncio.sleep(0.02)
        assert not waiting.done(), "the holder is silent, not stuck"
        first.close()
        assert await waiting == reference([2] * 33)
        second.close()


async def test_pitfall_19_scarcity_costs_few_requests() -> None:
    """40 requests that grow to 4 pages each in a pool of 60: the old finish first, at most a few of the young give way."""

    async def request(engine: Engine, k: int) -> str:
        inst: Instance = engine.open_instance(str(k))
        try:
            prompt = [k % 80] * 10
            return "ok" if await decode(inst, prompt, 50) == generate(prompt, 50) else "wrong"
        except OutOfPages as error:
            assert "60 KV pages" in str(error)
            return "gave way"
        finally:
            inst.close()

    async with running(FakeRunner(limits(pages=60, max_tokens=64, max_reads=64))) as engine:
        ends = await asyncio.gather(*(request(engine, k) for k in range(40)))
    assert "wrong" not in ends
    assert ends[0] == "ok"
    assert ends.count("gave way") <= 6, ends


async def test_a_waiting_giant_is_not_starved_and_starves_nobody() -> None:
    async with running(FakeRunner(limits(pages=8, context=128))) as engine:
        small, giant = engine.open_instance("small"), engine.open_instance("giant")
        ws, pipe = small.working_set(), small.pipeline()
        await small.submit(pipe, greedy([1] * 16, ws))[0]
        big = giant.submit(giant.pipeline(), greedy([2] * 128, giant.working_set()))[0]
        await settle()
        assert await decode(small, [3], 40, ws, pipe) == generate([1] * 16 + [3], 40)
        assert not big.done()
        small.close()
        assert await big == reference([2] * 128)
        giant.close()


async def test_cancel_mid_prefill_leaves_the_pool_whole() -> None:
    runner = FakeRunner(limits(max_tokens=4))
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("mid")
        out: Any = inst.submit(inst.pipeline(), greedy(list(range(60)), inst.working_set()))[0]
        await settle()
        assert len(runner.batches) == 2 and engine.pool.used == 4
        inst.close()
        assert engine.pool.used == 0
        with pytest.raises(InstanceClosed):
            await out
        again = engine.open_instance("again")
        runner.hold = False
        runner.release()
        assert await decode(again, list(range(20)), 3) == generate(list(range(20)), 3)
        again.close()
