"""What is bound to be rejected costs no layers: passes behind a fault that is known are not scheduled, and no set comes back for them."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from pie_core import eta
from pie_core.engine.errors import ContextLengthExceeded, EngineError, PassFailed
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put, take
from pie_core.eta.program import Program
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import argmax, decode, greedy, settle, spec
from tests.engine.test_wakeups import SOON, ask, fill, watched


class FaultyRunner(FakeRunner):
    """The device reports a NaN row for the lane number `bad`, counted from 1."""

    bad = 0
    lanes = 0

    def _lane(self, program: Program, lane: array[int], readouts: list[int | None], results: array[int]) -> None:
        super()._lane(program, lane, readouts, results)
        self.lanes += 1
        if self.lanes == self.bad:
            results[lane[1]] = 1


@pytest.mark.parametrize(("ahead", "steps"), [(2, 4), (4, 5)])  # the third of 20 passes fails
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_loop_that_feeds_itself_runs_no_step_behind_a_fault_that_was_read(ahead: int, steps: int, at_once: bool) -> None:
    """Only what was in flight with the pass that failed has run; also where many steps are read at once."""
    runner = FaultyRunner(limits(ahead=ahead))
    runner.bad, runner.hold = 3, at_once
    async with watched(runner, ahead=ahead) as engine:
        inst = engine.open_instance("loop")
        ch, ws, pipe = inst.channel("i32", (), 1, seed=[5]), inst.working_set(), inst.pipeline()

        def feed() -> Any:
            token = argmax()
            put(ch, token)
            return token

        outs = [inst.submit(pipe, spec(ch, [ws], feed))[0] for _ in range(20)]
        while not all(out.done() for out in outs):
            await settle(30)
            runner.release()
        assert [out.exception() is None for out in outs] == [True] * 2 + [False] * 18
        assert all(isinstance(out.exception(), PassFailed) for out in outs[2:])
        assert len(runner.batches) == steps
        inst.close()


async def paused(inst: Instance, tokens: list[int]) -> WorkingSet:
    ws = await fill(inst, tokens)
    ws.pause()
    inst.engine.cache.clear()
    return ws


async def test_no_set_comes_back_for_a_pass_of_which_another_set_has_failed() -> None:
    runner = FaultyRunner()
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws, other = await paused(inst, [1] * 60), inst.working_set()
        runner.bad = runner.lanes + 1
        with pytest.raises(PassFailed):
            await ask(inst, [2], other)
        steps = len(runner.batches)
        with pytest.raises(EngineError):
            await asyncio.wait_for(inst.submit(inst.pipeline(), greedy([[3], [4]], ws, other))[0], SOON)
        await settle(20)
        assert len(runner.batches) == steps and ws.paused and engine.metrics.revived == 0
        inst.truncate(ws, 60)
        assert await decode(inst, [5], 1, ws) == [reference([1] * 60 + [5])]
        inst.close()


async def test_no_set_comes_back_for_a_pass_whose_cell_is_poisoned() -> None:
    runner = FaultyRunner()
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws, ch = await paused(inst, [1] * 60), inst.channel("i32")

        def tell() -> Any:
            put(ch, argmax())
            return argmax()

        runner.bad = runner.lanes + 1
        with pytest.raises(PassFailed):
            await inst.submit(inst.pipeline(), spec([2], [inst.working_set()], tell))[0]
        steps = len(runner.batches)
        with pytest.raises(PassFailed):
            await asyncio.wait_for(inst.submit(inst.pipeline(), spec([3], [ws], lambda: argmax() + take(ch)))[0], SOON)
        assert len(runner.batches) == steps and ws.paused and engine.metrics.revived == 0
        inst.close()


async def test_no_set_comes_back_for_a_pass_that_is_too_long() -> None:
    runner = FakeRunner(limits(context=80, max_tokens=16))
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws = await paused(inst, [1] * 60)
        pipe, gate = inst.pipeline(), inst.channel("i32")
        steps = len(runner.batches)
        out = inst.submit(pipe, PassSpec([2] * 21, [ws]))[0]
        with pytest.raises(ContextLengthExceeded, match="81 exceed the context of 80"):
            await asyncio.wait_for(out, SOON)
        assert len(runner.batches) == steps and engine.metrics.revived == 0 and not gate.closed
        inst.close()


async def test_a_set_comes_back_when_nothing_else_holds_its_pass_up() -> None:
    """A pass that waits for a cell takes no pages from others meanwhile."""
    runner = FakeRunner()
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws, ch = await paused(inst, [1] * 60), inst.channel("i32")
        out = inst.submit(inst.pipeline(), spec([2], [ws], lambda: argmax() + eta.cast(take(ch), "i32")))[0]
        await settle(50)
        assert ws.paused and engine.metrics.revived == 0
        maker = inst.submit(inst.pipeline(), spec([3], [inst.working_set()], lambda: put(ch, argmax())))[0]
        assert await asyncio.wait_for(out, SOON) == reference([1] * 60 + [2]) + reference([3])
        assert await maker is True and engine.metrics.revived == 1
        inst.close()
