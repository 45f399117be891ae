"""The same random programs on two engines, one that guesses and one that does not: nothing that can be observed differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie_core import eta
from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import EngineError
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.values import Cell
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put, take
from tests.engine.fake_runner import FakeRunner, limits
from tests.engine.support import argmax, greedy, settle, spec, traced
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

GEOMETRIES = [FOLDING, Geometry("folding", 5, 1), BUFFERED]
PLUS = traced(lambda: argmax() + 1)


class Lane:
    """One sequence of an instance: a set, its pipeline, the channels of its programs, and the last token."""

    def __init__(self, inst: Instance, ws: WorkingSet, geometry: Geometry) -> None:
        self.inst, self.ws, self.geometry = inst, ws, geometry
        self.pipe: Pipeline = inst.pipeline()
        self.token = 3
        self.counter = inst.channel("u32", [2], seed=[7, 0])
        self.reader = inst.channel("i32", capacity=3, host="reader")
        self.gone = False

    def make(self, kind: str, tokens: list[int]) -> PassSpec:
        geometry = self.geometry
        if kind == "plain":
            return greedy(tokens, self.ws, geometry=geometry)
        if kind == "params":
            return PassSpec(tokens, [self.ws], geometry, program=PLUS.program, params=[tokens[-1] % 2])

        def count() -> Any:
            state = take(self.counter)
            put(self.counter, state + eta.iota(2))
            return argmax(), state

        def tell() -> Any:
            token = argmax()
            put(self.reader, token)
            return token

        return spec(tokens, [self.ws], count if kind == "counter" else tell, geometry)


class World:
    """An engine with the lanes of all instances, and everything that was told to the program."""

    def __init__(self, *, predict: bool, pages: int) -> None:
        self.runner = FakeRunner(limits(max_tokens=8, max_reads=6, pages=pages, context=4096, arena_words=1 << 14))
        self.engine = Watched(self.runner, predict=predict)
        self.lanes: list[Lane] = []
        self.told: list[Any] = []
        self.open: list[Any] = []

    def note(self, call: Callable[[], Any]) -> Any:
        """Call, and keep how it was refused."""
        try:
            return call()
        except EngineError as error:
            self.told.append((type(error).__name__, str(error)))
            return None

    def wait_for(self, futures: list[Any] | None) -> None:
        self.open += futures or []

    def hear(self) -> None:
        """Keep what has settled, in the order in which it was asked."""
        while self.open and self.open[0].done():
            future = self.open.pop(0)
            error = future.exception()
            value = future.result() if error is None else (type(error).__name__, str(error))
            self.told.append(value.tolist() if isinstance(value, Cell) else value)

    async def quiet(self) -> None:
        """Until everything accepted has settled, or waits for the program."""
        for _ in range(10000):
            await settle(10)
            if not self.engine.scheduler.instances and not any(flight.step.passes for flight in self.engine._flights):
                break  # a guess may still be under way
            await asyncio.sleep(0.0002)
        else:
            raise AssertionError("passes wait for ever")
        self.hear()

    def seen(self) -> list[Any]:
        """What can be observed of the state when all is quiet."""
        state: list[Any] = [self.engine.pool.used, self.engine.pool.free, self.engine.arena.used]
        for lane in self.lanes:
            inst, ws = lane.inst, lane.ws
            state.append((inst.closed, inst.pages, inst.outstanding, len(inst.working_sets), len(inst.pipelines)))
            state.append((ws.length, ws.frozen, len(ws.pages), sorted(self.engine.pool.refs(p) for p in ws.pages), str(ws.error)))
            state.append([self.runner.kv.get(ws.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS) for p in range(ws.length)])
            for ch in (lane.counter, lane.reader):
                cells = [self.runner.arena[ch.offset(n) + k] for n in range(ch.head, ch.tail) for k in range(ch.cell_words)]
                state.append((ch.head, ch.tail, ch.pending, str(ch.poison), [] if ch.closed else cells))
        metrics = self.engine.metrics
        return [*state, metrics.passes, metrics.failed_passes, metrics.decode_tokens + metrics.prefill_tokens]


class TwoWorlds(RuleBasedStateMachine):
    pages = 600

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.worlds = [World(predict=True, pages=self.pages), World(predict=False, pages=self.pages)]
        self.each(lambda world: world.engine.start())

    def each(self, act: Callable[[World], Any]) -> None:
        async def call() -> None:
            for world in self.worlds:
                result = world.note(lambda world=world: act(world))
                if asyncio.iscoroutine(result):
                    await result

        self.loop.run_until_complete(call())

    def lane(self, k: int, act: Callable[[World, Lane], Any]) -> None:
        """Act on the k-th lane that is not gone."""
        self.each(lambda world: act(world, lanes[k % len(lanes)]) if (lanes := [p for p in world.lanes if not p.gone]) else None)

    @initialize(prompts=st.lists(st.integers(1, 34), min_size=2, max_size=4))
    def begin(self, prompts: list[int]) -> None:
        def act(world: World) -> None:
            for k, n in enumerate(prompts):
                if k % 2 == 0:
                    inst = world.engine.open_instance(str(k), limits=InstanceLimits(pages=300))
                lane = Lane(inst, inst.working_set(), GEOMETRIES[(n + k) % 3])
                world.lanes.append(lane)
                world.wait_for(inst.submit(lane.pipe, lane.make("plain", [k + 1] * n)))

        self.each(act)
        self.compare()

    @rule(
        k=st.integers(0, 3),
        n=st.integers(3, 20),
        kind=st.sampled_from(["plain", "plain", "params", "counter", "tell"]),
        pause=st.sampled_from([0, 1, 2, 5, 40]),
    )
    def decode(self, k: int, n: int, kind: str, pause: int) -> None:
        """A loop that feeds back what it gets, and leaves right behind an answer."""

        async def run(world: World, lane: Lane) -> None:
            for _ in range(n):
                outs = world.note(lambda: lane.inst.submit(lane.pipe, lane.make(kind, [lane.token])))
                if outs is None:
                    return
                world.wait_for(outs)
                if kind == "tell":
                    world.wait_for([lane.inst.take(lane.reader)])
                await asyncio.wait(outs[:1], timeout=1)
                if not outs[0].done() or outs[0].exception() is not None:
                    return
                lane.token = outs[0].result() % 89
                await settle(pause)

        self.lane(k, run)

    @rule(n=st.integers(3, 8))
    def decode_together(self, n: int) -> None:
        async def one(world: World, lane: Lane) -> None:
            for _ in range(n):
                outs = lane.inst.submit(lane.pipe, lane.make("plain", [lane.token]))
                try:
                    lane.token = int(await asyncio.wait_for(asyncio.shield(outs[0]), 1))  # type: ignore[arg-type]
                except EngineError:
                    return

        async def run(world: World) -> None:
            await asyncio.gather(*(one(world, lane) for lane in world.lanes if not lane.gone and not lane.pipe.closed))
            world.told.append([lane.token for lane in world.lanes])

        self.compare()
        self.each(run)

    @rule(k=st.integers(0, 3), tokens=st.lists(st.integers(0, 20), min_size=1, max_size=20))
    def submit(self, k: int, tokens: list[int]) -> None:
        self.lane(k, lambda world, lane: world.wait_for(lane.inst.submit(lane.pipe, lane.make("plain", tokens))))

    @rule(k=st.integers(0, 3))
    def submit_from_another_pipeline(self, k: int) -> None:
        def act(world: World, lane: Lane) -> None:
            world.wait_for(lane.inst.submit(lane.inst.pipeline(), lane.make("counter", [lane.token])))

        self.compare()
        self.lane(k, act)
        self.compare()

    @rule(k=st.integers(0, 3), buffer=st.booleans(), ordered=st.booleans())
    def fork(self, k: int, buffer: bool, ordered: bool) -> None:
        def act(world: World, lane: Lane) -> None:
            child = lane.inst.fork(lane.ws, lane.pipe if ordered else None, buffer=buffer)
            if len(world.lanes) < 8:
                world.lanes.append(Lane(lane.inst, child, lane.geometry))
            else:
                lane.inst.drop(child)

        self.lane(k, act)

    @rule(k=st.integers(0, 3), n=st.integers(0, 4), verb=st.sampled_from(["commit", "discard", "truncate"]), zero=st.booleans())
    def edit(self, k: int, n: int, verb: str, zero: bool) -> None:
        def act(world: World, lane: Lane) -> None:
            amount = n if verb != "truncate" else 0 if zero else lane.ws.length
            getattr(lane.inst, verb)(lane.ws, min(amount, lane.ws.buffered) if verb != "truncate" else amount)

        self.compare()
        self.lane(k, act)

    @rule(k=st.integers(0, 3))
    def length(self, k: int) -> None:
        def act(world: World, lane: Lane) -> None:
            future = self.loop.create_future()
            lane.inst.length(lane.ws, lambda value, error: future.set_result(value if error is None else type(error).__name__))
            world.wait_for([future])

        self.lane(k, act)

    @rule(k=st.integers(0, 3), read=st.booleans())
    def take(self, k: int, read: bool) -> None:
        self.lane(k, lambda world, lane: world.wait_for([(lane.inst.read if read else lane.inst.take)(lane.reader)]))

    @rule(k=st.integers(0, 3), how=st.sampled_from(["drop", "pipe", "pipe", "inst"]))
    def end(self, k: int, how: str) -> None:
        def act(world: World, lane: Lane) -> None:
            if how == "drop":
                lane.gone = True
                lane.inst.drop(lane.ws)
            elif how == "pipe":
                lane.inst.close_pipeline(lane.pipe)
                lane.pipe = lane.inst.pipeline()
            else:
                for other in world.lanes:
                    other.gone = other.gone or other.inst is lane.inst
                lane.inst.close()

        self.compare()
        self.lane(k, act)

    @rule(delay=st.sampled_from([0.0, 0.0003, 0.002]))
    def pace(self, delay: float) -> None:
        self.each(lambda world: setattr(world.runner, "delay", delay))

    @rule(times=st.integers(1, 12))
    def run(self, times: int) -> None:
        self.each(lambda world: settle(times))

    @rule()
    def compare(self) -> None:
        self.each(lambda world: world.quiet())
        one, two = self.worlds
        assert one.told == two.told
        assert one.seen() == two.seen()
        assert len(one.open) == len(two.open)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.each(lambda world: world.engine.check_asleep())

    def teardown(self) -> None:
        self.compare()
        one = self.worlds[0].engine
        self.each(lambda world: world.engine.stop())
        assert one.pool.unlent == one.pool.total and one.metrics.predicted == one.metrics.adopted + one.metrics.dropped
        TwoWorlds.examples += 1
        TwoWorlds.adopted += one.metrics.adopted
        TwoWorlds.dropped += one.metrics.dropped
        self.loop.close()

    adopted = dropped = examples = 0


_SETTINGS = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TestTwoWorlds = TwoWorlds.TestCase
TestTwoWorlds.settings = _SETTINGS


def test_it_was_about_guesses() -> None:
    if not TwoWorlds.examples:
        pytest.skip("the machine did not run")
    assert TwoWorlds.adopted > 100 and TwoWorlds.dropped > 20, (TwoWorlds.adopted, TwoWorlds.dropped)
