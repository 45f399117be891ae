"""Run-ahead: loops that feed themselves on the device, the gates of passes behind a stop, and every way in which they end early."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import NONE, DeviceError, DeviceLost
from pie_core.engine.channel import Channel
from pie_core.engine.errors import ArenaFull, EngineError, InstanceClosed, PassFailed, PassSkipped
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.runner import EpilogueGroup, Gate, StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.eta.channel import put, take
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import GREEDY, argmax, decode, greedy, running, settle, spec


class Loop:
    """A loop that feeds itself from a seeded channel, stops at token `target`, and counts its passes on the device. A pass whose count is
    `bad_at` feeds on a token that no model has."""

    def __init__(self, inst: Instance, first: int, target: int, *, capacity: int = 1, bad_at: int = -1, say_stop: bool = True) -> None:
        self.inst, self.ws, self.pipe = inst, inst.working_set(), inst.pipeline()
        self.feed = inst.channel("i32", capacity=capacity, seed=[first])
        self.count = inst.channel("i32", seed=[0])
        self.stop: Channel | None = inst.channel("bool", capacity=capacity) if say_stop else None
        self.first, self.target, self.bad_at = first, target, bad_at
        if self.stop is not None:
            self.pipe.stop_when(self.stop)

    def epilogue(self) -> Any:
        token, n = argmax(), take(self.count)
        put(self.feed, token + eta.eq(n, self.bad_at).cast("i32") * VOCAB)
        put(self.count, n + 1)
        if self.stop is not None:
            put(self.stop, eta.eq(token, self.target))
        return token

    def submit(self, n: int, pipe: Pipeline | None = None) -> list[asyncio.Future[Any]]:
        return [self.inst.submit(pipe or self.pipe, spec(self.feed, [self.ws], self.epilogue))[0] for _ in range(n)]


async def outcomes(futures: list[asyncio.Future[Any]]) -> list[Any]:
    """The value of each, or the class of its error."""
    got = await asyncio.gather(*futures, return_exceptions=True)
    return [type(value) if isinstance(value, BaseException) else value for value in got]


def stop_after(first: int, n: int) -> tuple[int, list[int]]:
    """(the token of pass `n`, which no pass before it gives; the tokens up to it)."""
    tokens = generate([first], n)
    assert tokens[-1] not in tokens[:-1]
    return tokens[-1], tokens


async def test_self_feeding_loops_have_four_steps_in_flight_and_host_fed_ones_two() -> None:
    runner = FakeRunner()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("deep")
        loop = Loop(inst, 3, -1)
        out = loop.submit(9)
        await settle()
        assert (len(runner.batches), engine.status()["in_flight"]) == (4, 4)
        runner.hold = False
        runner.release()
        assert await outcomes(out) == generate([3], 9)
        runner.hold = True
        host = inst.pipeline()
        ws = inst.working_set()
        later = [inst.submit(host, greedy([t], ws))[0] for t in (1, 2, 3)]
        more = loop.submit(4)
        await settle()
        assert engine.status()["in_flight"] == 2
        runner.hold = False
        runner.release()
        assert await outcomes(later) == [reference([1, 2, 3][:n]) for n in (1, 2, 3)]
        assert await outcomes(more) == generate([3], 13)[9:]
        inst.close()


async def test_a_long_step_is_not_stacked_four_deep() -> None:
    runner = FakeRunner(delay=0.04)
    async with running(runner) as engine:
        inst = engine.open_instance("slow")
        out = Loop(inst, 3, -1).submit(6)
        await out[0]
        deepest = 0
        for f in out[1:]:
            deepest = max(deepest, int(engine.status()["in_flight"]))
            await f
        assert deepest <= 2 + 1, "four at first, when nothing was measured; two from then on"
        assert await outcomes(out) == generate([3], 6)
        inst.close()


async def test_no_host_wait_between_tokens_and_few_bytes() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("counted")
        loop = Loop(inst, 3, -1)
        assert await outcomes(loop.submit(20)) == generate([3], 20)
        status = engine.status()
        assert (status["host_waits"], status["read_backs"]) == (0, 20)
        assert status["read_back_bytes"] <= 16 * 20, "status, the token fed, the stop, the output"
        assert not any(len(batch.gates) > 1 for batch in runner.batches)
        inst.close()
    async with running(FakeRunner(), predict=False) as engine:
        inst = engine.open_instance("host-fed")
        assert await decode(inst, [3], 20) == generate([3], 20)
        assert engine.status()["host_waits"] == 19
        inst.close()


async def test_a_loop_without_outputs_runs_to_its_stop() -> None:
    target, tokens = stop_after(3, 5)
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("silent")
        loop = Loop(inst, 3, target)
        reader = inst.channel("i32", capacity=16, host="reader")

        def fn() -> None:
            put(reader, loop.epilogue())

        out = [inst.submit(loop.pipe, spec(loop.feed, [loop.ws], fn))[0] for _ in range(9)]
        assert await outcomes(out) == [True] * 5 + [PassSkipped] * 4
        assert [await inst.take(reader) for _ in range(5)] == tokens
        inst.close()


@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("behind", [1, 2, 5])
@pytest.mark.parametrize("stop_at", [1, 4])
async def test_passes_in_flight_behind_a_stop_do_nothing(behind: int, stop_at: int, capacity: int) -> None:
    target, tokens = stop_after(3, stop_at)
    runner = FakeRunner()
    async with running(runner, ahead=behind + 1) as engine:
        inst = engine.open_instance("stop")
        loop = Loop(inst, 3, target, capacity=capacity)
        done = loop.submit(stop_at - 1)
        assert await outcomes(done) == tokens[:-1]
        runner.hold = True
        out = loop.submit(behind + 1)
        await settle()
        assert engine.status()["in_flight"] == behind + 1
        arena, cells = list(runner.arena), dict(runner.kv)
        gates = [len(batch.gates) for batch in runner.batches[-behind - 1 :]]
        assert gates == [0] + [1] * behind, "the first of them cannot be cancelled"
        assert runner.empty_steps == behind and runner.masked == 2 * behind, "a row and a lane each"
        runner.release()
        assert await outcomes(out) == [tokens[-1]] + [PassSkipped] * behind
        await settle()
        assert list(runner.arena) == arena and runner.kv == cells and len(cells) == stop_at
        assert engine.metrics.skipped_passes == behind
        assert loop.ws.length == stop_at and (loop.feed.tail - loop.feed.head, loop.count.tail - loop.count.head) == (1, 1)
        runner.hold = False
        # what the loop left is what a host-fed one would have: the next token, and the count
        after = inst.pipeline()
        loop.stop = None
        assert await outcomes(loop.submit(2, after)) == generate([3, *tokens], 2)
        assert await inst.submit(after, spec([1], [inst.working_set()], lambda: take(loop.count)))[0] == stop_at + 2
        inst.close()


async def test_lanes_are_masked_beside_others() -> None:
    """Two loops of different lengths and a host-fed one share steps; each stops where it should."""
    runner = FakeRunner()
    async with running(runner, ahead=6) as engine:
        inst = engine.open_instance("mixed")
        (one, first), (two, second) = stop_after(3, 4), stop_after(11, 9)
        loops = [Loop(inst, 3, one), Loop(inst, 11, two)]
        host = asyncio.ensure_future(decode(inst, [7, 8], 12))
        outs = [loop.submit(14) for loop in loops]
        assert await outcomes(outs[0]) == first + [PassSkipped] * 10
        assert await outcomes(outs[1]) == second + [PassSkipped] * 5
        assert await host == generate([7, 8], 12)
        assert runner.masked > 0
        assert [loop.ws.length for loop in loops] == [4, 9]
        inst.close()


async def test_a_masked_lane_shares_its_step_with_live_ones() -> None:
    target, tokens = stop_after(3, 2)
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("mixed")
        stops, goes = Loop(inst, 3, target), Loop(inst, 11, -1)
        runner.hold = True
        outs = [stops.submit(5), goes.submit(5)]
        await settle()
        assert [batch.n_tokens for batch in runner.batches] == [2] * 4
        assert (runner.masked, runner.empty_steps) == (4, 0), "two passes of a row and a lane"
        runner.hold = False
        runner.release()
        assert await outcomes(outs[0]) == tokens + [PassSkipped] * 3
        assert await outcomes(outs[1]) == generate([11], 5)
        inst.close()


@pytest.mark.parametrize("say_stop", [False, True])
@pytest.mark.parametrize("bad_at", range(6))
async def test_a_fault_in_the_middle_fails_those_behind_it(bad_at: int, say_stop: bool) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("fault")
        out = Loop(inst, 3, -1, bad_at=bad_at, say_stop=say_stop).submit(8)
        # the pass that counts `bad_at` puts the bad token; the one that takes it fails, and all behind it
        assert await outcomes(out) == generate([3], bad_at + 1) + [PassFailed] * (7 - bad_at)
        assert await decode(inst, [5], 3) == generate([5], 3)
        inst.close()


@pytest.mark.parametrize("when", ["submit", "results"])
@pytest.mark.parametrize("step", range(6))
async def test_a_device_error_in_the_middle_fails_those_behind_it(step: int, when: str) -> None:
    runner = FakeRunner()
    failed: list[int] = []

    def fail(_: Any) -> Exception | None:
        if len(runner.batches) - 1 == step:
            failed.append(step)
            return DeviceError("it broke")
        return None

    if when == "submit":
        runner.fail_submit = fail
    else:
        runner.fail_results = fail
    async with running(runner) as engine:
        inst = engine.open_instance("broken")
        out = Loop(inst, 3, -1).submit(8)
        got = await outcomes(out)
        known = step if when == "results" else got.index(PassFailed)  # a step that was not submitted fails the set before others are read
        assert got == generate([3], known) + [PassFailed] * (8 - known) and known <= step
        assert failed == [step]
        assert await decode(inst, [5], 3) == generate([5], 3)
        inst.close()


async def test_a_pass_that_fails_and_says_stop_gives_its_cause_to_those_behind_it() -> None:
    """Its stop cell shut the gate of passes in flight, so they are cancelled whole; what they tell is the fault, not a stop."""
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("both")
        pipe, stop = inst.pipeline(), inst.channel("bool", capacity=4)
        bad, fine = inst.working_set(), inst.working_set()
        pipe.stop_when(stop)
        seed = inst.channel("i32", seed=[VOCAB + 5])
        count = inst.channel("i32", seed=[0])

        def says_stop() -> Any:
            put(stop, eta.ge(argmax(), 0))
            return argmax()

        def counts() -> Any:
            put(count, take(count) + 1)
            return argmax()

        runner.hold = True
        out = [inst.submit(pipe, spec(seed, [bad], says_stop))[0], inst.submit(pipe, spec([4], [fine], counts))[0]]
        await settle()
        assert engine.status()["in_flight"] == 2 and runner.empty_steps == 1
        runner.hold = False
        runner.release()
        assert await outcomes(out) == [PassFailed, PassFailed]
        assert fine.length == 0
        after = inst.pipeline()
        assert await inst.submit(after, spec([4], [fine], lambda: take(count)))[0] == 0
        inst.close()


ENDS: dict[str, Callable[[Engine, Instance, Loop], Any]] = {
    "instance.close": lambda engine, inst, loop: inst.close(),
    "pipeline.close": lambda engine, inst, loop: inst.close_pipeline(loop.pipe),
    "drop": lambda engine, inst, loop: inst.drop(loop.ws),
    "engine lost": lambda engine, inst, loop: None,
}


@pytest.mark.parametrize("end", ["instance.close", "pipeline.close", "drop"])
@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_ends_at_every_moment_leave_nothing_behind(end: str, turns: int) -> None:
    target, tokens = stop_after(3, 5)
    runner = FakeRunner(delay=1e-4)
    async with running(runner) as engine:
        inst, other = engine.open_instance("ends"), engine.open_instance("goes on")
        loop = Loop(inst, 3, target)
        out = loop.submit(9)
        host = asyncio.ensure_future(decode(other, [5], 4))
        await settle(turns)
        ENDS[end](engine, inst, loop)
        got = await outcomes(out)
        want = tokens + [PassSkipped] * 4
        if end == "instance.close":
            kept = next((k for k, value in enumerate(got) if value is InstanceClosed), 9)
            assert got == want[:kept] + [InstanceClosed if w is not PassSkipped or kept <= 5 else w for w in want[kept:]]
        else:
            assert got == want, "what was accepted still settles"
        assert await host == generate([5], 4)
        inst.close()
        other.close()


@pytest.mark.parametrize("turns", range(0, 16, 3))
async def test_a_lost_device_ends_everything(turns: int) -> None:
    runner = FakeRunner(delay=1e-4)
    async with running(runner) as engine:
        inst = engine.open_instance("lost")
        out = Loop(inst, 3, -1).submit(30)
        await settle(turns)
        runner.fail_results = lambda batch: DeviceLost("gone")
        got = await asyncio.gather(*out, return_exceptions=True)
        assert isinstance(got[-1], EngineError)
        values = [value for value in got if isinstance(value, int)]
        assert values == generate([3], len(values)) and len(values) < 30


async def test_only_passes_behind_a_possible_stop_have_gates() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("host-fed")
        ws, pipe, stop = inst.working_set(), inst.pipeline(), inst.channel("bool")
        pipe.stop_when(stop)

        def fn() -> Any:
            token = argmax()
            put(stop, eta.eq(token, -1))
            return token

        tokens = [3]
        for _ in range(5):
            tokens.append(await inst.submit(pipe, spec(tokens[-1:], [ws], fn))[0])
        assert tokens[1:] == generate([3], 5)
        plain = [inst.submit(pipe, greedy([k], inst.working_set()))[0] for k in range(4)]
        assert await outcomes(plain) == [reference([k]) for k in range(4)], "and none of these says stop"
        assert not any(batch.gates for batch in runner.batches)
        inst.close()


@pytest.mark.parametrize("through", ["set", "channel"])
async def test_no_pass_of_another_pipeline_builds_on_one_that_may_be_cancelled(through: str) -> None:
    target, tokens = stop_after(3, 2)
    runner = FakeRunner()
    async with running(runner, ahead=6) as engine:
        inst = engine.open_instance("shared")
        loop = Loop(inst, 3, target)
        runner.hold = True
        out = loop.submit(4)
        await settle()
        assert engine.status()["in_flight"] == 4
        inst.close_pipeline(loop.pipe)  # nobody is waited for: what is ready may go
        other = inst.pipeline()
        late = greedy([1], loop.ws) if through == "set" else spec([1], [inst.working_set()], lambda: take(loop.count))
        waits = inst.submit(other, late)[0]
        await settle()
        assert len(runner.batches) == 4, "it waits until the stop is known"
        runner.hold = False
        runner.release()
        assert await outcomes(out) == tokens + [PassSkipped] * 2
        assert await waits == (reference([3, tokens[0], 1]) if through == "set" else 2)
        inst.close()


async def test_a_prompt_of_several_steps_behind_a_stop_is_cancelled_whole() -> None:
    target, tokens = stop_after(3, 1)
    runner = FakeRunner(limits(max_tokens=8))
    async with running(runner) as engine:
        inst = engine.open_instance("long")
        loop, ws = Loop(inst, 3, target), inst.working_set()
        runner.hold = True
        out = loop.submit(1)
        prompt = inst.submit(loop.pipe, greedy(list(range(20)), ws))[0]
        await settle()
        assert engine.status()["in_flight"] == 2 and runner.masked == 8, "its rows; its lane comes with its last ones"
        runner.hold = False
        runner.release()
        assert await outcomes([*out, prompt]) == [*tokens, PassSkipped]
        assert ws.length == 0 and len(runner.kv) == 1
        assert await inst.submit(inst.pipeline(), greedy([9], ws))[0] == reference([9])
        inst.close()


async def test_a_stop_channel_needs_a_word_of_the_arena() -> None:
    async with running(FakeRunner(limits(arena_words=4))) as engine:
        inst = engine.open_instance("full")
        stop = inst.channel("bool")
        inst.channel("i32")
        with pytest.raises(ArenaFull):
            inst.pipeline().stop_when(stop)
        inst.close()


@pytest.mark.parametrize("single_lanes", [False, True])
def test_a_packed_gate_names_slots_states_and_lane(single_lanes: bool) -> None:
    lanes: list[Sequence[int]] = [[0, 0, 1], [1, 2, 3], [2, 4, 5]]
    batch = StepBatch(
        tables=[5], masks=[0, 1, 1], reads=[0, 1, 3], runs=[1, NONE, 4, 1, NONE, 3, 4, 6, 2, NONE, 4, 6, 7, 1, NONE], n_seqs=3
    )
    for pos in range(4):
        batch.rows += [7, NONE, pos, 80 + pos, 0, 0, 0, 0]
    batch.epilogues = [EpilogueGroup(GREEDY.program, lanes[:2]), EpilogueGroup(GREEDY.program, lanes[2:])]
    batch.gates = [Gate(40, 41, range(1, 3), range(1, 2), lanes[1]), Gate(50, NONE, range(3, 4), range(2, 3), None)]
    assert not batch.skippable
    packed = pack_step(batch, single_lanes=single_lanes)
    step = array("I", bytes(packed.data))
    at, count, free = step[8:11]
    assert (count, free) == (2, 1)
    gates = [list(step[at + 4 * k : at + 4 * k + 4]) for k in range(2)]
    assert [gate[:2] for gate in gates] == [[40, 41], [50, NONE]]
    masked = [list(step[first : first + n]) for _, _, first, n in gates]
    assert [[step[place] for place in places] for places in masked] == [[81, 82, 6, 1], [83, 7]]
    assert masked[0][-1] == packed.groups[1 if single_lanes else 0].lane_offset // 4 + (0 if single_lanes else 3)
    batch.gates.append(Gate(60, NONE, range(1), range(1), None))
    assert batch.skippable
