"""Who waits is found again: by the next step, by a poke, or by a timer; and who fits is not held up by who does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pie_core.engine.errors import EngineLost, OutOfPages
from pie_core.engine.forward import BUFFERED, Geometry
from pie_core.engine.instance import Instance
from pie_core.engine.pausing import PATIENCE
from pie_core.engine.step import Step
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.recurrent_runner import RecurrentRunner, recurrent_limits
from tests.engine.support import decode, greedy, settle
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

WINDOW = Geometry(window=400)  # sees everything, but its tokens have no recipe: such a set is never paused
SOON = 2.0  # seconds; longer than any timer of the engine


@asynccontextmanager
async def watched(runner: FakeRunner, **more: Any) -> AsyncIterator[Watched]:
    engine = Watched(runner, predict=True, **more)
    engine.start()
    try:
        yield engine
        engine.check_asleep()
    finally:
        await engine.stop()
    assert engine.lost is None and engine.pool.used == 0 and engine.pool.unlent == engine.pool.total


async def fill(inst: Instance, tokens: list[int], ws: WorkingSet | None = None, **more: Any) -> WorkingSet:
    """A set that holds `tokens`, made by a pipeline that is closed again."""
    ws, pipe = ws or inst.working_set(), inst.pipeline()
    await inst.submit(pipe, greedy(tokens, ws, **more))[0]
    inst.close_pipeline(pipe)
    return ws


def ask(inst: Instance, tokens: list[int], ws: WorkingSet | None = None, **more: Any) -> asyncio.Future[Any]:
    """A pass in a pipeline of its own."""
    return inst.submit(inst.pipeline(), greedy(tokens, ws or inst.working_set(), **more))[0]


async def test_a_pass_whose_last_tokens_find_too_little_room_beside_a_silent_stream() -> None:
    """It runs first in the next step, and there is no other reason for a next step."""
    async with watched(FakeRunner()) as engine:
        stream, inst = engine.open_instance("stream"), engine.open_instance("inst")
        await stream.submit(stream.pipeline(), greedy([1], stream.working_set()))[0]
        out = ask(inst, [2] * 20, reads=[[0, 19]])
        assert await asyncio.wait_for(out, SOON) == reference([2])
        stream.close()
        inst.close()


def test_a_set_with_a_guess_is_paused_once_it_is_cold() -> None:
    async def scene() -> None:
        async with watched(FakeRunner(limits(pages=10))) as engine:
            loop, inst = engine.open_instance("loop"), engine.open_instance("inst")
            ws = loop.working_set()
            await decode(loop, [1] * 40, 8, ws, loop.pipeline())
            await settle(20)
            assert ws.guess is not None
            assert await asyncio.wait_for(ask(inst, [2] * 144), SOON) == reference([2] * 144)
            assert ws.paused
            loop.close()
            inst.close()

    clock = VirtualLoop()  # guesses are made in time or not at all
    clock.run_until_complete(scene())
    clock.close()


async def test_a_set_is_cold_when_the_timer_rings_whatever_rounding_does() -> None:
    """The timer is set for the moment `used_at` + PATIENCE; the difference of the two may come out as less than PATIENCE."""
    used_at = next(x for x in (1000 + k / 7 for k in range(1000)) if (x + PATIENCE) - x < PATIENCE)
    async with watched(FakeRunner(limits(pages=4))) as engine:
        idle, inst = engine.open_instance("idle"), engine.open_instance("inst")
        ws = await fill(idle, [1] * 40)
        ws.used_at = engine.now() + 60
        out = ask(inst, [2] * 33)
        await settle(100)
        assert len(engine.scheduler.waiting) == 1
        ws.used_at = used_at
        assert engine.pressure.relieve(used_at + PATIENCE, set(), halted=True) == (True, 0.0)
        engine.poke()
        assert await asyncio.wait_for(out, SOON) == reference([2] * 33)
        idle.close()
        inst.close()


@pytest.mark.parametrize(("drafts", "tokens"), [(21, 16), (13, 12)])
async def test_a_short_pass_that_with_what_it_replays_is_over_a_step(drafts: int, tokens: int) -> None:
    async with watched(RecurrentRunner(recurrent_limits(max_tokens=24))) as engine:
        inst = engine.open_instance("inst")
        ws, pipe = inst.working_set(), inst.pipeline()
        for n in (7, drafts - 7):
            await inst.submit(pipe, greedy([1] * n, ws, geometry=BUFFERED))[0]
        inst.commit(ws, drafts)
        out = inst.submit(pipe, greedy([2] * tokens, ws))[0]
        assert await asyncio.wait_for(out, SOON) == reference([1] * drafts + [2] * tokens)
        inst.close()


async def test_who_fits_goes_past_who_waits_for_a_silent_holder() -> None:
    """A set that cannot be paused and nobody uses: a prompt that needs its pages waits, a small request does not, and what the holder
    gives back goes to the one that waited for it."""
    async with watched(FakeRunner(limits(pages=10))) as engine:
        silent, big, small = (engine.open_instance(name) for name in ("silent", "big", "small"))
        await fill(silent, [1] * 60, geometry=WINDOW)
        waits = ask(big, [2] * 120)
        await settle(100)
        for k in range(3):
            assert await asyncio.wait_for(ask(small, [3 + k]), SOON) == reference([3 + k])
        assert not waits.done()
        small.close()
        silent.close()
        assert await asyncio.wait_for(waits, SOON) == reference([2] * 120)
        big.close()


async def test_who_fits_does_not_give_way_to_who_does_not() -> None:
    """All holders wait, but one only behind the other: it needs less than there is, ends, and then there is enough for all."""
    async with watched(FakeRunner(limits(pages=10))) as engine:
        old, young = engine.open_instance("old"), engine.open_instance("young")
        sets = [await fill(inst, [1] * 64, geometry=WINDOW) for inst in (old, young)]
        outs = [ask(old, [2] * 60, sets[0], geometry=WINDOW)]
        await settle(100)
        outs.append(ask(young, [3], sets[1], geometry=WINDOW))
        assert await asyncio.wait_for(outs[1], SOON) == reference([1] * 64 + [3])
        young.close()
        assert await asyncio.wait_for(outs[0], SOON) == reference([1] * 64 + [2] * 60)
        assert engine.metrics.failed_passes == 0
        old.close()


async def test_newcomers_that_went_past_do_not_hide_that_all_others_are_stuck() -> None:
    async with watched(FakeRunner(limits(pages=10))) as engine:
        old, young, guest, late = (engine.open_instance(name) for name in ("old", "young", "guest", "late"))
        sets = [await fill(inst, [1] * 64, geometry=WINDOW) for inst in (old, young)]
        first = ask(old, [2] * 60, sets[0], geometry=WINDOW)
        await settle(100)
        await asyncio.wait_for(ask(guest, [3]), SOON)  # `young` is silent and may free what it has
        second = ask(young, [2] * 60, sets[1], geometry=WINDOW)
        third = ask(late, [4])
        await settle(100)
        assert not third.done(), "nobody is left who could help those that wait"
        guest.close()
        with pytest.raises(OutOfPages, match="this, the youngest instance, gives way: its working sets hold 4"):
            await asyncio.wait_for(second, SOON)
        assert await asyncio.wait_for(third, SOON) == reference([4])
        young.close()
        assert await asyncio.wait_for(first, SOON) == reference([1] * 64 + [2] * 60)
        for inst in (old, late):
            inst.close()


async def test_nobody_is_paused_in_vain() -> None:
    """All that could be paused would not make enough: it stays, until it would."""
    async with watched(FakeRunner(limits(pages=10))) as engine:
        silent, idle, big = (engine.open_instance(name) for name in ("silent", "idle", "big"))
        await fill(silent, [1] * 60, geometry=WINDOW)
        ws = await fill(idle, [2] * 30)
        waits = ask(big, [3] * 120)
        await asyncio.sleep(0.15)
        assert not waits.done() and not ws.paused
        silent.close()
        assert await asyncio.wait_for(waits, SOON) == reference([3] * 120)
        assert engine.metrics.paused == 0
        big.close()
        idle.close()


async def test_cold_sets_and_those_that_wait_are_paused_together() -> None:
    """Neither alone would do."""
    async with watched(FakeRunner(limits(pages=10))) as engine:
        old, idle, young = (engine.open_instance(name) for name in ("old", "idle", "young"))
        cold, ws = await fill(idle, [1] * 60), await fill(young, [2] * 60)
        await asyncio.sleep(0.1)
        outs = [ask(old, [3] * 150), ask(young, [4] * 60, ws)]
        assert await asyncio.wait_for(outs[0], SOON) == reference([3] * 150)
        assert cold.paused
        old.close()
        assert await asyncio.wait_for(outs[1], SOON) == reference([2] * 60 + [4] * 60)
        idle.close()
        young.close()


async def test_slots_and_pages_that_are_short_together() -> None:
    """The pass is promised both: nobody takes its pages while it waits for a slot."""
    async with watched(RecurrentRunner(recurrent_limits(2, pages=8))) as engine:
        insts = [engine.open_instance(str(k)) for k in range(4)]
        outs = [ask(inst, [k + 1] * 60) for k, inst in enumerate(insts)]
        for k, inst in enumerate(insts):
            assert await asyncio.wait_for(outs[k], SOON) == reference([k + 1] * 60)
            inst.close()
        assert engine.metrics.failed_passes == 0


async def test_slots_are_kept_for_the_oldest_that_waits() -> None:
    """While somebody else runs (with two steps in flight it has three slots), a newcomer takes none of those that an older pass over four
    sets collects."""
    async with watched(RecurrentRunner(recurrent_limits(7))) as engine:
        busy, four, late, *held = (engine.open_instance(str(k)) for k in range(5))
        for inst in held:
            await ask(inst, [1] * 4, geometry=Geometry(window=9))  # cannot be paused
        ws, pipe = busy.working_set(), busy.pipeline()
        steps = [busy.submit(pipe, greedy([5], ws))[0] for _ in range(300)]
        await steps[0]
        waits = four.submit(four.pipeline(), greedy([[2 + k] for k in range(4)], *(four.working_set() for _ in range(4))))[0]
        await steps[5]
        newcomer = ask(late, [4])
        await steps[20]
        assert not waits.done() and not newcomer.done()
        for inst in held:
            inst.close()
        assert await asyncio.wait_for(waits, SOON) == reference([2])
        assert not steps[-1].done(), "it was not for want of anything else to run"
        four.close()
        assert await asyncio.wait_for(newcomer, SOON) == reference([4])
        for inst in (busy, late):
            inst.close()


async def test_the_watch_finds_a_lost_wake_up() -> None:
    """One fill overlooks a pass that the next one finds: the check can fail."""
    engine = Watched(FakeRunner())
    engine.start()
    inst = engine.open_instance("inst")
    real = engine.scheduler.fill
    looks: list[int] = []

    def overlook(number: int) -> Step:
        looks.append(number)
        return Step(number, engine.limits) if len(looks) == 1 else real(number)

    engine.scheduler.fill = overlook  # type: ignore[method-assign]
    out = ask(inst, [1])
    await settle(20)
    assert engine.lost is not None and "AssertionError: a lost wake-up" in str(engine.lost)
    told = out.exception()
    assert isinstance(told, EngineLost) and str(told) == str(engine.lost)
    await engine.stop()
