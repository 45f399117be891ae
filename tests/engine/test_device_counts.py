"""Commits by counts that only the device knows: passes that go on behind them, whatever happens in between, equal those that know them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pie_core.engine.channel import Channel
from pie_core.engine.errors import ContextLengthExceeded, EngineError, InvalidState, OutOfPages, PassFailed, PassSkipped
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import Tensor, broadcast, channel
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.recurrent_runner import RecurrentRunner, recurrent_limits
from tests.engine.support import argmax, greedy, running, settle, spec

PREFIX = [11, 12, 13, 14, 15]


class Drafter:
    """A set whose rounds say how many of their drafts are kept, and the tokens that a plain sequence would hold."""

    def __init__(self, inst: Instance, ws: WorkingSet | None = None, pipe: Pipeline | None = None, capacity: int = 2) -> None:
        self.inst, self.ws, self.pipe = inst, ws or inst.working_set(), pipe or inst.pipeline()
        self.said = inst.channel("i32", (), capacity, host="reader")
        self.tokens: list[int] = []
        self.outs: list[tuple[asyncio.Future[Any], Any]] = []

    def expect(self, out: asyncio.Future[Any], want: Any) -> asyncio.Future[Any]:
        self.outs.append((out, want))
        return out

    def more(self, ids: Sequence[int], geometry: Geometry = FOLDING) -> asyncio.Future[Any]:
        """A pass that says no count."""
        self.tokens += ids
        want = reference(self.tokens, geometry.window, geometry.sinks)
        return self.expect(self.inst.submit(self.pipe, greedy(list(ids), self.ws, geometry=geometry))[0], want)

    def round(
        self, drafts: Sequence[int] | Channel, keep: int, *, put: Callable[[Tensor], None] | None = None, ids: Sequence[int] = ()
    ) -> asyncio.Future[Any]:
        """Drafts of which `keep` are committed, the others dropped. `put`: what else the epilogue does; `ids`: what a channel holds."""

        def fn() -> Any:
            token = argmax()
            channel.put(self.said, token * 0 + keep)
            if put is not None:
                put(token)
            return token

        out = self.inst.submit(self.pipe, spec(drafts, [self.ws], fn, BUFFERED))[0]
        self.inst.commit(self.ws, self.said)
        self.inst.discard(self.ws)
        given = list(ids) if isinstance(drafts, Channel) else list(drafts)
        want = reference([*self.tokens, *given])
        self.tokens += given[:keep]
        return self.expect(out, want)

    async def check(self) -> None:
        """Everything so far came out as in a plain sequence, and the set is as long."""
        outs, self.outs = self.outs, []
        assert [await out for out, _ in outs] == [want for _, want in outs]
        assert await length(self.inst, self.ws) == len(self.tokens)
        assert not self.ws.pending


async def length(inst: Instance, ws: WorkingSet) -> int:
    out: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    inst.length(ws, lambda n, error: out.set_exception(error) if error else out.set_result(n))  # type: ignore[arg-type]
    return await out


async def in_flight(engine: Engine, n: int) -> None:
    await settle(60)
    assert engine.status()["in_flight"] == n


def runner_of(kind: str, **changes: int) -> FakeRunner:
    return RecurrentRunner(recurrent_limits(**changes)) if kind == "recurrent" else FakeRunner(limits(**changes))


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
@pytest.mark.parametrize("capacity", [1, 2])
async def test_rounds_go_out_before_the_count_of_the_one_before_is_read(kind: str, capacity: int) -> None:
    runner = runner_of(kind)
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst, capacity=capacity)
        it.more(PREFIX)
        await it.check()
        runner.hold = True
        for k, keep in enumerate([3, 1, 0, 4, 2, 2, 0, 4, 4, 1]):
            it.round([20 + k, 30 + k, 40 + k, 50 + k], keep)
        await in_flight(engine, 2)
        assert it.ws.pending and it.ws.length == it.ws.frozen == len(PREFIX) + 8, "the most that it can be"
        runner.hold = False
        runner.release()
        await it.check()
        it.more([7])
        await it.check()
        assert 4 <= runner.shifted <= 9, "each round behind one that was in flight"
        inst.close()


async def test_device_fed_drafts_run_as_deep_as_any_loop() -> None:
    """Nothing in the loop passes through the host: six steps in flight, no host wait."""
    runner = FakeRunner(limits())
    async with running(runner, ahead=6) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst)
        feed = inst.channel("i32", (3,), 1, seed=[20, 21, 22])
        it.more(PREFIX)
        await it.check()
        runner.hold, waits = True, engine.metrics.host_waits
        drafts = [20, 21, 22]
        for keep in [3, 1, 0, 2, 3, 3, 1, 2]:
            follow = reference([*it.tokens, *drafts])
            it.round(feed, keep, put=lambda token: channel.put(feed, broadcast(token, (3,))), ids=drafts)
            drafts = [follow] * 3
        await in_flight(engine, 6)
        runner.hold = False
        runner.release()
        await it.check()
        assert engine.metrics.host_waits == waits + 1, "the first round finds an idle device, no other"
        inst.close()


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
@pytest.mark.parametrize("seed", range(12))
async def test_any_order_of_rounds_and_everything_else(kind: str, seed: int) -> None:
    """Rounds, plain and buffered passes, windows, masks, trees, edits, forks of both kinds and saves, mostly without waiting."""
    dice = random.Random(seed)
    recurrent = kind == "recurrent"
    runner = runner_of(kind, pages=160)
    runner.delay = 0.001
    async with running(runner, ahead=4) as engine:
        inst = engine.open_instance("t")
        its = [Drafter(inst, capacity=dice.choice([1, 2, 5])) for _ in range(2)]
        for it in its:
            it.more(PREFIX[: dice.randrange(1, 5)])
        for _ in range(150):
            it, ids = dice.choice(its), [dice.randrange(80) for _ in range(dice.randrange(1, 7))]
            if len(it.tokens) > 200 or it.ws.leaving:
                continue
            match dice.choice([*["round"] * 8, "more", "edit", "window", "shape", "fork", "child", "save", "wait", "turn"]):
                case "round":
                    it.round(ids, dice.randrange(len(ids) + 1))
                case "more":
                    it.more(ids)
                case "window":
                    if not recurrent:
                        it.more(ids, Geometry("buffered", window=4, sinks=1))
                        inst.commit(it.ws, len(ids))
                case "edit":
                    it.more(ids, BUFFERED)
                    inst.commit(it.ws, 1)
                    inst.discard(it.ws, len(ids) - 1)
                    del it.tokens[len(it.tokens) - len(ids) + 1 :]
                case "shape" if not recurrent:
                    it.more(ids, Geometry.check("buffered", tree=list(range(-1, len(ids) - 1))))
                    inst.commit(it.ws, len(ids))
                case "fork" | "child" as how:
                    child = Drafter(inst, inst.fork(it.ws, it.pipe if how == "child" else None), it.pipe)
                    child.tokens = list(it.tokens)
                    if len(its) < 6:
                        its.append(child)
                    else:
                        inst.drop(child.ws)
                case "save" if not recurrent:
                    kept, heard = len(it.tokens), asyncio.get_running_loop().create_future()
                    inst.save(it.ws, "x", lambda n, error, heard=heard: heard.set_result(error or n))
                    it.outs.append((heard, kept))
                case "wait":
                    await it.check()
                case "turn":
                    await settle(dice.randrange(12))
        for it in its:
            await it.check()
        assert runner.shifted > 5
        inst.close()


@pytest.mark.parametrize("count", [-1, 5])
async def test_a_count_that_the_buffer_does_not_have_fails_the_set(count: int) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        it, other = Drafter(inst), Drafter(inst)
        await it.more(PREFIX)
        runner.hold = True
        first, second = it.round([20, 21, 22, 23], count), it.round([30], 1)
        await in_flight(engine, 2)
        runner.hold = False
        runner.release()
        assert isinstance(await first, int)
        with pytest.raises(InvalidState, match=rf"commit\({count}\): the buffer of the working set holds 4 tokens"):
            await second
        with pytest.raises(InvalidState, match="commit"):
            await it.more([1])
        assert await other.more([3]) == reference([3])
        inst.close()


@pytest.mark.parametrize("fault", ["step", "nan"])
async def test_a_round_that_fails_fails_those_behind_it(fault: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst)
        await it.more(PREFIX)
        if fault == "step":
            at = len(runner.batches) + 1
            runner.fail_results = lambda batch: RuntimeError("injected") if len(runner.batches) == at else None
        bad = inst.channel("i32", (2,), 1, seed=[1, 1 << 20])
        outs = [it.round(bad if fault == "nan" else [1, 2], 1, ids=[1, 2]), it.round([3, 4], 1), it.round([5, 6], 2)]
        for out in outs:
            with pytest.raises(PassFailed):
                await out
        with pytest.raises(EngineError):
            await it.more([1])
        if fault == "nan":  # what was there before is whole
            it.tokens, it.outs = list(PREFIX), []
            it.said = inst.channel("i32", (), 2, host="reader")
            inst.truncate(it.ws, len(PREFIX))
            it.round([7, 8], 1)
            it.more([9])
            await it.check()
        inst.close()


@pytest.mark.parametrize("behind", [0, 1, 4])
async def test_a_stop_cancels_the_rounds_behind_it_with_their_commits(behind: int) -> None:
    """The set holds what the last round that ran has kept, and can be used by another pipeline."""
    runner = FakeRunner()
    async with running(runner, ahead=6) as engine:
        inst = engine.open_instance("t")
        it, done, feed = Drafter(inst), inst.channel("bool", (), 8), inst.channel("i32", (3,), 1, seed=[20, 21, 22])
        it.pipe.stop_when(done)
        await it.more(PREFIX)
        runner.hold = True

        def puts(stop: bool) -> Callable[[Tensor], None]:
            def put(token: Tensor) -> None:
                channel.put(feed, broadcast(token, (3,)))
                channel.put(done, token * 0 >= (0 if stop else 1))

            return put

        first = it.round(feed, 2, put=puts(False), ids=[20, 21, 22])
        last = it.round(feed, 1, put=puts(True), ids=[it.outs[-1][1]] * 3)
        kept, outs = list(it.tokens), list(it.outs)
        cancelled = [it.round(feed, 3, put=puts(False), ids=[1, 2, 3]) for _ in range(behind)]
        await in_flight(engine, 2 + behind)
        runner.hold = False
        runner.release()
        assert isinstance(await first, int) and isinstance(await last, int)
        for out in cancelled:
            with pytest.raises(PassSkipped):
                await out
        it.tokens, it.pipe, it.outs = kept, inst.pipeline(), outs
        it.said = inst.channel("i32", (), 2, host="reader")
        await it.check()
        it.round([50, 51], 1)
        it.more([60])
        await it.check()
        inst.close()


@pytest.mark.parametrize("how", ["close", "drop", "cut"])
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
async def test_the_end_of_a_set_with_counts_on_their_way(kind: str, how: str) -> None:
    runner = runner_of(kind)
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst)
        await it.more(PREFIX)
        runner.hold = True
        for _ in range(4):
            it.round([20, 21, 22], 1)
        await in_flight(engine, 2)
        if how == "drop":
            inst.drop(it.ws)
        if how == "cut":
            inst.truncate(it.ws, len(it.tokens))
        if how != "close":
            runner.hold = False
            runner.release()
            if how == "cut":
                await it.check()
            else:
                assert [await out for out, _ in it.outs] == [want for _, want in it.outs]
        inst.close()
        assert engine.pool.used == 0 and engine.arena.used == 0


async def test_what_fits_only_by_the_true_length_waits_for_it() -> None:
    """The context, the pages of the pool and of the instance: no pass fails by tokens that were dropped."""
    for changes, pages in (({"context": 64}, None), ({"pages": 4}, None), ({}, 4)):
        async with running(FakeRunner(limits(**changes)), ahead=4) as engine:
            inst = engine.open_instance("t", limits=InstanceLimits(pages=pages))
            it = Drafter(inst, capacity=4)
            it.more([1] * 40)
            for k in range(12):
                it.round([k] * 12, 1)
            it.more([5])
            await it.check()
            with pytest.raises((ContextLengthExceeded, OutOfPages)):
                await it.more([9] * 12)
            inst.close()


async def test_pages_of_others_are_never_written_by_rows_that_move_back() -> None:
    """Drafts that are in shared pages: the rest of them is dropped, so that the next round starts inside such a page."""
    prompt = list(range(48))
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        await inst.submit(inst.pipeline(), greedy([*prompt, 1], inst.working_set()))[0]
        it = Drafter(inst)
        await it.more(prompt[:16])
        runner.hold = True
        it.round(prompt[16:], 3)
        it.round([70, 71], 1)
        await in_flight(engine, 1)  # the second round waits
        runner.hold = False
        runner.release()
        it.more([72])
        await it.check()
        again = Drafter(inst)
        again.more([*prompt, 3])
        await again.check()
        inst.close()


async def test_accepted_tokens_are_named_and_dropped_ones_are_not() -> None:
    """Another request finds the pages of the tokens that were kept, under their ids."""
    runner = FakeRunner()
    async with running(runner, ahead=4) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst)
        it.more(PREFIX)
        for k in range(20):
            it.round([k, k + 20, k + 40, 88], 3)
        it.more([2])
        await it.check()
        other = Drafter(inst)
        other.more([*it.tokens, 4])
        await other.check()
        assert engine.metrics.reused_tokens == len(it.tokens) // 16 * 16
        inst.close()


async def test_several_sets_share_the_channel_of_their_counts() -> None:
    """Cells that the device still needs are not written over, however small the ring."""
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        pipe = inst.pipeline()
        its = [Drafter(inst, pipe=pipe, capacity=2) for _ in range(3)]
        for it in its:
            it.said = its[0].said
            it.more(PREFIX)
        for k in range(30):
            its[k % 3 if k % 4 else 0].round([k, k + 1, k + 2], k % 4 % 3)
        for it in its:
            await it.check()
        inst.close()


async def test_a_cell_that_the_device_still_needs_is_not_written_over() -> None:
    """A set whose next round comes late, beside one that uses the same ring again and again."""
    runner = FakeRunner()
    async with running(runner, ahead=6) as engine:
        inst = engine.open_instance("t")
        one = Drafter(inst)
        two = Drafter(inst, pipe=one.pipe)
        two.said = one.said
        feeds = {it: inst.channel("i32", (3,), 1, seed=[20, 21, 22]) for it in (one, two)}
        drafts = {it: [20, 21, 22] for it in feeds}
        for it in feeds:
            await it.more(PREFIX)
        runner.hold = True
        for it, keep in [(one, 0), *[(two, 3)] * 4, (one, 2)]:
            feed, ids = feeds[it], drafts[it]
            drafts[it] = [reference([*it.tokens, *ids])] * 3
            it.round(feed, keep, put=lambda token, feed=feed: channel.put(feed, broadcast(token, (3,))), ids=ids)
        await settle(60)
        assert engine.status()["in_flight"] >= 2
        runner.hold = False
        runner.release()
        for it in feeds:
            await it.check()
        inst.close()


async def test_a_full_arena_only_costs_the_wait() -> None:
    runner = FakeRunner(limits(arena_words=64))
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        it = Drafter(inst)
        it.more(PREFIX)
        taken = engine.arena
        words = taken.total - taken.used
        start = taken.allocate(words)
        for _ in range(4):
            it.round([20, 21, 22], 1)
        await it.check()
        assert not runner.shifted
        taken.release(start, words)
        inst.close()
