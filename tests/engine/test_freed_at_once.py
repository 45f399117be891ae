"""What a request leaves behind is freed by its references, at once: no cycle keeps it until the garbage collector looks.

Cycles would let memory grow by what the requests of minutes made, and the collector would stop the step loop to look through them.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import DeviceError
from pie_core.engine.channel import Channel
from pie_core.engine.edit_order import EditOrder
from pie_core.engine.errors import EngineError
from pie_core.engine.forward import BUFFERED, Part, Pass, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pausing import PATIENCE, Revival
from pie_core.engine.pipeline import ForkEntry, Pipeline
from pie_core.engine.predict import Guess
from pie_core.engine.recipe import Recipe
from pie_core.engine.set_requests import Edit, LateCommit
from pie_core.engine.step import Step
from pie_core.engine.waiting_edit import WaitingEdit
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.trace import Trace
from tests.engine.fake_runner import VOCAB, FakeRunner, limits
from tests.engine.support import argmax, decode, greedy, running, settle, spec

OURS = (
    Channel, Edit, EditOrder, EngineError, ForkEntry, Guess, Instance, LateCommit, Part, Pass, Pipeline, Recipe, Revival, Step, Trace,
    WaitingEdit, WorkingSet, asyncio.Future,
)  # fmt: skip


def ours() -> Counter[str]:
    """The engine's objects that are there, by type."""
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, OURS))


async def chat(engine: Engine) -> None:
    """A decode loop, long enough to be guessed, and a second turn."""
    inst = engine.open_instance("chat")
    ws, pipe = inst.working_set(), inst.pipeline()
    said = await decode(inst, [1] * 20, 12, ws, pipe)
    await decode(inst, [said[-1], 5, 6], 8, ws, pipe)
    inst.close()


async def closed_pipelines(engine: Engine) -> None:
    """Closed with a pass in flight."""
    inst = engine.open_instance("closed")
    ws, pipe = inst.working_set(), inst.pipeline()
    token = (await decode(inst, [1] * 20, 5, ws, pipe))[-1]
    out = inst.submit(pipe, greedy([token], ws))[0]
    inst.close_pipeline(pipe)
    await out
    inst.drop(ws)
    await settle()
    inst.close()


async def branches(engine: Engine) -> None:
    """Forks behind a pass, and of forks; one dropped, the others closed with the instance."""
    inst = engine.open_instance("branches")
    ws, pipe = inst.working_set(), inst.pipeline()
    inst.submit(pipe, PassSpec([2] * 20, [ws]))
    sets = [inst.fork(ws, pipe) for _ in range(3)]
    sets.append(inst.fork(sets[0]))
    await asyncio.gather(*(decode(inst, [k], 4, fork) for k, fork in enumerate(sets)))
    inst.drop(sets[0])
    await decode(inst, [3], 2, sets[1], pipe)
    inst.close()


async def drafts(engine: Engine) -> None:
    """Edits that wait for passes, and commits by a count in a channel."""
    inst = engine.open_instance("drafts")
    ws, pipe, counts = inst.working_set(), inst.pipeline(), inst.channel("i32", (), 4, host="reader")

    def count() -> Any:
        eta.channel.put(counts, 2)
        return argmax()

    await inst.submit(pipe, greedy([3] * 20, ws))[0]
    for _ in range(3):
        inst.submit(pipe, greedy([1, 2, 3, 4], ws, geometry=BUFFERED))
        inst.commit(ws, 2)
        inst.discard(ws, 2)
        inst.submit(pipe, spec([1, 2, 3, 4], [ws], count, BUFFERED))
        inst.commit(ws, counts)
        inst.discard(ws)
    await decode(inst, [9], 2, ws, pipe)
    inst.truncate(ws, 10)
    inst.close()


