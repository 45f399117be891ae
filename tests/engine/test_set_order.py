"""Passes on one working set run in the order in which they were accepted, whatever their pipelines; forks and edits keep their places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.engine.errors import PassSkipped
from pie_core.engine.forward import BUFFERED, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put, take
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import argmax, greedy, running, settle, spec

PROMPT = [(7 * k + 3) % 40 for k in range(50)]  # two steps, of at most 32 tokens
Opened = tuple[Instance, Pipeline, WorkingSet]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "prefix cached"])
@pytest.mark.parametrize("first", [1, 16, 17, 50], ids=lambda n: f"{n} first")
@pytest.mark.parametrize("silent", [False, True], ids=["with an epilogue", "without one"])
async def test_a_pass_of_another_pipeline_does_not_overtake(silent: bool, first: int, warm: bool) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("two")
        if warm:
            await inst.submit(inst.pipeline(), greedy(PROMPT, inst.working_set()))[0]
        ws, tokens, outs = inst.working_set(), PROMPT[:first], []
        before = inst.submit(inst.pipeline(), PassSpec(tokens, [ws]) if silent else greedy(tokens, ws))[0]
        for k in range(4):
            tokens = [*tokens, k]
            outs.append((inst.submit(inst.pipeline(), greedy([k], ws))[0], reference(tokens)))
        assert [await out for out, _ in outs] == [expected for _, expected in outs]
        assert await before == (True if silent else reference(PROMPT[:first]))
        inst.close()


async def test_a_set_of_several_keeps_the_order_in_each() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("several")
        one, two = inst.working_set(), inst.working_set()
        long = inst.submit(inst.pipeline(), greedy(PROMPT, one))[0]
        both = inst.submit(inst.pipeline(), greedy([[1], [2, 3]], one, two))[0]
        last = inst.submit(inst.pipeline(), greedy([4], two))[0]
        assert await asyncio.gather(long, both, last) == [reference(PROMPT), reference([*PROMPT, 1]), reference([2, 3, 4])]
        inst.close()


def _fork(inst: Instance, ws: WorkingSet, pipe: Pipeline) -> tuple[WorkingSet, list[int]]:
    return inst.fork(ws, pipe, buffer=True), [*PROMPT, 1]


def _fork_unordered(inst: Instance, ws: WorkingSet, pipe: Pipeline) -> tuple[WorkingSet, list[int]]:
    return inst.fork(ws), PROMPT


def _discard(inst: Instance, ws: WorkingSet, pipe: Pipeline) -> tuple[WorkingSet, list[int]]:
    inst.discard(ws)
    return ws, PROMPT


def _commit(inst: Instance, ws: WorkingSet, pipe: Pipeline) -> tuple[WorkingSet, list[int]]:
    inst.commit(ws, 1)
    return ws, [*PROMPT, 1]


def _truncate(inst: Instance, ws: WorkingSet, pipe: Pipeline) -> tuple[WorkingSet, list[int]]:
    inst.truncate(ws, 0)
    return ws, []


@pytest.mark.parametrize("change", [_fork, _fork_unordered, _discard, _commit, _truncate])
async def test_what_is_behind_a_chunked_prefill_of_another_pipeline_waits_for_it(change: Callable[..., Any]) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("behind")
        ws, pipes = inst.working_set(), [inst.pipeline() for _ in range(3)]
        outs = [inst.submit(pipes[0], greedy(PROMPT, ws))[0], inst.submit(pipes[1], greedy([1], ws, geometry=BUFFERED))[0]]
        after, tokens = change(inst, ws, pipes[2])
        outs.append(inst.submit(pipes[2], greedy([5], after, geometry=BUFFERED))[0])
        assert await asyncio.gather(*outs) == [reference(PROMPT), reference([*PROMPT, 1]), reference([*tokens, 5])]
        inst.close()


async def opened(inst: Instance) -> tuple[Opened, Any, Any]:
    """A pass that waits for a cell which nothing has put yet, and one of another pipeline behind it on the same set."""
    cell = inst.channel("u32", (), 1)
    ws, pipe = inst.working_set(), inst.pipeline()

    def waits() -> Any:
        take(cell)
        return argmax()

    first = inst.submit(pipe, spec([1], [ws], waits))[0]
    second = inst.submit(inst.pipeline(), greedy([2], ws))[0]
    await settle()
    assert not first.done() and not second.done()
    return (inst, pipe, ws), cell, (first, second)


async def test_a_pass_that_waits_for_a_cell_holds_up_its_set_only() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("waits")
        _, cell, (first, second) = await opened(inst)
        assert inst.stuck(), "only the instance itself can bring the cell"
        assert await inst.submit(inst.pipeline(), greedy([9], inst.working_set()))[0] == reference([9])

        def gives() -> Any:
            out = argmax()
            put(cell, out.cast("u32"))
            return out

        await inst.submit(inst.pipeline(), spec([3], [inst.working_set()], gives))[0]
        assert await asyncio.gather(first, second) == [reference([1]), reference([1, 2])]
        inst.close()


async def test_behind_a_pass_that_a_stop_cancels_the_others_go_on() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("stops")
        (_, pipe, ws), _, (first, second) = await opened(inst)
        pipe.stop()
        engine.poke()
        with pytest.raises(PassSkipped):
            await first
        assert await second == reference([2])
        assert await inst.submit(inst.pipeline(), greedy([3], ws))[0] == reference([2, 3])
        assert not ws.line
        inst.close()


async def test_cancelled_in_the_middle_of_the_line() -> None:
    runner = FakeRunner(limits(max_tokens=8))
    async with running(runner) as engine:
        inst = engine.open_instance("middle")
        (_, _, ws), cell, (first, second) = await opened(inst)
        stopped = inst.pipeline()
        gone = [inst.submit(stopped, greedy([k], ws))[0] for k in (5, 6)]
        last = inst.submit(inst.pipeline(), greedy([7], ws))[0]
        stopped.stop()
        for out in gone:
            with pytest.raises(PassSkipped):
                await out

        def gives() -> Any:
            put(cell, argmax().cast("u32"))
            return argmax()

        await inst.submit(inst.pipeline(), spec([3], [inst.working_set()], gives))[0]
        assert await asyncio.gather(first, second, last) == [reference([1]), reference([1, 2]), reference([1, 2, 7])]
        assert not ws.line
        inst.close()
