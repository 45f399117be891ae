"""Channels and programs that an inferlet lets go of: what it submitted goes on, ids are gone, and budgets are free again."""

from __future__ import annotations

from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import DeviceError
from pie_core.eta.channel import put
from pie_core.host.budget import Budget
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import GREEDY, argmax, running, traced
from tests.host.script_guest import Api, HostError
from tests.host.support import run


class Cell:
    """What a trace needs of a channel."""

    dtype, capacity, is_counter = "u32", 1, False

    def __init__(self, n: int) -> None:
        self.shape = (n,)


class Breaks(FakeRunner):
    """Its arena refuses one word that is told."""

    def write_arena(self, word: int, data: bytes) -> None:
        if bytes(data) == b"\7\0\0\0":
            raise DeviceError("not this one")
        super().write_arena(word, data)


def refusal(api: Api, op: str, **fields: Any) -> str:
    with pytest.raises(HostError) as caught:
        api.call(op, **fields)
    return f"{caught.value.type}: {caught.value}"


async def test_what_was_submitted_in_the_same_step_goes_on() -> None:
    async def script(api: Api, _: Any) -> Any:
        pipe, ws, prog = api.new("pipe"), api.new("ws"), api.program(GREEDY.program.text)
        ch = api.new("ch", dtype="u32", host="writer")
        api.call("ch.put", ch=ch, words=[7])
        out = api.submit(pipe, ws, {"ch": ch}, prog)[0]
        api.call("ch.drop", ch=ch)
        api.call("program.drop", prog=prog)
        return [
            await out,
            refusal(api, "ch.put", ch=ch, words=[8]),
            refusal(api, "ch.drop", ch=ch),
            refusal(api, "submit", pipe=pipe, tokens=[1], ws=[ws], geo={"mode": "folding"}, prog=prog, outs=[99]),
        ]

    async with running(FakeRunner()) as engine:
        token, *told = await run(engine, script)
        assert token == reference([7])
        assert told == [
            "UsageError: ch.put: id 4 is unknown, or was dropped; a channel is needed",
            "UsageError: ch.drop: id 4 is unknown, or was dropped; a channel is needed",
            "UsageError: submit: id 3 is unknown, or was dropped; a program is needed",
        ]


async def test_endless_channels_and_programs_run_within_the_budgets() -> None:
    async def script(api: Api, _: Any) -> Any:
        pipe, ws, tokens = api.new("pipe"), api.new("ws"), []
        for k in range(12):
            cell = Cell(20 + k)

            def fn(cell: Cell = cell) -> Any:
                put(cell, eta.iota(cell.shape[0]))
                return argmax()

            ch = api.new("ch", dtype="u32", shape=list(cell.shape))
            prog = api.program(traced(lambda fn=fn: fn()).program.text)
            tokens.append(await api.submit(pipe, ws, [k], prog, chans=[ch])[0])
            api.call("ch.drop", ch=ch)
            api.call("program.drop", prog=prog)
        return tokens

    async with running(FakeRunner(limits(arena_words=64 * 4))) as engine:
        tokens = await run(engine, script, budget=Budget(programs=1, handles=3, cell_words=64))
        assert tokens == [reference(list(range(n + 1))) for n in range(12)]
        assert engine.arena.used == 0


async def test_an_inferlet_has_a_quarter_of_the_arena() -> None:
    async def script(api: Api, _: Any) -> Any:
        api.new("ch", dtype="u32", shape=[500])
        return refusal(api, "ch.new", ch=90, dtype="u32", shape=[13])

    async with running(FakeRunner(limits(arena_words=4096))) as engine:
        assert await run(engine, script) == (
            "BudgetExceeded: words of channel cells: 1026 in use, the cap is 1024; cells have a word an element, rings capacity + 1: "
            "use smaller ones, or let go of channels"
        )


async def test_a_channel_that_the_engine_refused_to_write_keeps_no_cells() -> None:
    async def script(api: Api, _: Any) -> Any:
        pipe, ws, prog = api.new("pipe"), api.new("ws"), api.program(GREEDY.program.text)
        ch = api.new("ch", dtype="u32", host="writer")
        api.call("ch.put", ch=ch, words=[7])
        with pytest.raises(HostError, match=r"failed to write .* not this one") as caught:
            await api.submit(pipe, ws, {"ch": ch}, prog)[0]
        used = engine.arena.used
        api.call("ch.drop", ch=ch)
        return [caught.value.type, used]

    async with running(Breaks()) as engine:
        assert await run(engine, script) == ["PassFailed", 0]
