"""Working sets through the ABI: masks and trees, commits by channels and outputs, saving and opening."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.eta import channel, iota, reshape
from pie_core.host.process import InferletFailed, Process
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import GREEDY, argmax, running, traced
from tests.host.script_guest import Api, Future, HostError, ScriptGuest
from tests.host.support import SERVICES, run

STEM, DRAFTS, PARENTS = [5, 6, 7], [20, 21, 22, 23], [-1, 0, 0, 2]


class Like:
    """A channel as the tracer sees it."""

    is_counter = False

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self.capacity = "u32", shape, 1


def tree() -> dict[str, Any]:
    return {"mode": "buffered", "tree": PARENTS}


async def test_a_tree_and_a_path() -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        api.submit(pipe, ws, STEM)
        leaf = await api.submit(pipe, ws, DRAFTS, prog, geo=tree())[0]
        api.call("ws.commit", ws=ws, n=[0, 2, 3])
        return leaf, await api.submit(pipe, ws, [9], prog)[0], await api.future("ws.length", ws=ws)

    async with running(FakeRunner()) as engine:
        path = [*STEM, 20, 22, 23]
        assert await run(engine, script) == [reference(path), reference([*path, 9]), 7]


@pytest.mark.parametrize(
    ("of", "buffer", "n", "holds"),
    [
        ("new", False, 1, 0), ("settled", False, 4, 3), ("settled", True, 8, 7), ("fork", True, 8, 7), ("settled", True, 7, None),
        ("busy", True, 99, None),
    ],
)  # fmt: skip
async def test_a_truncate_past_the_end_of_a_set_just_made_is_refused_at_the_call(of: str, buffer: bool, n: int, holds: int | None) -> None:
    """Its fork was not carried out yet; where a pass may still add to it, its next use tells."""

    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        await api.submit(pipe, ws, STEM, prog)[0]
        out = api.submit(pipe, ws, DRAFTS, prog, geo={"mode": "buffered"})[0]
        if of != "busy":
            await out
            await api.future("ws.length", ws=ws)
        fork = api.new("ws") if of == "new" else api.new_id()
        if of != "new":
            api.call("ws.fork", ws=fork, of=ws, pipe=None, buffer=buffer)
        if of == "fork":
            parent, fork = fork, api.new_id()
            api.call("ws.fork", ws=fork, of=parent, pipe=None, buffer=buffer)
        if holds is None:
            api.call("ws.truncate", ws=fork, n=n)
        else:
            with pytest.raises(HostError, match=rf"truncate\({n}\) is past the end: the working set has {holds} tokens"):
                api.call("ws.truncate", ws=fork, n=n)
        if of == "busy":
            with pytest.raises(HostError, match="past the end"):
                await api.future("ws.length", ws=fork)
            return True
        again = api.submit(pipe, fork, [9], prog, geo={"mode": "buffered"})[0]
        return await again == reference([*((*STEM, *(DRAFTS if buffer else ())) if of != "new" else ()), 9])

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) is True


async def test_a_mask_in_words() -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        geo = {"mask": [[1], [3], [4]], "width": 3}  # the last token sees itself only
        return await api.submit(pipe, ws, STEM, prog, geo=geo)[0]

    async with running(FakeRunner()) as engine:
        got = await run(engine, script)
    assert got != reference(STEM)


@pytest.mark.parametrize("moment", ["in flight", "delivered"])
async def test_commits_by_an_output(moment: str) -> None:
    """Until the guest has been told the value; then it has to send that."""
    counting = traced(lambda: (argmax(), reshape(iota(1) + 1, ())))

    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        counted = api.program(counting.program.text)
        api.submit(pipe, ws, STEM)
        token, count = api.submit(pipe, ws, DRAFTS, counted, outs=2, params=list(counting.params), geo={"mode": "buffered"})
        if moment == "delivered":
            await token
        api.call("ws.commit", ws=ws, n={"out": count.id})
        api.call("ws.discard", ws=ws, n=None)
        return await api.submit(pipe, ws, [9], prog)[0]

    async with running(FakeRunner()) as engine:
        if moment == "in flight":
            assert await run(engine, script) == reference([*STEM, 20, 9])
        else:
            with pytest.raises(InferletFailed, match="no output of a submitted pass"):
                await run(engine, script)


async def test_a_commit_by_an_output_that_settles_while_the_guest_runs() -> None:
    """The step of the guest that commits began before the output settled."""
    counting = traced(lambda: (argmax(), reshape(iota(1) + 1, ())))
    async with running(FakeRunner()) as engine:
        process = Process(engine, SERVICES, "test")
        api = Api(process.port)
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        _, count = api.submit(
            pipe, ws, DRAFTS, api.program(counting.program.text), outs=2, params=list(counting.params), geo={"mode": "buffered"}
        )
        await asyncio.sleep(0.05)  # settled, and no step of the guest took the events
        api.call("ws.commit", ws=ws, n={"out": count.id})
        api.call("ws.discard", ws=ws, n=None)

        async def script(_: Api, __: Any) -> Any:
            return await api.submit(pipe, ws, [9], prog)[0]

        assert await process.run(ScriptGuest(process.port, script), process.request("", None)) == reference([20, 9])


async def test_commits_by_a_channel() -> None:
    cell = Like((2,))
    counting = traced(lambda: (channel.put(cell, iota(2) + iota(2)), argmax())[1])

    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        ch = api.new("ch", dtype="u32", shape=[2], host="reader")
        api.submit(pipe, ws, STEM)
        api.submit(pipe, ws, DRAFTS, api.program(counting.program.text), chans=[ch], params=list(counting.params), geo=tree())
        api.call("ws.commit", ws=ws, n={"ch": ch})
        return await api.submit(pipe, ws, [9], prog)[0]

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == reference([*STEM, 20, 22, 9])


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ({"ch": 77}, "UsageError", "id 77 is unknown"),
        ({"out": 77}, "InvalidState", "77 is no output"),
        ([0, 3], "InvalidState", "does not follow"),
    ],
)
async def test_commits_that_cannot_be(what: Any, kind: str, words: str) -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        api.submit(pipe, ws, DRAFTS, geo=tree())
        api.call("ws.commit", ws=ws, n=what)
        return await api.submit(pipe, ws, [9], prog)[0]

    async with running(FakeRunner()) as engine:
        with pytest.raises(InferletFailed, match=words) as caught:
            await run(engine, script)
    assert caught.value.type == kind


def drafting(stops: bool) -> tuple[Any, Any, Any]:
    """(traced, count, stop): an epilogue that counts two, and stops."""
    count, stop = Like(()), Like(())
    stop.dtype = "bool"

    def epilogue() -> Any:
        channel.put(count, reshape(iota(1) + 2, ()))
        if stops:
            channel.put(stop, reshape(iota(1), ()) == 0)
        return argmax()

    return traced(epilogue), count, stop


@pytest.mark.parametrize("stops", [True, False], ids=["behind a stop", "in a loop"])
async def test_drafts_committed_by_a_channel_run_ahead(stops: bool) -> None:
    """Passes go on behind a count that only the device has; the ones that a stop cancels count nothing."""
    loop, *order = drafting(stops)

    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe, other = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe"), api.new("pipe")
        count, stop = api.new("ch", dtype="u32", capacity=4, host="reader"), api.new("ch", dtype="bool", capacity=4)
        if stops:
            api.call("pipe.stop_when", pipe=pipe, ch=stop)
        chans = [count if made is order[0] else stop for made in loop.channels]
        drafting_ = api.program(loop.program.text)
        for k in range(3):
            api.submit(pipe, ws, [20 + k] * 3, drafting_, chans=chans, params=list(loop.params), geo={"mode": "buffered"})
            api.call("ws.commit", ws=ws, n={"ch": count})
            api.call("ws.discard", ws=ws, n=None)
        return await api.future("ws.length", ws=ws), await api.submit(other, ws, [9], prog)[0]

    runner = FakeRunner()
    async with running(runner) as engine:
        kept = [20, 20] if stops else [20, 20, 21, 21, 22, 22]
        assert await run(engine, script) == [len(kept), reference([*kept, 9])]
    assert runner.shifted, "they waited for the host"


@pytest.mark.parametrize("later", ["at once", "a moment later"])
async def test_a_pass_that_the_engine_refuses_fails_what_comes_behind_it(later: str) -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, bad, ws, pipe = api.program(GREEDY.program.text), api.program(counting.program.text), api.new("ws"), api.new("pipe")
        await api.submit(pipe, ws, STEM, prog)[0]
        refused = api.submit(pipe, ws, [8], bad, params=list(counting.params))[0]
        if later != "at once":
            await api.future("sleep", ms=10)
        behind = api.submit(pipe, ws, [9], prog)[0]
        errors = []
        for future in (refused, behind):
            with pytest.raises(HostError) as caught:
                await future
            errors.append((caught.value.type, str(caught.value)))
        api.call("ws.truncate", ws=ws, n=3)
        return errors, await api.submit(pipe, ws, [9], prog)[0]

    counting = traced(lambda: reshape(iota(1) + 7, ()))
    runner = FakeRunner()
    runner.bad_programs = {counting.program.hash}
    async with running(runner) as engine:
        (first, second), token = await run(engine, script)
    words = "this device does not take the epilogue: the shader compiler refused it"
    assert first == ["PassFailed", words]
    assert second[0] == "PassFailed" and second[1].startswith(f"an earlier pass on this working set failed: {words}; go on from a fork")
    assert token == reference([*STEM, 9])


@pytest.mark.parametrize("epilogue", [True, False])
async def test_the_end_of_a_pass_without_outputs_can_be_awaited(epilogue: bool) -> None:
    putting = traced(lambda: channel.put(Like((2,)), iota(2)))

    async def script(api: Api, _: Any) -> Any:
        ws, pipe, ch, end = api.new("ws"), api.new("pipe"), api.new("ch", dtype="u32", shape=[2], capacity=2), api.new_id
        more = {"prog": api.program(putting.program.text), "chans": [ch], "params": list(putting.params)} if epilogue else {}
        ends = []
        for tokens in (STEM, [1] * 600):
            ends.append(Future(end()))
            api.call("submit", pipe=pipe, ws=[ws], tokens=tokens, geo={"mode": "folding"}, outs=[ends[-1].id], **more)
        first = await ends[0]
        with pytest.raises(HostError) as caught:
            await ends[1]
        with pytest.raises(HostError, match=r"outputs; chans, params and outs give .* 1 outputs"):
            api.call("submit", pipe=pipe, ws=[ws], tokens=[1], geo={"mode": "folding"}, outs=[end(), end()], **more)
        return first, caught.value.type

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == [None, "ContextLengthExceeded"]


BAD_EDITS = [
    ("ws.truncate", 9, r"truncate\(9\) is past the end: the working set has 7 tokens"),
    ("ws.truncate", 1, r"truncate\(1\) cuts into the frozen prefix of 3 tokens; allowed: 3 to 7, or where it was made or forked: 0"),
    ("ws.commit", [0, 3], r"path\[1\] = 3 does not follow token 0: its parent is 2"),
    ("ws.commit", 3, r"commit\(3\): the buffer is a tree"),
    ("ws.commit", 5, r"the buffer of the working set holds at most 4 tokens"),
    ("ws.discard", 5, r"the buffer of the working set holds at most 4 tokens"),
]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(("op", "n", "words"), BAD_EDITS)
async def test_a_bad_edit_of_what_is_settled_is_refused_at_the_call(op: str, n: Any, words: str, threaded: bool) -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        api.submit(pipe, ws, STEM)
        await api.submit(pipe, ws, DRAFTS, prog, geo=tree())[0]
        with pytest.raises(HostError, match=words) as caught:
            api.call(op, ws=ws, n=n)
        length = await api.future("ws.length", ws=ws)
        api.call("ws.truncate", ws=ws, n=3)
        return caught.value.type, length, await api.submit(pipe, ws, [9], prog)[0]

    async with running(FakeRunner()) as engine:
        assert await run(engine, script, threaded=threaded) == ["InvalidState", 7, reference([*STEM, 9])]


@pytest.mark.parametrize("page", [False, True], ids=["not settled", "settled, and nobody hears a refusal"])
@pytest.mark.parametrize(("op", "n", "words"), BAD_EDITS[:4])
async def test_a_bad_edit_that_cannot_be_refused_at_the_call_is_told_by_every_later_use(op: str, n: Any, words: str, page: bool) -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new("ws"), api.new("pipe")
        api.submit(pipe, ws, STEM)
        last = api.submit(pipe, ws, DRAFTS, prog, geo=tree())[0]
        if page:
            api._port.answers = False
            await last
        api.call(op, ws=ws, n=n)
        for future in (api.future("ws.length", ws=ws), api.submit(pipe, ws, [9], prog)[0], api.future("ws.cached", ws=ws)):
            with pytest.raises(HostError, match=f"an earlier edit of this working set failed: .*{words}") as caught:
                await future
            assert caught.value.type == "InvalidState"
        api.call("ws.truncate", ws=ws, n=3)
        return await api.submit(pipe, ws, [9], prog)[0]

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == reference([*STEM, 9])


async def save(api: Api, _: Any) -> Any:
    ws, pipe = api.new("ws"), api.new("pipe")
    api.submit(pipe, ws, STEM)
    return await api.future("ws.save", ws=ws, name="chat-1")


async def reopen(api: Api, name: str) -> Any:
    prog, ws, pipe = api.program(GREEDY.program.text), api.new_id(), api.new("pipe")
    opened = api.future("ws.open", ws=ws, name=name)
    first = api.submit(pipe, ws, [9], prog)[0]  # before it is there
    return [await opened, await first]


async def test_saved_by_one_run_and_opened_by_another() -> None:
    async with running(FakeRunner()) as engine:
        assert await run(engine, save) == 3
        assert engine.pool.used == 0
        assert await run(engine, reopen, "chat-1") == [3, reference([*STEM, 9])]
        with pytest.raises(InferletFailed, match="no working set is saved as 'chat-1'") as caught:
            await run(engine, reopen, "chat-1", tenant="another")
        assert caught.value.type == "UnknownSavedSet"


async def test_an_error_of_open_can_be_caught_and_is_the_error_of_every_use() -> None:
    async def script(api: Api, _: Any) -> Any:
        prog, ws, pipe = api.program(GREEDY.program.text), api.new_id(), api.new("pipe")
        with pytest.raises(HostError) as caught:
            await api.future("ws.open", ws=ws, name="nothing")
        with pytest.raises(HostError) as again:
            await api.submit(pipe, ws, [9], prog)[0]
        api.call("ws.drop", ws=ws)
        return caught.value.type, again.value.type

    async with running(FakeRunner()) as engine:
        assert await run(engine, script) == ["UnknownSavedSet"] * 2


async def test_saving_what_cannot_be_read() -> None:
    runner = FakeRunner(limits())
    runner.fail_read = DeviceError("injected")
    async with running(runner) as engine:
        with pytest.raises(InferletFailed, match="injected") as caught:
            await run(engine, save)
    assert caught.value.type == "PassFailed"
