"""After the engine is lost, or stopped, each op of an inferlet that goes on ends in that error: at its future, or at the next use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError, DeviceLost
from pie_core.engine.loop import Engine
from pie_core.host.ops import OPS
from pie_core.host.process import InferletFailed, Process
from tests.engine.fake_runner import FakeRunner
from tests.engine.support import GREEDY, running
from tests.host.script_guest import Api, HostError, ScriptGuest
from tests.host.support import SERVICES, run

WS, PIPE, PROG, READER, WRITER, STOP, NEW = range(1, 8)
HANDLES: list[tuple[str, dict[str, Any]]] = [
    ("ws.new", {"ws": WS}),
    ("pipe.new", {"pipe": PIPE}),
    ("program", {"prog": PROG, "text": GREEDY.program.text}),
    ("ch.new", {"ch": READER, "dtype": "i32", "host": "reader"}),
    ("ch.new", {"ch": WRITER, "dtype": "i32", "host": "writer"}),
    ("ch.new", {"ch": STOP, "dtype": "bool"}),
]
Use = Callable[[Api], Awaitable[Any]]


async def by_a_pass(api: Api) -> None:
    await api.submit(PIPE, WS, [1], PROG)[0]


async def by_a_pass_that_is_fed(api: Api) -> None:
    await api.submit(PIPE, WS, {"ch": WRITER}, PROG)[0]


async def by_a_pass_on_the_new_set(api: Api) -> None:
    await api.submit(PIPE, NEW, [1], PROG)[0]


async def by_a_pass_of_the_new_pipeline(api: Api) -> None:
    await api.submit(NEW, WS, [1], PROG)[0]


async def by_a_take_of_the_new_channel(api: Api) -> None:
    await api.future("ch.take", ch=NEW)


async def by_a_length(api: Api) -> None:
    await api.future("ws.length", ws=WS)


# (op, fields, how the author hears of it)
POSTED: list[tuple[str, dict[str, Any], Use]] = [
    ("ws.new", {"ws": NEW}, by_a_pass_on_the_new_set),
    ("ws.fork", {"ws": NEW, "of": WS}, by_a_pass_on_the_new_set),
    ("ws.fork", {"ws": NEW, "of": WS, "pipe": PIPE, "buffer": True}, by_a_pass_on_the_new_set),
    ("ws.commit", {"ws": WS, "n": 1}, by_a_pass),
    ("ws.commit", {"ws": WS, "n": [0, 1]}, by_a_length),
    ("ws.commit", {"ws": WS, "n": {"ch": READER}}, by_a_length),
    ("ws.commit", {"ws": WS, "n": {"out": NEW}}, by_a_pass),
    ("ws.discard", {"ws": WS, "n": None}, by_a_length),
    ("ws.discard", {"ws": WS, "n": 1}, by_a_pass),
    ("ws.truncate", {"ws": WS, "n": 0}, by_a_length),
    ("pipe.new", {"pipe": NEW}, by_a_pass_of_the_new_pipeline),
    ("pipe.stop_when", {"pipe": PIPE, "ch": STOP}, by_a_pass),
    ("ch.new", {"ch": NEW, "dtype": "i32", "host": "reader"}, by_a_take_of_the_new_channel),
    ("ch.put", {"ch": WRITER, "words": [1]}, by_a_pass_that_is_fed),
    ("ch.set", {"ch": WRITER, "words": [1]}, by_a_pass_that_is_fed),
    ("program", {"prog": NEW, "text": GREEDY.program.text}, by_a_pass),
    ("submit", {"pipe": PIPE, "tokens": [1], "ws": [WS], "geo": {"mode": "buffered"}}, by_a_length),
]
FUTURES: list[tuple[str, dict[str, Any]]] = [
    ("ch.take", {"ch": READER}),
    ("ch.read", {"ch": READER}),
    ("ws.length", {"ws": WS}),
    ("ws.cached", {"ws": WS}),
    ("ws.save", {"ws": WS, "name": "x"}),
    ("ws.open", {"ws": NEW, "name": "x"}),
    ("prewarm", {"ids": [1] * 20}),
]
NEED_NO_ENGINE = {"ws.drop", "pipe.close", "ch.drop", "program.drop", "send", "sleep", "receive"}


def test_no_op_is_forgotten() -> None:
    assert {op for op, *_ in [*POSTED, *FUTURES]} | NEED_NO_ENGINE == {name for name, op in OPS.items() if op.kind != "sync"}


class Breakable(FakeRunner):
    """Its arena can no longer be written once `broken` says why."""

    broken: DeviceError | None = None

    def write_arena(self, word: int, data: bytes | bytearray | memoryview) -> None:
        if self.broken is not None:
            raise self.broken
        super().write_arena(word, data)


async def lost(engine: Engine, runner: FakeRunner) -> None:
    """By a pass of another inferlet."""

    async def script(api: Api, _: Any) -> None:
        await api.submit(api.new("pipe"), api.new("ws"), [1], api.program(GREEDY.program.text))[0]

    runner.fail_submit = lambda batch: DeviceLost("unplugged")
    with pytest.raises(InferletFailed, match="unplugged"):
        await run(engine, script)


async def stopped(engine: Engine, runner: FakeRunner) -> None:
    await engine.stop()


async def after(end: Callable[[Engine, FakeRunner], Awaitable[None]], act: Use) -> Any:
    """What `act` comes to in an inferlet with handles of all kinds and two buffered tokens, once the engine has ended: its value, or the
    type of what it raises."""

    async def script(api: Api, _: Any) -> Any:
        for op, fields in HANDLES:
            api.call(op, **fields)
        for _ in range(NEW):
            api.new_id()
        await api.submit(PIPE, WS, [1, 2], PROG, geo={"mode": "buffered"})[0]
        api.call("send", value="ready")
        await api.future("receive")
        try:
            return await act(api)
        except HostError as error:
            return error.type

    runner = Breakable()
    async with running(runner) as engine:
        process = Process(engine, SERVICES)
        task = asyncio.ensure_future(process.run(ScriptGuest(process.port, script), process.request("", None)))
        assert await anext(process.messages()) == "ready"
        await end(engine, runner)
        process.deliver(None)
        return await task


@pytest.mark.parametrize(("end", "kind"), [(lost, "EngineLost"), (stopped, "EngineStopped")])
@pytest.mark.parametrize(("op", "fields", "use"), POSTED)
async def test_what_a_posted_op_could_not_do_is_told_by_the_next_use(
    end: Any, kind: str, op: str, fields: dict[str, Any], use: Use
) -> None:
    async def act(api: Api) -> None:
        api.call(op, **fields)
        await use(api)

    assert await after(end, act) == kind


@pytest.mark.parametrize(("end", "kind"), [(lost, "EngineLost"), (stopped, "EngineStopped")])
@pytest.mark.parametrize(("op", "fields"), FUTURES)
async def test_a_future_is_rejected(end: Any, kind: str, op: str, fields: dict[str, Any]) -> None:
    async def act(api: Api) -> None:
        await api.future(op, **fields)

    assert await after(end, act) == kind


@pytest.mark.parametrize("end", [lost, stopped])
async def test_what_needs_no_engine_goes_on(end: Any) -> None:
    async def act(api: Api) -> str:
        api.call("ws.drop", ws=WS)
        api.call("pipe.close", pipe=PIPE)
        api.call("send", value=1)
        await api.future("sleep", ms=1)
        return "went on"

    assert await after(end, act) == "went on"


@pytest.mark.parametrize(("error", "kind"), [(DeviceLost("unplugged"), "EngineLost"), (DeviceError("refused"), "PassFailed")])
@pytest.mark.parametrize(
    ("op", "fields", "use"),
    [
        ("ch.new", {"ch": NEW, "dtype": "i32", "host": "reader", "seed": [1]}, by_a_take_of_the_new_channel),
        ("ch.put", {"ch": WRITER, "words": [1]}, by_a_pass_that_is_fed),
        ("ch.set", {"ch": WRITER, "words": [1]}, by_a_pass_that_is_fed),
        ("pipe.stop_when", {"pipe": PIPE, "ch": STOP}, by_a_pass),
    ],
)
async def test_a_cell_that_the_device_did_not_write_is_told_by_the_next_use(
    error: DeviceError, kind: str, op: str, fields: dict[str, Any], use: Use
) -> None:
    """The device may be gone before a step shows it to the engine."""

    async def break_writes(engine: Engine, runner: FakeRunner) -> None:
        assert isinstance(runner, Breakable)
        runner.broken = error

    async def act(api: Api) -> None:
        api.call(op, **fields)
        await use(api)

    assert await after(break_writes, act) == kind