async def self_feeding(engine: Engine) -> None:
    """A loop that is stopped on the device."""
    inst = engine.open_instance("self-feeding")
    ws, pipe = inst.working_set(), inst.pipeline()
    cell, stop = inst.channel("i32", (1,), 2), inst.channel("bool", (), 1)
    pipe.stop_when(stop)

    def step() -> Any:
        token = argmax()
        eta.channel.put(cell, token)
        eta.channel.put(stop, token >= VOCAB // 2)
        return token

    outs = [inst.submit(pipe, spec([4] * 20, [ws], step))[0]]
    outs += [inst.submit(pipe, spec(cell, [ws], step))[0] for _ in range(7)]
    await asyncio.gather(*outs, return_exceptions=True)
    inst.close()


async def failing(engine: Engine) -> None:
    """An id outside the vocabulary, told to passes, edits and forks behind it."""
    inst = engine.open_instance("failing")
    ws, pipe, cell = inst.working_set(), inst.pipeline(), inst.channel("i32", (1,), 1, host="writer")
    inst.put(cell, [VOCAB + 1])
    outs = [inst.submit(pipe, greedy(cell, ws))[0], inst.submit(pipe, greedy([1], ws))[0]]
    inst.commit(ws, 7)
    outs.append(inst.submit(pipe, greedy([1], inst.fork(ws, pipe)))[0])
    told = await asyncio.gather(*outs, return_exceptions=True)  # raised through a frame that holds its future, an error makes a cycle
    assert all(isinstance(error, EngineError) for error in told)
    inst.close()


async def device_faults(engine: Engine) -> None:
    """A step that the device refuses."""
    inst = engine.open_instance("fault")
    ws, pipe = inst.working_set(), inst.pipeline()
    token = (await decode(inst, [1] * 20, 6, ws, pipe))[-1]
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    faults = [DeviceError("refused")]
    runner.fail_submit = lambda batch: faults.pop() if faults else None
    told = await asyncio.gather(*(inst.submit(pipe, greedy([token], ws))[0] for _ in range(2)), return_exceptions=True)
    assert any(isinstance(error, EngineError) for error in told)
    inst.close()


async def cancelled(engine: Engine) -> None:
    """Closed with passes in flight and queued, forks and edits behind them, and takes that wait."""
    inst = engine.open_instance("cancelled")
    ws, pipe = inst.working_set(), inst.pipeline()
    counts = inst.channel("i32", (), 4, host="reader")
    outs = [inst.submit(pipe, greedy([k] * 40, ws))[0] for k in range(4)]
    outs.append(inst.submit(pipe, greedy([1], inst.fork(ws, pipe)))[0])
    outs.append(inst.take(counts))
    inst.submit(pipe, greedy([1, 2, 3], ws, geometry=BUFFERED))
    inst.commit(ws, 2)
    inst.commit(ws, counts)
    inst.discard(ws)
    await asyncio.sleep(0)
    inst.close()
    told = await asyncio.gather(*outs, return_exceptions=True)
    assert all(isinstance(error, EngineError) for error in told)


async def paused(engine: Engine) -> None:
    """Sets that are paused and computed again, and one that is dropped meanwhile."""
    first, second = engine.open_instance("first"), engine.open_instance("second")
    ws, gone = first.working_set(), first.working_set()
    await decode(first, [1] * 100, 2, ws)
    await decode(first, [2] * 100, 2, gone)
    await asyncio.sleep(PATIENCE)
    await decode(second, [3] * 200, 2)
    assert ws.paused and gone.paused
    second.close()
    await decode(first, [3], 2, ws)
    out = first.submit(first.pipeline(), greedy([1], gone))[0]
    first.drop(gone)
    await out
    first.close()


SCENES = [chat, closed_pipelines, branches, drafts, self_feeding, failing, device_faults, cancelled, paused]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_nothing_waits_for_the_collector(scene: Callable[[Engine], Awaitable[None]]) -> None:
    async with running(FakeRunner(limits(pages=16))) as engine:
        await scene(engine)  # what is kept for the next one is there now
        await settle()
        gc.collect()
        before = ours()
        gc.disable()
        try:
            await scene(engine)
            await settle()
            left = ours() - before
        finally:
            gc.enable()
        assert not left, f"{scene.__name__}: {dict(left)} wait for the garbage collector"
