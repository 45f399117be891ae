"""The rules of channels and pipelines, a named test for each that no other module holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core import eta
from pie_core.engine.errors import InvalidPass, PassFailed, PipelineClosed
from pie_core.eta import intrinsics
from pie_core.eta.channel import put, read, take
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, reference
from tests.engine.support import argmax, greedy, running, settle, spec


async def test_a_ring_holds_its_capacity_and_cells_come_in_order_over_many_laps() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("ring")
        pipe, ch = inst.pipeline(), inst.channel("u32", capacity=3, host="writer")
        seen = []
        for lap in range(4):
            for k in range(3):
                inst.put(ch, [10 * lap + k])
            outs = [inst.submit(pipe, spec([1], [inst.working_set()], lambda: take(ch)))[0] for _ in range(3)]
            seen += [await out for out in outs]
        assert seen == [10 * lap + k for lap in range(4) for k in range(3)]
        inst.close()


async def test_inside_a_pass_a_channel_is_a_register() -> None:
    """A take behind a put sees the pending value; of two puts the last one wins; nothing of it shows before the pass commits."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("register")
        pipe, ch = inst.pipeline(), inst.channel("i32", host="reader")
        own = inst.channel("i32", seed=[7])

        def fn() -> Any:
            before = take(own)
            put(own, before + 1)
            put(own, take(own) + 10)
            put(ch, 1)
            put(ch, before)
            return read(own)

        assert await inst.submit(pipe, spec([1], [inst.working_set()], fn))[0] == 18
        assert await inst.take(ch) == 7
        assert await inst.submit(pipe, spec([1], [inst.working_set()], lambda: take(own)))[0] == 18
        inst.close()


async def test_a_stale_mask_is_impossible() -> None:
    """A mask of the host must be taken. A constant one may be read, from a seeded channel."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("mask")
        words = -(-VOCAB // 32)
        written = inst.channel("u32", [words], host="writer")
        seeded = inst.channel("u32", [words], seed=[0xFFFFFFFF] * words)
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.put(written, [0xFFFFFFFF] * words)

        def masked(how: Any, channel: Any) -> Any:
            return spec([1], [ws], lambda: eta.reduce_argmax(eta.mask_apply(intrinsics.output(0, "logits"), how(channel))))

        with pytest.raises(InvalidPass, match="must be taken, not read"):
            inst.submit(pipe, masked(read, written))
        for how, channel in ((take, written), (read, seeded), (read, seeded)):
            assert len(inst.submit(pipe, masked(how, channel))) == 1
        inst.close()


async def test_seeds_are_per_instance_and_no_part_of_a_programs_identity() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        answers = []
        for seed in (3, 4):
            inst = engine.open_instance("seed")
            ch = inst.channel("i32", seed=[seed])
            answers.append(await inst.submit(inst.pipeline(), spec([1], [inst.working_set()], lambda ch=ch: take(ch)))[0])
            inst.close()
        assert answers == [3, 4] and len(set(runner.prepared)) == len(runner.prepared) == 1


async def test_takes_and_puts_of_a_pass_commit_together_or_not_at_all() -> None:
    """A pass that faults took its cell and gives nothing: what it would have put tells the cause, to the host and to passes."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("fault")
        pipe = inst.pipeline()
        given, made = inst.channel("i32", seed=[5]), inst.channel("i32")
        told = inst.channel("i32", host="reader")
        bad = inst.channel("u32", seed=[VOCAB])

        def fn() -> Any:
            put(made, take(given))
            put(told, argmax())
            return argmax()

        out = inst.submit(pipe, spec(bad, [inst.working_set()], fn))[0]
        later = inst.submit(pipe, spec([1], [inst.working_set()], lambda: take(made)))[0]
        for waiting in (out, later, inst.take(told)):
            with pytest.raises(PassFailed, match="outside the vocabulary"):
                await waiting
        inst.close()


async def test_a_pass_in_flight_that_puts_behind_a_poisoned_cell_fails_too() -> None:
    """Else its value would come out as the one that is missing."""
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("behind")
        pipe, told = inst.pipeline(), inst.channel("i32", capacity=4, host="reader")
        bad = inst.channel("u32", seed=[VOCAB])

        def fn() -> Any:
            put(told, argmax())

        outs = [inst.submit(pipe, spec(tokens, [inst.working_set()], fn))[0] for tokens in (bad, [3])]
        takes = [inst.take(told) for _ in range(2)]
        await settle()
        runner.hold = False
        runner.release()
        for waiting in (*outs, *takes):
            with pytest.raises(PassFailed, match="outside the vocabulary"):
                await waiting
        inst.close()


async def test_a_pipeline_keeps_submission_order_and_another_one_may_overtake() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("order")
        slow, fast = inst.pipeline(), inst.pipeline()
        gate, order = inst.channel("u32"), []

        def noted(pipe: Any, what: Any, name: str) -> None:
            inst.submit_with(pipe, what, lambda *_: order.append(name))

        noted(slow, spec([1], [inst.working_set()], lambda: take(gate)), "waits")
        noted(slow, greedy([1], inst.working_set()), "behind it")
        noted(fast, greedy([2], inst.working_set()), "overtakes")
        await settle(60)
        assert order == ["overtakes"]
        noted(fast, spec([1], [inst.working_set()], lambda: put(gate, 1)), "fills")
        inst.close_pipeline(fast)
        while len(order) < 4:
            await asyncio.sleep(0.001)
        assert order == ["overtakes", "fills", "waits", "behind it"]
        inst.close()


async def test_close_lets_accepted_passes_settle_and_their_cells_be_taken() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("close")
        ws, pipe = inst.working_set(), inst.pipeline()
        feed, told = inst.channel("i32", seed=[3]), inst.channel("i32", capacity=8, host="reader")

        def fn() -> Any:
            token = argmax()
            put(feed, token)
            put(told, token)
            return token

        outs = [inst.submit(pipe, spec(feed, [ws], fn))[0] for _ in range(6)]
        inst.close_pipeline(pipe)
        with pytest.raises(PipelineClosed):
            inst.submit(pipe, spec(feed, [ws], fn))
        assert await asyncio.gather(*outs) == generate([3], 6)
        assert pipe not in inst.pipelines
        assert [await inst.take(told) for _ in range(6)] == generate([3], 6)
        assert await inst.submit(inst.pipeline(), greedy([9], ws))[0] == reference([3, *generate([3], 5), 9])
        inst.close()
