"""Processes end to end on the fake runner: the seed's loop, every failure class, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from pie_core import eta
from pie_core.host.budget import Budget
from pie_core.host.process import InferletFailed, Process
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import GREEDY, argmax, running, settle, traced
from tests.host.script_guest import Api, HostError, ScriptGuest
from tests.host.support import SERVICES, run


async def seed_loop(api: Api, prompt: list[int]) -> list[int]:
    """The complete example of the seed, on the ABI."""
    prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
    tokens, feed = [], prompt
    for _ in range(8):
        token = await api.submit(pipe, ws, feed, prog)[0]
        tokens.append(token)
        feed = [token]
    api.call("pipe.close", pipe=pipe)
    return tokens


@pytest.mark.parametrize("threaded", [False, True])
async def test_the_seed_loop(threaded: bool) -> None:
    async with running(FakeRunner()) as engine:
        assert await run(engine, seed_loop, [3, 1, 4], threaded=threaded) == generate([3, 1, 4], 8)


async def test_pitfall_21_forks_do_not_wait_for_each_other() -> None:
    async def script(api: Api, prompt: list[int]) -> list[list[int]]:
        prog, root, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        api.submit(pipe, root, prompt)
        branches = []
        for k in range(3):
            ws = api.new_id()
            api.call("ws.fork", ws=ws, of=root, pipe=pipe, buffer=False)
            branches.append((ws, api.new("pipe"), k))
        first = [api.submit(p, ws, [k], prog)[0] for ws, p, k in branches]
        return [[await f] for f in first]

    runner = FakeRunner()
    async with running(runner) as engine:
        got = await run(engine, script, list(range(20)))
        assert got == [[reference([*range(20), k])] for k in range(3)]
        assert len(runner.batches) == 2, "the branches share one step"


async def test_sync_ops() -> None:
    async def script(api: Api, _: Any) -> list[Any]:
        clock = api.call("time")
        return [
            api.call("encode", text="ab"), api.call("decode", ids=[0, 1]), api.call("bytes", ids=[7, 255 % VOCAB]),
            api.call("chat.render", messages=[{"role": "user", "content": "a"}]), api.call("chat.role", role="user", content=""),
            api.call("chat.cue"), api.call("chat.seal"), len(api.call("random", n=4)), clock["wall"] > 0 < clock["mono"],
        ]  # fmt: skip

    async with running(FakeRunner()) as engine:
        got = await run(engine, script)
    assert got == [[97 % VOCAB, 98 % VOCAB], "ab", ["07", f"{255 % VOCAB:02x}"], [1, 4, 97 % VOCAB, 2], [4], [2], [3], 8, True]


async def test_values_of_every_kind_cross() -> None:
    def epilogue() -> Any:
        from pie_core import eta
        from pie_core.eta import intrinsics

        row = intrinsics.output(0, "logits")
        top = eta.reduce_argmax(row)
        return top, eta.ge(top, 0), row

    program = traced(epilogue)

    async def script(api: Api, _: Any) -> list[Any]:
        futures = api.submit(api.new("pipe"), api.new("ws"), [1, 2], api.program(program.program.text), 3, params=list(program.params))
        return [await f for f in futures]

    async with running(FakeRunner()) as engine:
        top, positive, row = await run(engine, script)
    assert (top, positive) == (reference([1, 2]), True)
    assert (row["dtype"], row["shape"]) == ("f32", [VOCAB])
    values = struct.unpack(f"<{VOCAB}f", base64.b64decode(row["b64"]))
    assert values.index(1.0) == top


async def test_send_and_receive_and_log() -> None:
    lines: list[tuple[str, str]] = []

    async def script(api: Api, _: Any) -> str:
        api.call("send", value={"hello": "ü"})
        name = await api.future("receive")
        api.call("log", level="info", text=f"got {name}")
        api.call("send", value=f"bye {name}")
        return "done"

    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES, on_log=lambda level, text: lines.append((level, text)))
        guest = ScriptGuest(process.port, script)
        task = asyncio.ensure_future(process.run(guest, process.request("", None)))
        got = []
        async for message in process.messages():
            got.append(message)
            if len(got) == 1:
                process.deliver("you")
        assert await task == "done"
    assert got == [{"hello": "ü"}, "bye you"]
    assert lines == [("info", "got you")]


async def test_sleep_settles_without_work() -> None:
    async def script(api: Api, _: Any) -> str:
        slow, fast = api.future("sleep", ms=20), api.future("sleep", ms=1)
        await fast
        await slow
        return "awake"

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == "awake"


async def test_events_are_coalesced() -> None:
    async def script(api: Api, _: Any) -> int:
        prog = api.program(GREEDY.program.text)
        futures = [api.submit(api.new("pipe"), api.new("ws"), [k], prog)[0] for k in range(6)]
        for f in futures:
            await f
        return 0

    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        guest = ScriptGuest(process.port, script)
        await process.run(guest, process.request("", None))
        assert guest.steps == 2, "one resume brings all six"


# --- failures


async def raises_itself(api: Api, _: Any) -> None:
    raise ValueError("the author's fault")


async def waits_for_nothing(api: Api, _: Any) -> None:
    class Nothing:
        def __await__(self) -> Any:
            yield None

    await Nothing()


async def waits_for_an_unknown_future(api: Api, _: Any) -> None:
    from tests.host.script_guest import Future

    await Future(999)


async def waits_for_its_own_later_put(api: Api, _: Any) -> None:
    ch = api.new("ch", dtype="i32")
    await api.submit(api.new("pipe"), api.new("ws"), {"ch": ch}, api.program(GREEDY.program.text))[0]


class Results:
    """What a trace sees of the channel that passes put their tokens into."""

    dtype, shape, capacity = "i32", (), 1


def putting() -> Any:
    token = argmax()
    eta.channel.put(Results(), token)
    return token


PUTS = traced(putting)


async def waits_for_room(api: Api, _: Any) -> None:
    pipe, ws, prog, ch = api.new("pipe"), api.new("ws"), api.program(PUTS.program.text), api.new("ch", dtype="i32", host="reader")
    outs = [api.submit(pipe, ws, [3], prog, chans=[ch])[0] for _ in range(2)]
    for out in outs:
        await out


async def takes_behind_a_stuck_pass(api: Api, _: Any) -> None:
    feed, results = api.new("ch", dtype="i32"), api.new("ch", dtype="i32", host="reader")
    api.submit(api.new("pipe"), api.new("ws"), {"ch": feed}, api.program(PUTS.program.text), chans=[results])
    await api.future("ch.take", ch=results)


async def takes_what_nobody_puts(api: Api, _: Any) -> None:
    await api.future("ch.take", ch=api.new("ch", dtype="i32", host="reader"))


async def only_receives(api: Api, _: Any) -> None:
    await api.future("receive")


async def prompt_over_the_context(api: Api, _: Any) -> None:
    await api.submit(api.new("pipe"), api.new("ws"), [1] * 513, api.program(GREEDY.program.text))[0]


async def prefill_over_the_context_unseen(api: Api, _: Any) -> None:
    pipe, ws = api.new("pipe"), api.new("ws")
    api.submit(pipe, ws, [1] * 513)
    await api.submit(pipe, ws, [1], api.program(GREEDY.program.text))[0]


async def over_its_pages(api: Api, _: Any) -> None:
    await api.submit(api.new("pipe"), api.new("ws"), [1] * 100, api.program(GREEDY.program.text))[0]


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (raises_itself, "ValueError", "the author's fault"),
        (waits_for_nothing, "Deadlock", "waits for something"),
        (waits_for_an_unknown_future, "Deadlock", "waits for something"),
        (waits_for_its_own_later_put, "Deadlock", r"the output of a pass cannot come: a pass waits for a value in the i32\[\] channel"),
        (waits_for_room, "Deadlock", r"waits to put into the i32\[\] channel, whose 1 cell is full and which nothing takes"),
        (takes_behind_a_stuck_pass, "Deadlock", r"take\(\) of the i32\[\] channel cannot come: a pass waits for a value"),
        (takes_what_nobody_puts, "ChannelEmpty", "no submitted pass"),
        (prompt_over_the_context, "ContextLengthExceeded", "513"),
        (prefill_over_the_context_unseen, "ContextLengthExceeded", "513"),
        (over_its_pages, "OutOfPages", "4"),
    ],
)
async def test_pitfall_17_every_failure_is_typed(script: Any, kind: str, words: str) -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(InferletFailed, match=words) as caught:
            await run(engine, script, budget=Budget(pages=4) if script is over_its_pages else None)
        assert caught.value.type == kind


async def test_an_author_error_carries_its_place() -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(InferletFailed) as caught:
            await run(engine, raises_itself)
    assert (caught.value.file, caught.value.line, caught.value.traceback) == ("script.py", 7, "…")
    assert str(caught.value) == "ValueError: the author's fault (script.py, line 7)"


class BrokenGuest:
    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.closed = False

    async def start(self, request: str) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def resume(self, events: str) -> str:
        raise AssertionError("not reached")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("not json", "GuestFault"), ("", "GuestFault"), ("{", "GuestFault"), ('{"s":"done","r":"\\ud800"}', "GuestFault"),
     ('{"s":"pending","w":[[1]]}', "GuestFault"),
     ("[]", "GuestFault"), ('{"s":"napping"}', "GuestFault"), ('{"s":"failed","e":3}', "GuestFault"),
     (MemoryError("trap"), "MemoryError")],
)  # fmt: skip
async def test_a_broken_guest_fails_typed(answer: str | Exception, kind: str) -> None:
    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        guest = BrokenGuest(answer)
        with pytest.raises(InferletFailed) as caught:
            await process.run(guest, process.request("", None))
        assert caught.value.type == kind
        assert guest.closed


@pytest.mark.parametrize("after", [0, 1, 3, 8, 20])
async def test_cancel_at_any_moment_frees_everything(after: int) -> None:
    async with running(FakeRunner(limits(max_tokens=8), delay=0.0005)) as engine:
        process = Process(engine, SERVICES)
        guest = ScriptGuest(process.port, seed_loop)
        task = asyncio.ensure_future(process.run(guest, process.request("", list(range(60)))))
        await settle(after)
        process.cancel("the client left")
        with pytest.raises(InferletFailed, match="the client left") as caught:
            await task
        assert caught.value.type == "Cancelled"
        assert guest.closed
        assert engine.pool.used == 0 and not engine.instances


async def test_a_cancelled_task_frees_everything() -> None:
    async with running(FakeRunner(delay=0.001)) as engine:
        task = asyncio.ensure_future(run(engine, seed_loop, list(range(40))))
        await settle(6)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.pool.used == 0 and not engine.instances


async def test_messages_end_with_a_failing_inferlet() -> None:
    async def script(api: Api, _: Any) -> None:
        api.call("send", value=1)
        raise ValueError("after one message")

    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        task = asyncio.ensure_future(process.run(ScriptGuest(process.port, script), process.request("", None)))
        assert [m async for m in process.messages()] == [1]
        with pytest.raises(InferletFailed, match="after one message"):
            await task


async def test_who_only_receives_where_nobody_sends_is_told() -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(InferletFailed, match="whoever started this run sends none") as caught:
            await run(engine, only_receives, receives=False)
        assert caught.value.type == "Deadlock"
        assert caught.value.line == 7, "it is raised in the author's code"


async def test_a_receive_beside_other_work_does_no_harm_where_nobody_sends() -> None:
    async def script(api: Api, _: Any) -> list[Any]:
        message = api.future("receive")
        prog, pipe, ws = api.program(GREEDY.program.text), api.new("pipe"), api.new("ws")
        token = await api.submit(pipe, ws, [3], prog)[0]
        await api.future("sleep", ms=1)
        with pytest.raises(HostError) as caught:
            await message
        return [token, caught.value.type, await api.submit(pipe, ws, [token], prog)[0]]

    async with running(FakeRunner()) as engine:
        first, second = generate([3], 2)
        assert await run(engine, script, receives=False) == [first, "Deadlock", second]


async def test_a_deadlock_can_be_caught_and_undone() -> None:
    """The await fails, the pass goes on waiting: its values come once the program makes room."""

    async def script(api: Api, _: Any) -> list[Any]:
        pipe, ws, prog, ch = api.new("pipe"), api.new("ws"), api.program(PUTS.program.text), api.new("ch", dtype="i32", host="reader")
        first, second = (api.submit(pipe, ws, [3], prog, chans=[ch])[0] for _ in range(2))
        one = await first
        with pytest.raises(HostError) as caught:
            await second
        assert (caught.value.type, caught.value.error["message"][:18]) == ("Deadlock", "the output of a pa")
        taken = [await api.future("ch.take", ch=ch), await api.future("ch.take", ch=ch)]
        return [taken[0] == one, taken[1] == await second]

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == [True, True]
        assert engine.pool.used == 0 and not engine.instances


async def test_a_process_runs_once() -> None:
    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES)
        await process.run(ScriptGuest(process.port, seed_loop), process.request("", [1]))
        with pytest.raises(RuntimeError, match="once"):
            await process.run(ScriptGuest(process.port, seed_loop), process.request("", [1]))


async def test_the_inbox_is_capped() -> None:
    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES, budget=Budget(inbox=2))
        process.deliver(1)
        process.deliver(2)
        with pytest.raises(InferletFailed, match="2 values wait"):
            process.deliver(3)
        process.close()


async def test_host_written_cells_flow_with_backpressure() -> None:
    def epilogue_for(api: Api) -> Any:
        from pie_core.eta.channel import take

        class Handle:
            dtype, shape, capacity = "i32", (), 1

        return traced(lambda: take(Handle()) + 0)  # type: ignore[arg-type]

    async def script(api: Api, _: Any) -> list[Any]:
        ch = api.new("ch", dtype="i32", capacity=1, host="writer")
        t = epilogue_for(api)
        prog, ws, pipe = api.program(t.program.text), api.new("ws"), api.new("pipe")
        out: list[Any] = []
        with pytest.raises(HostError) as empty:
            api.submit(pipe, ws, [1], prog, params=list(t.params), chans=[ch])
        out.append(empty.value.type)
        for value in (5, 6):
            api.call("ch.put", ch=ch, words=[value])
            with pytest.raises(HostError) as full:
                api.call("ch.put", ch=ch, words=[9])
            out.append(full.value.type)
            out.append(await api.submit(pipe, ws, [1], prog, params=list(t.params), chans=[ch])[0])
        return out

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == ["ChannelEmpty", "ChannelFull", 5, "ChannelFull", 6]


async def test_settled_passes_free_their_budget() -> None:
    async with running(FakeRunner()) as engine:
        assert await run(engine, seed_loop, [3], budget=Budget(outstanding=1)) == generate([3], 8)


async def test_a_skipped_pass_gives_its_reserved_cell_back() -> None:
    from pie_core import eta
    from pie_core.eta.channel import put, take

    class Mask:
        dtype, shape, capacity = "i32", (), 2

    class Stop:
        dtype, shape, capacity = "bool", (), 1

    def stopping() -> Any:
        put(Stop(), eta.ge(take(Mask()), 0))  # type: ignore[arg-type]
        return eta.reduce_argmax(eta.intrinsics.output(0, "logits"))

    stops, takes = traced(stopping), traced(lambda: take(Mask()) + 0)  # type: ignore[arg-type]
    order = {"Mask": 0, "Stop": 1}

    async def script(api: Api, _: Any) -> list[Any]:
        mask = api.new("ch", dtype="i32", capacity=2, host="writer")
        stop = api.new("ch", dtype="bool")
        chans = [(mask, stop)[order[type(c).__name__]] for c in stops.channels]
        pipe, other, ws = api.new("pipe"), api.new("pipe"), api.new("ws")
        api.call("pipe.stop_when", pipe=pipe, ch=stop)
        prog, second = api.program(stops.program.text), api.program(takes.program.text)
        api.call("ch.put", ch=mask, words=[5])
        api.call("ch.put", ch=mask, words=[6])
        first, skipped = (api.submit(pipe, ws, [1], prog, params=list(stops.params), chans=chans)[0] for _ in range(2))
        await first
        with pytest.raises(HostError) as caught:
            await skipped
        value = await api.submit(other, api.new("ws"), [1], second, params=list(takes.params), chans=[mask])[0]
        return [caught.value.type, value]

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == ["PassSkipped", 6]
