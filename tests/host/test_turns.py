"""Posts in slices, and programs that compile in turns: others go on between them, nothing changes its order, nobody waits for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pie_core.engine import compile_turns
from pie_core.engine.runner import StepBatch
from pie_core.eta.channel import read
from pie_core.eta.program import Program
from pie_core.host import executor
from pie_core.host.process import Process
from tests.codegen.author import Chan
from tests.engine.fake_runner import FakeHandle, FakeRunner, generate, reference
from tests.engine.support import GREEDY, decode, greedy, running
from tests.engine.test_program_faults import different, traced
from tests.host.script_guest import Api, HostError, ScriptGuest
from tests.host.support import SERVICES, run

COSTLY = [traced(different(k)) for k in range(1, 7)]


class Slow(FakeRunner):
    """Every program but the greedy one takes longer to compile than there is room for between two steps. `order`: what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        if program.hash != GREEDY.program.hash:
            time.sleep(1.1 * compile_turns.ROOM)
            self.order.append("compiled")

    def submit(self, batch: StepBatch) -> FakeHandle:
        self.order.append("step")
        return super().submit(batch)


async def submits(api: Api, _: Any) -> list[Any]:
    """Six programs nobody has seen, and one that is known behind each, on the same set."""
    known = api.program(GREEDY.program.text)
    got = []
    for made in COSTLY:
        ws, pipe = api.new("ws"), api.new("pipe")
        got.append(api.submit(pipe, ws, [1, 2], api.program(made.program.text), params=list(made.params))[0])
        got.append(api.submit(pipe, ws, [3], known)[0])
    return [await future for future in got]


async def test_one_costly_program_compiles_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_turns, "PATIENCE", 20.0)  # who is at work always comes back in time
    runner = Slow()
    async with running(runner) as engine:
        inst = engine.open_instance("neighbour")
        ws, pipe = inst.working_set(), inst.pipeline()
        over = False

        async def neighbour() -> list[int]:
            tokens, feed = [], [5]
            while not over:
                feed = await decode(inst, feed, 1, ws, pipe)
                tokens += feed
            return tokens

        beside = asyncio.create_task(neighbour())
        await asyncio.sleep(0.01)
        start = len(runner.order)
        assert await run(engine, submits) == [reference([1, 2]), reference([1, 2, 3])] * len(COSTLY)
        over = True
        tokens = await beside
        assert tokens == generate([5], len(tokens))
        inst.close()
    runs = "".join(what[0] for what in runner.order[start:]).split("s")
    assert sum(map(len, runs)) == len(COSTLY)
    assert max(map(len, runs)) == 1, "others had a step between any two"


async def test_nobody_waits_where_nobody_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_turns, "PATIENCE", 1000.0)

    async def script(api: Api, _: Any) -> str:
        outs = []
        for made in COSTLY:  # each waits for a token that nobody puts, so that no step runs
            ws, pipe, ch = api.new("ws"), api.new("pipe"), api.new("ch", dtype="i32", shape=[1], capacity=1)
            outs += api.submit(pipe, ws, {"ch": ch}, api.program(made.program.text), params=list(made.params))
        with pytest.raises(HostError) as told:
            await outs[-1]
        return told.value.type

    runner = Slow()
    async with running(runner) as engine:
        assert await asyncio.wait_for(run(engine, script, receives=False), 100) == "Deadlock"
    assert runner.order == ["compiled"] * len(COSTLY)


async def test_a_guess_that_others_come_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_turns, "PATIENCE", 0.01)
    runner = Slow()
    runner.hold = True  # a step that does not end
    async with running(runner) as engine:
        inst = engine.open_instance("stalled")
        stalled = inst.submit(inst.pipeline(), greedy([5], inst.working_set()))[0]
        await asyncio.sleep(0)
        task = asyncio.create_task(run(engine, submits))
        async with asyncio.timeout(20):
            while runner.order.count("compiled") < len(COSTLY):
                await asyncio.sleep(0.001)
        runner.hold = False
        runner.release()
        assert await stalled == reference([5])
        while not task.done():
            runner.release()
            await asyncio.sleep(0.001)
        assert len(await task) == 2 * len(COSTLY)
        inst.close()


@pytest.mark.parametrize("threaded", [False, True])
async def test_posts_are_carried_out_in_slices_and_in_order(monkeypatch: pytest.MonkeyPatch, threaded: bool) -> None:
    monkeypatch.setattr(executor, "SLICE", 0.0)  # one post a turn
    lines: list[str] = []

    async def script(api: Api, _: Any) -> list[int]:
        for k in range(200):
            api.call("log", level="info", text=str(k))
        known, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        return [await future for future in [api.submit(pipe, ws, [k], known)[0] for k in range(3)]]

    async with running(FakeRunner()) as engine:
        turns, over = 0, False
        loop = asyncio.get_running_loop()

        def turn() -> None:
            nonlocal turns
            turns += 1
            if not over:
                loop.call_soon(turn)

        turn()
        got = await run(engine, script, threaded=threaded, on_log=lambda _, text: lines.append(text))
        over = True
    assert lines == [str(k) for k in range(200)]
    assert got == [reference(list(range(k + 1))) for k in range(3)]
    assert turns > 200, "others had their turns in between"


async def test_what_was_sent_last_is_output_and_a_program_that_waits_is_not_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "SLICE", 0.0)
    runner = Slow()

    async def script(api: Api, _: Any) -> str:
        ws, pipe = api.new("ws"), api.new("pipe")
        for k in range(3):
            api.call("send", value=k)
        api.submit(pipe, ws, [1], api.program(COSTLY[0].program.text), params=list(COSTLY[0].params))
        api.call("ws.discard", ws=ws, n=None)
        api.call("send", value="last")
        return "done"

    async with running(runner) as engine:
        process = Process(engine, SERVICES, "ends")
        assert await process.run(ScriptGuest(process.port, script), process.request("", None)) == "done"
        assert [value async for value in process.messages()] == [0, 1, 2, "last"]
        assert not runner.prepared
        assert not engine.instances


async def test_a_fork_that_ran_leaves_nobody_waiting_without_a_word() -> None:
    """A fork of a set that is being opened runs in the engine's next fill, behind the open that was told: only then the pass is stuck."""
    empty = traced(lambda: read(Chan("u32", (1,)))).program.text

    async def script(api: Api, _: Any) -> str:
        ws, pipe = api.new("ws"), api.new("pipe")
        ch = api.new("ch", dtype="u32", shape=[1], capacity=2)
        await api.future("ws.save", ws=ws, name="a")
        opened, fork, side = api.new_id(), api.new_id(), api.new("pipe")
        api.future("ws.open", ws=opened, name="a")
        api.call("ws.fork", ws=fork, of=opened, pipe=side, buffer=False)
        out = api.submit(pipe, ws, [1], api.program(empty), chans=[ch])[0]
        with pytest.raises(HostError) as told:
            await out
        return told.value.type

    async with running(FakeRunner()) as engine:
        assert await asyncio.wait_for(run(engine, script, receives=False), 10) == "Deadlock"
