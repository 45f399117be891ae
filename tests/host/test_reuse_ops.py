"""Prefix reuse through the ABI: sets that stay out of it, what came out of the cache, and pages made ahead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.host.budget import Budget
from pie_core.host.process import InferletFailed, Process
from tests.engine.fake_runner import VOCAB, FakeRunner, reference
from tests.engine.support import GREEDY, running, settle
from tests.engine.test_reuse import PROMPT, rows
from tests.host.script_guest import Api, HostError, ScriptGuest
from tests.host.support import SERVICES, run


async def ask(api: Api, reuse: bool | None) -> list[Any]:
    """The token behind the prompt, and how much of the set was cached before and after."""
    fields = {} if reuse is None else {"reuse": reuse}
    prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws", **fields), api.new("pipe")
    before = api.future("ws.cached", ws=ws)
    out = api.submit(pipe, ws, PROMPT, prog)[0]
    after = api.future("ws.cached", ws=ws)
    return [await out, await before, await after]


@pytest.mark.parametrize(
    ("first", "second", "tenant", "cached"),
    [(None, None, "", 64), (True, True, "", 64), (True, False, "", 0), (False, True, "", 0), (True, True, "another", 0)],
)
async def test_a_set_reuses_what_others_left_unless_one_of_them_does_not(
    first: bool | None, second: bool | None, tenant: str, cached: int
) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        assert await run(engine, ask, first) == [reference(PROMPT), 0, 0]
        assert await run(engine, ask, second, tenant=tenant) == [reference(PROMPT), 0, cached]
        assert rows(runner) == 140 - cached


async def prewarm(api: Api, ids: list[int]) -> Any:
    return await api.future("prewarm", ids=ids)


async def test_what_an_inferlet_makes_ahead_outlives_it() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        assert [await run(engine, prewarm, ids) for ids in ([], PROMPT[:15], PROMPT, PROMPT[:40])] == [0, 0, 64, 32]
        assert (rows(runner), engine.pool.used) == (64, 0)
        assert await run(engine, ask, None) == [reference(PROMPT), 0, 64]
        assert await run(engine, ask, None, tenant="another") == [reference(PROMPT), 0, 0]


@pytest.mark.parametrize(
    ("ids", "budget", "kind", "words"),
    [
        ([*PROMPT, VOCAB], Budget(), "InvalidPass", rf"prewarm: ids\[70\] = {VOCAB} is not a token id"),
        ([1] * 513, Budget(), "ContextLengthExceeded", "513 tokens exceed the context of 512"),
        (PROMPT, Budget(pages=2), "OutOfPages", "needs 4 KV pages, more than the 2"),
        (PROMPT, Budget(outstanding=0), "BudgetExceeded", "passes outstanding: 0 in use, the cap is 0"),
        (PROMPT, Budget(futures=0), "BudgetExceeded", "futures in flight"),
        (PROMPT, Budget(handles=0), "BudgetExceeded", "1 handles, the most is 1"),
    ],
)
async def test_errors_of_prewarm_are_typed(ids: list[int], budget: Budget, kind: str, words: str) -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(InferletFailed, match=words) as caught:
            await run(engine, prewarm, ids, budget=budget)
        assert caught.value.type == kind


async def test_a_prewarm_that_failed_made_room_for_the_next() -> None:
    runner = FakeRunner()

    async def script(api: Api, _: Any) -> list[Any]:
        got = []
        for _ in range(3):
            try:
                got.append(await api.future("prewarm", ids=PROMPT))
            except HostError as error:
                got.append(error.type)
            runner.fail_submit = lambda batch: None
        return got

    runner.fail_submit = lambda batch: DeviceError("injected")
    async with running(runner) as engine:
        assert await run(engine, script, budget=Budget(outstanding=1, futures=1, handles=2)) == ["PassFailed", 64, 64]


async def test_prewarm_ends_with_its_inferlet() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        runner.hold = True
        process = Process(engine, SERVICES)
        running_script = asyncio.ensure_future(process.run(ScriptGuest(process.port, prewarm), process.request("", PROMPT)))
        await settle(20)
        assert engine.pool.used == 4
        process.cancel()
        with pytest.raises(InferletFailed, match="cancelled"):
            await running_script
        assert engine.pool.used == 0 and not engine.instances
