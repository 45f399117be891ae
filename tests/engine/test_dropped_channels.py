"""A dropped channel gives its cells back when nothing accepted needs them; the arena grows on demand, and an instance has a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import DeviceLost, DeviceOutOfMemory
from pie_core.engine.channel import Channel
from pie_core.engine.errors import ArenaFull, BudgetExceeded, ChannelEmpty, EngineLost, InvalidState
from pie_core.engine.forward import BUFFERED
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.eta.channel import put, read, take
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import argmax, decode, greedy, running, settle, spec


def puts(*channels: Channel, value: Callable[[], Any] = argmax) -> Any:
    """The greedy token; `value` goes into the channels."""

    def fn() -> Any:
        for ch in channels:
            put(ch, value())
        return argmax()

    return fn


async def test_cells_of_a_channel_that_nobody_uses_are_free_at_once() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("drop")
        for host, seed in ((None, None), (None, [1, 2]), ("reader", None), ("writer", None)):
            ch = inst.channel("u32", [2], capacity=3, seed=seed, host=host)
            assert (engine.arena.used, inst.cell_words) == (8, 8)
            inst.drop_channel(ch)
            inst.drop_channel(ch)  # twice is harmless
            assert (engine.arena.used, inst.cell_words, len(inst.channels)) == (0, 0, 0)
            with pytest.raises(InvalidState, match="dropped"):
                inst.submit(inst.pipeline(), spec([1], [inst.working_set()], puts(ch, value=lambda: eta.iota(2))))
        inst.close()


async def test_what_was_accepted_goes_on_and_then_the_cells_are_free() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("loop")
        ws, pipe, ch, kept = inst.working_set(), inst.pipeline(), inst.channel("i32"), inst.channel("i32", host="reader")
        outs = [inst.submit(pipe, spec([1], [ws], puts(ch)))[0]]
        outs += [inst.submit(pipe, spec(ch, [ws], puts(ch)))[0] for _ in range(5)]
        inst.submit(pipe, spec([2], [inst.working_set()], puts(kept)))
        inst.drop_channel(ch)
        await settle()
        assert engine.arena.used == ch.words + kept.words, "passes wait for it and are in flight"
        runner.hold = False
        runner.release()
        assert [await out for out in outs] == generate([1], 6)
        assert await inst.take(kept) == reference([2])
        assert engine.arena.used == kept.words
        inst.close()


async def test_a_new_owner_of_freed_cells_reads_what_it_put() -> None:
    """Also where a step that was to write them is in flight while they change hands."""
    runner = FakeRunner(limits(arena_words=8))
    async with running(runner) as engine:
        inst = engine.open_instance("hands")
        pipe = inst.pipeline()
        for k in range(12):
            ch = inst.channel("i32", [4], seed=[k, 0, 0, 0])  # all that there is

            def fn(ch: Channel = ch) -> Any:
                return eta.reshape(read(ch), (4,))

            out = inst.submit(pipe, spec([k], [inst.working_set()], lambda fn=fn: fn()))[0]
            inst.drop_channel(ch)
            assert (await out).tolist() == [k, 0, 0, 0]
        inst.close()


async def test_a_guess_that_uses_it_is_dropped_with_it() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("guess")
        ws, pipe, state = inst.working_set(), inst.pipeline(), inst.channel("u32", seed=[0])

        def fn() -> Any:
            put(state, take(state) + 1)
            return argmax()

        feed, tokens = [1], []
        for _ in range(6):
            tokens.append(await inst.submit(pipe, spec(feed, [ws], fn))[0])
            feed = [tokens[-1]]
            await settle()
        assert ws.guess is not None
        inst.drop_channel(state)
        assert ws.guess is None and engine.arena.used == 0
        assert tokens + await decode(inst, feed, 3, ws, pipe) == generate([1], 9)
        inst.close()


async def test_a_stop_channel_lives_as_long_as_its_pipeline() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("stop")
        ws, pipe, feed, stop = inst.working_set(), inst.pipeline(), inst.channel("i32"), inst.channel("bool")
        pipe.stop_when(stop)

        def fn() -> Any:
            token = argmax()
            put(feed, token)
            put(stop, token >= 1000)
            return token

        first = inst.submit(pipe, spec([1], [ws], fn))[0]
        inst.drop_channel(stop)
        assert await first == reference([1])
        assert engine.arena.used == feed.words + stop.words + 1
        inst.close_pipeline(pipe)
        assert engine.arena.used == feed.words
        inst.close()


async def test_values_that_nobody_can_take_any_more_hold_nobody_up() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("full")
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("i32", host="reader")
        outs = [inst.submit(pipe, spec([k], [ws], puts(ch)))[0] for k in range(4)]
        await settle()
        assert not outs[1].done(), "the ring is full"
        inst.drop_channel(ch)
        assert [await out for out in outs] == [reference(list(range(n))) for n in range(1, 5)]
        assert engine.arena.used == 0
        inst.close()


async def test_a_take_or_commit_in_flight_is_served() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("commit")
        ws, pipe, counts, values = inst.working_set(), inst.pipeline(), *(inst.channel("i32", host="reader") for _ in range(2))
        inst.submit(pipe, greedy([5], ws))
        one = puts(counts, value=lambda: eta.cast(eta.reduce_argmax(eta.iota(1)) + 1, "i32"))
        inst.submit(pipe, spec([1, 2], [ws], one, BUFFERED))
        inst.submit(pipe, spec([9], [inst.working_set()], puts(values)))
        inst.commit(ws, counts)
        inst.discard(ws)
        taken, never = inst.take(values), inst.take(values)
        for ch in (counts, values):
            inst.drop_channel(ch)
        runner.hold = False
        runner.release()
        assert await taken == reference([9])
        with pytest.raises(ChannelEmpty):
            await never
        assert await inst.submit(pipe, greedy([7], ws))[0] == reference([5, 1, 7])
        assert engine.arena.used == 0
        inst.close()


def wide(inst: Instance, n: int, k: int = 0) -> Channel:
    return inst.channel("u32", [n], seed=[k] * n)


async def test_the_arena_grows_to_its_limit_and_keeps_what_it_holds() -> None:
    runner = FakeRunner(limits(arena_start=64, arena_words=1000))
    async with running(runner) as engine:
        inst = engine.open_instance("grow")
        sizes = []
        channels = []
        for k in range(5):
            channels.append(wide(inst, 100, k))
            sizes.append(len(runner.arena))
        assert sizes == [256, 512, 1000, 1000, 1000]
        pipe, ws = inst.pipeline(), inst.working_set()
        for k, ch in enumerate(channels):
            out = inst.submit(pipe, spec([k], [ws], lambda ch=ch: eta.reshape(read(ch), (100,))))[0]
            assert (await out).tolist() == [k] * 100
        with pytest.raises(ArenaFull, match=r"needs 2 words .* 0 of 1000, which all inferlets share, are free: use smaller cells"):
            inst.channel("u32")
        inst.drop_channel(channels[2])
        assert wide(inst, 100).words == 200
        inst.close()


@pytest.mark.parametrize(
    ("fault", "told", "words"),
    [
        (DeviceOutOfMemory("no 512 bytes"), ArenaFull, "cannot grow from 64 to 128 words: DeviceOutOfMemory: no 512 bytes; use smaller"),
        (DeviceLost("it is gone"), EngineLost, "the device was lost: it is gone"),
    ],
)
async def test_a_device_that_refuses_to_grow(fault: Exception, told: type[Exception], words: str) -> None:
    runner = FakeRunner(limits(arena_start=64, arena_words=1000))
    runner.fail_grow = fault
    async with running(runner) as engine:
        inst = engine.open_instance("refused")
        with pytest.raises(told, match=words):
            wide(inst, 50)
        assert (engine.arena.used, engine.arena.there, inst.cell_words) == (0, 64, 0)
        wide(inst, 30)
        runner.fail_grow = None
        wide(inst, 50)
        inst.close()


async def test_an_instance_has_a_share_of_the_arena() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst, other = engine.open_instance("greedy", limits=InstanceLimits(cell_words=100)), engine.open_instance("other")
        ch = inst.channel("i32", [40])
        with pytest.raises(BudgetExceeded, match=r"needs 22 words .* and 80 of the 100 .* let go of channels$"):
            inst.channel("i32", [11])
        out = inst.submit(inst.pipeline(), spec([1], [inst.working_set()], puts(ch, value=lambda: eta.cast(eta.iota(40), "i32"))))[0]
        inst.drop_channel(ch)
        with pytest.raises(BudgetExceeded, match=r"; 80 of them are of channels that were let go .* await those first"):
            inst.channel("i32", [11])
        assert wide(other, 1000).words == 2000, "nobody else feels it"
        runner.hold = False
        runner.release()
        await out
        assert inst.channel("i32", [50]).words == 100
        inst.close()
        other.close()
