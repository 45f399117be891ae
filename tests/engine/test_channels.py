"""Channels: first touch, device feeding, host readers and writers, counters, stop_when, poison."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core import eta
from pie_core.engine.channel import Channel
from pie_core.engine.errors import ChannelEmpty, ChannelError, ChannelFull, InvalidPass, InvalidState, PassFailed, PassSkipped
from pie_core.engine.values import Cell
from pie_core.eta.channel import put, read, take
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import argmax, decode, greedy, running, settle, spec


def feed_back(ch: Channel, *more: Channel) -> Any:
    """Put the greedy token into `ch` (and others), and return it."""

    def fn() -> Any:
        token = argmax()
        for channel in (ch, *more):
            put(channel, token)
        return token

    return fn


async def test_a_loop_feeds_itself_on_the_device() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("loop")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32")
        out = [inst.submit(pipe, spec([1, 2, 3], [ws], feed_back(ch)))[0]]
        out += [inst.submit(pipe, spec(ch, [ws], feed_back(ch)))[0] for _ in range(9)]
        assert [await f for f in out] == generate([1, 2, 3], 10)
        assert len(runner.batches) == 10
        inst.close()


async def test_the_next_step_is_submitted_before_the_last_is_read() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("ahead")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32")
        out = [inst.submit(pipe, spec([1], [ws], feed_back(ch)))[0]]
        out += [inst.submit(pipe, spec(ch, [ws], feed_back(ch)))[0] for _ in range(3)]
        await settle()
        assert len(runner.batches) == 2, "two in flight, none read"
        runner.hold = False
        runner.release()
        assert [await f for f in out] == generate([1], 4)
        inst.close()


@pytest.mark.parametrize("consumer_first", [True, False])
async def test_a_consumer_runs_a_step_after_its_producer(consumer_first: bool) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("pair")
        a, b, ch = inst.pipeline(), inst.pipeline(), inst.channel("i32", capacity=3)
        ws_a, ws_b = inst.working_set(), inst.working_set()

        def consume() -> list[Any]:
            return [inst.submit(b, spec(ch, [ws_b], argmax))[0] for _ in range(3)]

        consumed = consume() if consumer_first else []
        produced = [inst.submit(a, spec([k], [ws_a], feed_back(ch)))[0] for k in range(3)]
        consumed = consumed or consume()
        tokens = [await f for f in produced]
        assert tokens == [reference(list(range(k + 1))) for k in range(3)]
        assert [await f for f in consumed] == [reference(tokens[: k + 1]) for k in range(3)]
        for batch in runner.batches:
            fed = [src for src in batch.rows[1::8] if src != 0xFFFFFFFF]
            written = [lane[3] for group in batch.epilogues if group.program.chans for lane in group.lanes]
            assert not set(fed) & set(written), "a cell is read in the step that writes it"
        inst.close()


async def test_pitfall_10_an_unused_take_still_consumes() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("take")
        ws, pipe = inst.working_set(), inst.pipeline()
        ch = inst.channel("u32", capacity=2, host="writer")

        def drop_it() -> Any:
            take(ch)
            return argmax()

        def use_it() -> Any:
            return take(ch)

        inst.put(ch, [11])
        inst.put(ch, [22])
        first = inst.submit(pipe, spec([1], [ws], drop_it))
        second = inst.submit(pipe, spec([2], [ws], use_it))
        await first[0]
        assert await second[0] == 22
        inst.close()


async def test_pitfall_10_readiness_is_the_first_touch() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("touch")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32", seed=[7])

        def put_first() -> Any:
            put(ch, argmax())
            return take(ch)  # sees the pending value, so nothing stays behind

        def take_first() -> Any:
            value = take(ch)
            put(ch, value + 1)
            return value

        full = inst.submit(pipe, spec([1], [ws], take_first))[0]
        again = inst.submit(pipe, spec([2], [ws], take_first))[0]
        assert (await full, await again) == (7, 8)
        blocked = inst.submit(pipe, spec([3], [ws], put_first))[0]
        await settle()
        assert blocked.done(), "a put that is taken again in the pass leaves no cell, so it needs no room"
        assert await blocked == reference([1, 2, 3])
        inst.close()


async def test_a_counter_never_repeats() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("rng")
        ws, pipe = inst.working_set(), inst.pipeline()
        ch = inst.channel("u32", [2], seed=[99, 0])

        def draw() -> Any:
            state = take(ch)
            put(ch, state + eta.iota(2))
            return state

        cells = [await inst.submit(pipe, spec([k], [ws], draw))[0] for k in range(4)]
        assert [c.tolist() if isinstance(c, Cell) else c for c in cells] == [[99, k] for k in range(4)]
        inst.close()


async def test_host_reader_gets_every_value_and_holds_the_producer_back() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("reader")
        ws, pipe = inst.working_set(), inst.pipeline()
        ch, feed = inst.channel("i32", capacity=2, host="reader"), inst.channel("i32")
        first = spec([5], [ws], feed_back(feed, ch))
        inst.submit(pipe, first)
        for _ in range(5):
            inst.submit(pipe, spec(feed, [ws], feed_back(feed, ch)))
        await settle(60)
        assert len(pipe.queue) == 4, "the ring of two is full"
        assert await inst.read(ch) == generate([5], 1)[0]
        assert [await inst.take(ch) for _ in range(6)] == generate([5], 6)
        inst.close()


async def test_takes_wait_and_those_that_nothing_fills_raise() -> None:
    async with running(FakeRunner(delay=0.001)) as engine:
        inst = engine.open_instance("reader")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32", host="reader")
        with pytest.raises(ChannelEmpty):
            await inst.take(ch)
        inst.submit(pipe, spec([5], [ws], feed_back(ch)))
        one, two = inst.take(ch), inst.take(ch)
        with pytest.raises(ChannelEmpty):
            await two
        assert await one == reference([5])
        inst.close()


async def test_pitfall_3_a_host_written_cell_is_reserved_at_submit() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("mask")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("u32", capacity=1, host="writer")
        use = spec([1], [ws], lambda: take(ch))
        with pytest.raises(ChannelEmpty, match="put one before submit"):
            inst.submit(pipe, use)
        inst.put(ch, [4])
        with pytest.raises(ChannelFull, match="1 of 1"):
            inst.put(ch, [5])
        first = inst.submit(pipe, use)
        with pytest.raises(ChannelEmpty):
            inst.submit(pipe, use)  # run ahead with the old mask: refused
        assert await first[0] == 4
        other = inst.pipeline()
        inst.put(ch, [6])
        with pytest.raises(InvalidPass, match="one consumer"):
            inst.submit(other, use)
        inst.close()


async def test_set_replaces_what_later_passes_see() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("set")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("u32", host="writer")
        inst.set(ch, [1])
        one = [inst.submit(pipe, spec([k], [ws], lambda: read(ch)))[0] for k in range(3)]
        inst.set(ch, [2])
        two = inst.submit(pipe, spec([3], [ws], lambda: read(ch)))[0]
        runner.hold = False
        await settle()
        runner.release()
        assert [await f for f in one] == [1, 1, 1]
        assert await two == 2
        inst.close()


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("stop_at", [4, 5])
async def test_stop_when_cancels_whole(capacity: int, run_ahead: bool, stop_at: int) -> None:
    n = 12
    expected = generate([1], n)
    target = expected[stop_at]
    assert target not in expected[:stop_at]
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("stop")
        ws, pipe = inst.working_set(), inst.pipeline()
        feed, stop = inst.channel("i32", capacity=capacity), inst.channel("bool")
        count = inst.channel("i32", seed=[0])
        pipe.stop_when(stop)

        def fn() -> Any:
            token = argmax()
            put(feed, token)
            put(stop, eta.eq(token, target))
            put(count, take(count) + 1)
            return token

        if not run_ahead:
            other = inst.pipeline()  # a second user of the set: nothing may run before the stop is known
            await inst.submit(other, greedy([1], ws))[0]
            inst.truncate(ws, 0)
        out = [inst.submit(pipe, spec([1], [ws], fn))[0]]
        out += [inst.submit(pipe, spec(feed, [ws], fn))[0] for _ in range(n - 1)]
        got: list[Any] = []
        for f in out:
            try:
                got.append(await f)
            except PassSkipped:
                got.append(None)
        assert got == expected[: stop_at + 1] + [None] * (n - stop_at - 1)
        late = inst.submit(pipe, spec(feed, [ws], fn))[0]
        with pytest.raises(PassSkipped):
            await late
        await settle(40)
        # nothing of the cancelled passes is left: length, the fed token, the counter
        assert ws.length == stop_at + 1
        assert (feed.tail - feed.head, count.tail - count.head) == (1, 1)
        after = inst.pipeline()
        assert await inst.submit(after, spec([9], [ws], lambda: take(count)))[0] == stop_at + 1
        assert await inst.submit(after, greedy(feed, ws))[0] == reference([1, *expected[:stop_at], 9, target])
        inst.close()


async def test_stop_when_wants_a_fresh_bool_channel() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("stop")
        pipe = inst.pipeline()
        for bad in (inst.channel("i32"), inst.channel("bool", [2]), inst.channel("bool", seed=[0]), inst.channel("bool", host="writer")):
            with pytest.raises(InvalidState, match="stop_when"):
                pipe.stop_when(bad)
        good = inst.channel("bool")
        pipe.stop_when(good)
        with pytest.raises(InvalidState):
            inst.pipeline().stop_when(good)
        with pytest.raises(InvalidState):
            pipe.stop_when(inst.channel("bool"))
        with pytest.raises(InvalidPass, match="the host reads"):
            inst.submit(pipe, spec([1], [inst.working_set()], lambda: take(good)))
        inst.close()


async def test_a_fault_poisons_and_others_go_on() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("fault")
        bad_ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32")
        reader = inst.channel("i32", host="reader")
        seed = inst.channel("u32", seed=[VOCAB + 5])  # no token id
        fed = inst.submit(pipe, spec(seed, [bad_ws], feed_back(ch, reader)))[0]
        after = inst.submit(pipe, spec(ch, [bad_ws], argmax))[0]
        healthy = asyncio.ensure_future(decode(inst, [3], 4))
        with pytest.raises(PassFailed, match=r"^token 0 of the pass.* outside the vocabulary"):
            await fed
        with pytest.raises(PassFailed, match="outside the vocabulary"):
            await after
        with pytest.raises(PassFailed, match="outside the vocabulary"):
            await inst.take(reader)
        assert await healthy == generate([3], 4)
        inst.close()


async def test_a_pass_in_flight_that_took_a_poisoned_cell_fails() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("poison")
        a, b, ch = inst.pipeline(), inst.pipeline(), inst.channel("i32")
        bad = inst.channel("u32", seed=[VOCAB])
        producer = inst.submit(a, spec(bad, [inst.working_set()], feed_back(ch)))[0]
        inst.close_pipeline(a)  # not expected back, so the consumer's step goes out right behind
        consumer = inst.submit(b, spec([1], [inst.working_set()], lambda: take(ch)))[0]
        await settle()
        assert len(runner.batches) == 2
        runner.hold = False
        runner.release()
        for out in (producer, consumer):
            with pytest.raises(PassFailed, match="outside the vocabulary"):
                await out
        inst.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "f64"}, "dtype"),
        ({"shape": [0]}, "extents"),
        ({"shape": [1] * 5}, "extents"),
        ({"shape": [1 << 21]}, "elements"),
        ({"capacity": 0}, "capacity"),
        ({"host": "owner"}, "role"),
        ({"seed": [1, 2]}, "2"),
        ({"seed": [-1]}, "2\\^32"),
    ],
)
async def test_bad_channels(fields: dict[str, Any], words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("bad")
        with pytest.raises(ChannelError, match=words):
            inst.channel(**({"dtype": "u32"} | fields))
        inst.close()


async def test_roles_are_kept() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("roles")
        ws, pipe = inst.working_set(), inst.pipeline()
        reader, writer, device = inst.channel("i32", host="reader"), inst.channel("i32", host="writer"), inst.channel("i32")
        for op in (lambda: inst.put(reader, [1]), lambda: inst.put(device, [1]), lambda: inst.set(reader, [1])):
            with pytest.raises(ChannelError, match="create it with"):
                op()
        with pytest.raises(ChannelError, match="create it with"):
            await inst.take(writer)
        with pytest.raises(InvalidPass, match="host-written"):
            inst.submit(pipe, spec([1], [ws], feed_back(writer)))
        with pytest.raises(InvalidPass, match="host reads"):
            inst.submit(pipe, spec([1], [ws], lambda: take(reader)))
        inst.close()


async def test_the_arena_is_finite_and_reused() -> None:
    runner = FakeRunner(limits(arena_words=100))
    async with running(runner) as engine:
        for _ in range(3):
            inst = engine.open_instance("arena")
            inst.channel("u32", [20], capacity=3)
            with pytest.raises(Exception, match="20 of 100, which all inferlets share, are free") as caught:
                inst.channel("u32", [21])
            assert type(caught.value).__name__ == "ArenaFull"
            inst.close()
