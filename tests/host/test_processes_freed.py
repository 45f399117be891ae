"""What an inferlet leaves behind is freed by its references, at once: no cycle through its process keeps it until the garbage collector
looks."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.engine.loop import Engine
from pie_core.host.budget import Budget
from pie_core.host.process import InferletFailed, Process
from tests.engine.fake_runner import FakeRunner, limits
from tests.engine.support import GREEDY, running, settle
from tests.host.script_guest import Api, HostError, Script, ScriptGuest
from tests.host.support import SERVICES, alive, nothing_older, run
from tests.host.test_process import prefill_over_the_context_unseen, raises_itself, seed_loop, takes_what_nobody_puts, waits_for_room

Scene = Callable[[Engine], Awaitable[None]]


async def fails(engine: Engine, script: Script, kind: str, **more: Any) -> None:
    """Run a script that ends with an error of type `kind`."""
    try:
        await run(engine, script, **more)
    except InferletFailed as error:
        assert error.type == kind
    else:
        pytest.fail(f"it did not end with {kind}")


async def edits(engine: Engine) -> None:
    """Forks, drafts with commits of all kinds, and a set that is saved and opened."""

    async def script(api: Api, _: Any) -> None:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        counts = api.new("ch", dtype="u32", host="reader")
        await api.submit(pipe, ws, [1] * 20, prog)[0]
        for n in (2, [0, 1], None):
            out = api.submit(pipe, ws, [5, 6, 7], prog, geo={"mode": "buffered"})[0]
            api.call("ws.commit", ws=ws, n=n if n is not None else {"out": out.id})
            api.call("ws.discard", ws=ws, n=None)
        fork = api.new_id()
        api.call("ws.fork", ws=fork, of=ws, pipe=pipe, buffer=False)
        api.submit(pipe, fork, [5, 6], geo={"mode": "buffered"})
        api.call("ws.commit", ws=fork, n={"ch": counts})  # which nothing ever puts
        api.call("ws.drop", ws=ws)
        whole = api.new("ws")
        await api.submit(pipe, whole, [2] * 20, prog)[0]
        api.call("ws.truncate", ws=whole, n=0)
        await api.future("ws.save", ws=whole, name="kept")
        await api.future("ws.open", ws=api.new_id(), name="kept")
        await api.future("prewarm", ids=[4] * 20)
        await api.future("ws.length", ws=whole)

    await run(engine, script)


async def refusals(engine: Engine) -> None:
    """What the port refuses at the call, and what the engine refuses later: handles over the budget, and uses of them."""

    async def script(api: Api, _: Any) -> None:
        sets = [api.new("ws") for _ in range(2)]
        for op, fields in (("ws.commit", {"ws": sets[0], "n": 9}), ("ws.new", {"ws": sets[0]}), ("no.op", {}), ("ch.put", {"ch": 99})):
            with pytest.raises(HostError):
                api.call(op, **fields)
        api.submit(api.new("pipe"), sets[1], [1] * 600)
        with pytest.raises(HostError):
            await api.future("ws.length", ws=sets[1])

    await run(engine, script)


async def broken_handles(engine: Engine) -> None:
    """Handles that the engine refuses to make, and each use of them."""

    async def script(api: Api, _: Any) -> None:
        seeded = api.new("ch", dtype="i32", host="reader", seed=[1])
        writer = api.new("ch", dtype="i32", host="writer")
        api.call("ch.put", ch=writer, words=[1])
        prog, pipe, ws = api.program(GREEDY.program.text), api.new("pipe"), api.new("ws")
        for _ in range(2):
            with pytest.raises(HostError, match="refused"):
                await api.future("ch.take", ch=seeded)
        with pytest.raises(HostError, match="refused"):
            await api.submit(pipe, ws, {"ch": writer}, prog)[0]

    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    write, runner.write_arena = runner.write_arena, refuse  # type: ignore[method-assign]
    try:
        await run(engine, script)
    finally:
        runner.write_arena = write  # type: ignore[method-assign]


def refuse(word: int, data: bytes | bytearray | memoryview) -> None:
    """As a device that is short of something."""
    raise DeviceError("refused")


async def failing(engine: Engine) -> None:
    """Ends of the author's making, and such that only the engine finds."""
    await fails(engine, raises_itself, "ValueError")
    await fails(engine, waits_for_room, "Deadlock")
    await fails(engine, takes_what_nobody_puts, "ChannelEmpty")
    await fails(engine, prefill_over_the_context_unseen, "ContextLengthExceeded")


async def host_fault(engine: Engine) -> None:
    """A fault of our own in a posted op."""

    async def script(api: Api, _: Any) -> None:
        api.call("log", level="info", text="x")
        await api.future("sleep", ms=1000)

    def broken(level: str, text: str) -> None:
        raise OSError("no space left")

    logging.disable()  # pytest keeps what is logged, with its traceback
    try:
        await fails(engine, script, "HostError", on_log=broken)
    finally:
        logging.disable(logging.NOTSET)


async def talking(engine: Engine) -> None:
    """Messages both ways, some of which nobody reads, and timers that do not end."""

    async def script(api: Api, _: Any) -> None:
        api.future("sleep", ms=60_000)
        api.future("receive")
        await api.future("sleep", ms=1)
        api.call("send", value="unread")

    process = Process(engine, SERVICES, budget=Budget())
    task = asyncio.ensure_future(process.run(ScriptGuest(process.port, script), process.request("", None)))
    process.deliver({"to": "the first"})
    process.deliver("for nobody")
    await task


async def cancelled(engine: Engine) -> None:
    """By the host, and by the task's own end, with passes in flight; and one that never began."""
    for by_task in (False, True):
        process = Process(engine, SERVICES)
        task = asyncio.ensure_future(process.run(ScriptGuest(process.port, seed_loop), process.request("", list(range(60)))))
        await settle(5)
        task.cancel() if by_task else process.cancel("the client left")
        (told,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(told, asyncio.CancelledError if by_task else InferletFailed)
        del told, task  # the frame of a test is kept by what it raises, and the task by the frame
    Process(engine, SERVICES).close()


SCENES = [edits, refusals, broken_handles, failing, host_fault, talking, cancelled]


async def left_behind(scene: Scene) -> Counter[str]:
    """What a second run of `scene` leaves to the collector."""
    runner = FakeRunner(limits(pages=64))
    with nothing_older():
        async with running(runner) as engine:
            await scene(engine)  # what is kept for the next one is there now
            await settle()
            runner.batches.clear()
            gc.collect()
            before = alive("pie_core.")
            gc.disable()
            try:
                await scene(engine)
                await settle()
                runner.batches.clear()
                return alive("pie_core.") - before
            finally:
                gc.enable()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_nothing_waits_for_the_collector(scene: Scene) -> None:
    assert not await left_behind(scene)


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_step_loop_leaves_nothing(threaded: bool) -> None:
    """Its steps differ in nothing but a token; threaded, the guest's code runs beside the loop as in a sandbox."""

    async def scene(engine: Engine) -> None:
        await run(engine, seed_loop, [3, 1, 4], threaded=threaded)

    assert not await left_behind(scene)
