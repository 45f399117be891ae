"""A commit of a path that has to copy shared pages waits for them as passes do, and fails only where it would wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import greedy, settle
from tests.engine.test_wakeups import SOON, WINDOW, ask, fill, watched

STEM = list(range(1, 15))
DRAFTS = [31, 32, 33, 34]  # two branches of two
BRANCHES = Geometry.check("buffered", tree=[-1, 0, -1, 2])
PICKED = [*STEM, 33, 34]  # of the path [2, 3], whose rows move over those of the other branch


async def branches(inst: Instance) -> tuple[WorkingSet, WorkingSet, Pipeline]:
    """(a set with two branches in its buffer, a fork of it that holds the same two pages, a pipeline)."""
    ws, pipe = inst.working_set(), inst.pipeline()
    inst.submit(pipe, PassSpec(STEM, [ws]))
    await inst.submit(pipe, PassSpec(DRAFTS, [ws], BRANCHES))[0]
    return ws, inst.fork(ws, buffer=True), pipe


async def full(engine: Engine, pages: int, **more: Any) -> tuple[Instance, WorkingSet]:
    """Somebody who holds `pages` pages."""
    other = engine.open_instance("other")
    return other, await fill(other, [9] * (16 * pages), **more)


async def test_it_waits_for_a_silent_holder_and_what_is_behind_it_waits_too() -> None:
    async with watched(FakeRunner(limits(pages=6))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 4, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        out, ordered = inst.submit(pipe, greedy([40], fork))[0], inst.fork(fork)
        told: list[Any] = []
        inst.length(fork, lambda n, error: told.append((n, error)))
        await settle(100)
        assert not out.done() and not told and not ordered.born and not inst.stuck()
        other.close()
        assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 40])
        assert told == [(17, None)] and (ordered.length, ordered.frozen) == (17, 17)
        assert await asyncio.wait_for(ask(inst, [41], ordered), SOON) == reference([*PICKED, 40, 41])
        inst.close()


async def test_others_are_paused_for_it() -> None:
    async with watched(FakeRunner(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, idle = await full(engine, 2)
        inst.commit(fork, [2, 3])
        assert await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON) == reference([*PICKED, 40])
        assert idle.paused
        other.close()
        inst.close()


@pytest.mark.parametrize("how", ["drop the fork", "drop the set", "close"])
async def test_who_holds_the_page_goes(how: str) -> None:
    """Then nothing needs to be copied; and an edit of a set that was dropped is not made at all."""
    runner = FakeRunner(limits(pages=4))
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        copies = len(runner.copies)
        inst.commit(fork, [2, 3])
        await settle(20)
        if how == "close":
            inst.close()
            await settle(20)
            assert engine.pool.used == other.pages == 2 and not engine.scheduler.instances
        elif how == "drop the set":
            inst.drop(fork)
            await settle(20)
            assert fork.dropped and engine.pool.used == 4 and not engine.scheduler.instances
            inst.close()
        else:
            inst.drop(ws)
            out = inst.submit(pipe, greedy([40], fork))[0]
            assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 40])
            inst.close()
        assert len(runner.copies) == copies
        other.close()


async def test_what_would_wait_for_ever_fails_with_numbers() -> None:
    async with watched(FakeRunner(limits(pages=2))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        inst.commit(fork, [2, 3])
        with pytest.raises(OutOfPages, match="all 2 KV pages are in use and everybody who holds some waits for more"):
            await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON)
        inst.close()


async def test_a_limit_of_the_instance_is_no_reason_to_wait() -> None:
    async with watched(FakeRunner(limits(pages=8))) as engine:
        inst = engine.open_instance("inst", limits=InstanceLimits(pages=2))
        _, fork, pipe = await branches(inst)
        inst.commit(fork, [2, 3])
        with pytest.raises(OutOfPages, match="1 pages of the path are shared with a fork and must be copied; the instance holds 2"):
            await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON)
        inst.close()


async def test_a_device_fault_of_an_edit_that_waited() -> None:
    class Broken(FakeRunner):
        def copy_page(self, src: int, dst: int) -> None:
            raise DeviceError("it broke")

    async with watched(Broken(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        out = inst.submit(pipe, greedy([40], fork, geometry=BUFFERED))[0]
        await settle(20)
        other.close()
        with pytest.raises(PassFailed, match="it broke"):
            await asyncio.wait_for(out, SOON)
        inst.close()


async def test_edits_behind_it_keep_their_order() -> None:
    async with watched(FakeRunner(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        inst.submit(pipe, PassSpec([50, 51], [fork], BUFFERED))
        inst.commit(fork, 1)
        inst.discard(fork)
        out = inst.submit(pipe, greedy([40], fork))[0]
        await settle(20)
        assert (fork.length, fork.frozen) == (18, 14)
        other.close()
        assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 50, 40])
        inst.close()
