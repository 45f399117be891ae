"""The room for results in a step: what a pass brings to the host counts, what stays in channels on the device does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core import eta
from pie_core.engine.channel import Channel
from pie_core.engine.errors import InvalidPass
from pie_core.eta.channel import put, read, take
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import argmax, running, settle, spec

ROOM = 64  # words of results of one step
WIDE = 200  # words of one cell, more than that


def reads(ch: Channel) -> Any:
    """The greedy token, of a pass that looks at `ch`."""

    def fn() -> Any:
        return argmax() + eta.reduce_argmax(read(ch))  # of zeros, 0

    return fn


def keeps(ch: Channel) -> Any:
    """The greedy token, of a pass that takes the state in `ch` and puts the next one."""

    def fn() -> Any:
        put(ch, take(ch) + 1)
        return argmax()

    return fn


def brings(ch: Channel) -> Any:
    """The greedy token, of a pass that puts a whole cell."""

    def fn() -> Any:
        put(ch, eta.iota(ch.shape[0]))
        return argmax()

    return fn


def seeded(inst: Any, n: int = WIDE) -> Channel:
    return inst.channel("u32", [n], seed=[0] * n)


@pytest.mark.parametrize("epilogue", [reads, keeps])
async def test_cells_that_stay_on_the_device_take_no_room(epilogue: Any) -> None:
    runner = FakeRunner(limits(results_words=ROOM))
    async with running(runner) as engine:
        inst = engine.open_instance("wide")
        passes = [(inst.pipeline(), spec([k], [inst.working_set()], epilogue(seeded(inst)))) for k in range(4)]
        outs = [inst.submit(pipe, one)[0] for pipe, one in passes]
        assert await asyncio.gather(*outs) == [reference([k]) for k in range(4)]
        assert [len(batch.epilogues[0].lanes) for batch in runner.batches] == [4], "one step holds all"
        assert runner.batches[0].results_words == 8  # a status and a token each
        inst.close()


async def test_passes_with_values_for_the_host_share_a_step_as_far_as_these_fit() -> None:
    runner = FakeRunner(limits(results_words=ROOM))
    async with running(runner) as engine:
        inst = engine.open_instance("brings")
        channels = [inst.channel("u32", [28], host="reader") for _ in range(4)]  # 30 words a pass
        outs = [inst.submit(inst.pipeline(), spec([k], [inst.working_set()], brings(ch)))[0] for k, ch in enumerate(channels)]
        assert await asyncio.gather(*outs) == [reference([k]) for k in range(4)]
        assert [len(batch.epilogues[0].lanes) for batch in runner.batches] == [2, 2]
        assert all(batch.results_words <= ROOM for batch in runner.batches)
        for ch in channels:
            assert (await inst.take(ch)).tolist() == list(range(28))
        inst.close()


@pytest.mark.parametrize(
    ("make", "epilogue", "told"),
    [
        (lambda inst: inst.channel("u32", [63], host="reader"), brings, "take 65 words, 63 of them what it puts into channels .* has 64"),
        (lambda inst: inst.channel("u32", [1]), lambda _: lambda: eta.iota(64), "what it returns takes 65 words of results.* has 64"),
    ],
)
async def test_what_can_never_fit_is_refused_with_the_numbers(make: Any, epilogue: Any, told: str) -> None:
    async with running(FakeRunner(limits(results_words=ROOM))) as engine:
        inst = engine.open_instance("much")
        with pytest.raises(InvalidPass, match=told):
            inst.submit(inst.pipeline(), spec([1], [inst.working_set()], epilogue(make(inst))))
        inst.close()


async def test_a_channel_that_may_feed_tokens_later_counts_from_the_start() -> None:
    """Its puts are read back once a pass takes its tokens from there, and a pass that was accepted before must still fit a step."""
    runner = FakeRunner(limits(results_words=ROOM, max_tokens=32))
    async with running(runner) as engine:
        inst = engine.open_instance("feeds")
        ws, pipe, ids = inst.working_set(), inst.pipeline(), inst.channel("i32", [32])

        def both(outputs: int) -> Any:
            def fn() -> Any:
                put(ids, eta.cast(eta.iota(32), "i32"))
                return eta.iota(outputs)

            return fn

        with pytest.raises(InvalidPass, match="take 65 words, 32 of them"):
            inst.submit(pipe, spec([1], [ws], both(32)))
        runner.hold = True
        first = inst.submit(pipe, spec([1], [ws], argmax))[0]  # the device is busy
        await settle()
        wide = inst.submit(pipe, spec([2], [ws], both(31)))[0]  # accepted before anything takes from the channel
        fed = inst.submit(pipe, spec(ids, [ws], argmax))[0]
        runner.hold = False
        runner.release()
        assert await first == reference([1])
        await wide
        assert await fed == generate([1, 2, *range(32)], 1)[0]
        assert max(batch.results_words for batch in runner.batches) == ROOM
        inst.close()
