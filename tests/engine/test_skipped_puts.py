"""Who waits, on the host, for what passes behind a stop would have put: takes, reads and commits."""

from __future__ import annotations

from typing import Any

import pytest

from pie_core import eta
from pie_core.engine.channel import Channel
from pie_core.engine.errors import ChannelEmpty, PassSkipped
from pie_core.engine.forward import BUFFERED
from pie_core.eta.channel import put
from tests.engine.fake_runner import FakeRunner, reference
from tests.engine.support import argmax, greedy, running, settle, spec
from tests.engine.test_reuse_control import Heard


def says(res: Channel, stop: Channel | None, value: int) -> Any:
    """An epilogue that puts `value` into `res`, and true into `stop`."""

    def epilogue() -> Any:
        put(res, eta.reshape(eta.iota(1) + value, ()))
        if stop is not None:
            put(stop, eta.eq(eta.reshape(eta.iota(1), ()), 0))
        return argmax()

    return epilogue


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("hold", [True, False], ids=["in flight", "queued"])
async def test_a_take_of_what_was_skipped_says_so(asked: str, hold: bool) -> None:
    runner = FakeRunner()
    runner.hold = hold
    async with running(runner) as engine:
        inst = engine.open_instance("skip")
        ws, pipe = inst.working_set(), inst.pipeline()
        res, stop = inst.channel("u32", (), 4, host="reader"), inst.channel("bool", (), 4)
        pipe.stop_when(stop)
        outs = [inst.submit(pipe, spec([k], [ws], says(res, stop, 5)))[0] for k in range(3)]
        takes = [inst.take(res) for _ in range(4)] if asked == "before" else []
        await settle()
        runner.hold = False
        runner.release()
        assert await outs[0] == reference([0])
        for out in outs[1:]:
            with pytest.raises(PassSkipped):
                await out
        takes = takes or [inst.take(res) for _ in range(4)]
        assert await takes[0] == 5
        for take in takes[1:]:
            if asked == "before" and take is takes[3]:  # nobody had submitted a pass for it when it was asked for
                with pytest.raises(ChannelEmpty):
                    await take
                continue
            with pytest.raises(PassSkipped, match="stop channel received true"):
                await take
        with pytest.raises(PassSkipped):
            await inst.read(res)
        inst.submit(pipe, spec([9], [ws], says(res, stop, 5)))
        with pytest.raises(PassSkipped, match="had stopped before this pass was submitted"):
            await inst.take(res)
        inst.close()


async def test_other_passes_may_put_behind_a_stop() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("others")
        ws, pipe, other = inst.working_set(), inst.pipeline(), inst.pipeline()
        res, stop = inst.channel("u32", (), 4, host="reader"), inst.channel("bool", (), 4)
        pipe.stop_when(stop)
        for k in range(3):
            inst.submit(pipe, spec([k], [ws], says(res, stop, 5)))
        assert await inst.take(res) == 5
        with pytest.raises(PassSkipped):
            await inst.take(res)
        inst.submit(other, spec([1], [ws], says(res, None, 6)))
        assert await inst.take(res) == 6
        with pytest.raises(ChannelEmpty, match="no submitted pass puts the value"):
            await inst.take(res)
        inst.close()


@pytest.mark.parametrize("rest", [True, False], ids=["and a discard", "alone"])
@pytest.mark.parametrize("late", [True, False], ids=["behind the stop", "ahead of it"])
async def test_a_commit_by_the_count_of_a_skipped_pass_commits_nothing(rest: bool, late: bool) -> None:
    runner = FakeRunner()
    runner.hold = not late
    async with running(runner) as engine:
        inst = engine.open_instance("commit")
        ws, pipe = inst.working_set(), inst.pipeline()
        count, stop = inst.channel("u32", (), 4, host="reader"), inst.channel("bool", (), 4)
        pipe.stop_when(stop)
        for k in range(3):
            inst.submit(pipe, spec([7, 8, 9], [ws], says(count, stop, 2), geometry=BUFFERED))
            if late and k:
                await settle()
            inst.commit(ws, count)
            if rest:
                inst.discard(ws)
        await settle()
        runner.hold = False
        runner.release()
        heard, tokens = Heard(), 2 if rest else 3
        inst.length(ws, heard)
        await settle()
        assert heard.got == [tokens]
        fresh = inst.pipeline()
        assert await inst.submit(fresh, greedy([1], ws, geometry=BUFFERED))[0] == reference([*[7, 8, 9][:tokens], 1])
        inst.close()


async def test_a_commit_by_a_count_that_nobody_puts_fails() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("commit")
        ws, pipe = inst.working_set(), inst.pipeline()
        count = inst.channel("u32", (), 4, host="reader")
        inst.submit(pipe, greedy([7, 8, 9], ws, geometry=BUFFERED))
        inst.commit(ws, count)
        with pytest.raises(ChannelEmpty, match="an earlier edit of this working set failed: no submitted pass puts"):
            await inst.submit(pipe, greedy([1], ws))[0]
        inst.close()
