"""Expected passes: a hit saves the wait, and a miss leaves nothing behind, whatever happens and whenever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import DeviceError, DeviceLost
from pie_core.engine import predict
from pie_core.engine.errors import ContextLengthExceeded, EngineLost, InstanceClosed, OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.predict import REST, Guess
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put, take
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import argmax, decode, greedy, running, settle, spec

FIRST = 3  # passes of a loop before the first guess: the prompt, and two that follow the pattern


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are not late because the machine is busy."""
    monkeypatch.setattr(predict, "LATE", 5.0)
    monkeypatch.setattr(predict, "LONGEST", 5.0)


class Loop:
    """A greedy loop that stands right behind an answer, with its next pass guessed; `flying`: the guess has not landed."""

    def __init__(self, engine: Engine, runner: FakeRunner) -> None:
        self.engine, self.runner = engine, runner
        self.inst = engine.open_instance("loop")
        self.ws, self.pipe = self.inst.working_set(), self.inst.pipeline()
        self.tokens: list[int] = []  # in the set, and the last answer
        self.steps = 0

    async def begin(self, prompt: int, *, flying: bool, make: Callable[[Any, WorkingSet], PassSpec] = greedy) -> None:
        self.tokens = list(range(prompt))
        feed = list(self.tokens)
        for k in range(FIRST):
            out = self.inst.submit(self.pipe, make(feed, self.ws))[0]
            if k == FIRST - 1:
                self.runner.hold = flying
                for handle in self.runner.handles:
                    assert handle.gate is None
                await self.let_go_of_all_but_the_guess(out)
            feed = [int(await out)]  # type: ignore[arg-type]
            self.tokens += feed
        await settle()
        assert (self.guess is not None) and (self.guess.results is None) == flying
        self.steps = len(self.runner.batches)

    async def let_go_of_all_but_the_guess(self, out: Any) -> None:
        while not out.done():
            await asyncio.sleep(0)
            if self.runner.handles and len(self.runner.handles) == FIRST and self.runner.handles[-1].gate is not None:
                self.runner.handles[-1].gate.set()

    @property
    def guess(self) -> Guess | None:
        return self.pipe.habit.guess

    def release(self) -> None:
        self.runner.hold = False
        self.runner.release()

    async def go_on(self, n: int = 12) -> None:
        """The loop decodes on as if nothing had happened."""
        self.release()
        got = await decode(self.inst, self.tokens[-1:], n, self.ws, self.pipe)
        assert got == generate(self.tokens, n)

    def gone(self) -> None:
        """The guess was dropped without a trace."""
        metrics, pool = self.engine.metrics, self.engine.pool
        assert self.guess is None and self.ws.guess is None
        assert (metrics.predicted, metrics.adopted, metrics.dropped) == (1, 0, 1)
        assert pool.unlent == pool.free


@asynccontextmanager
async def guessed(prompt: int = 14, *, flying: bool = True, **more: Any) -> AsyncIterator[Loop]:
    runner = FakeRunner()
    async with running(runner) as engine:
        loop = Loop(engine, runner)
        await loop.begin(prompt, flying=flying, **more)
        yield loop
        loop.release()
        loop.inst.close()


moments = pytest.mark.parametrize("flying", [True, False], ids=["in flight", "landed"])
lengths = pytest.mark.parametrize("prompt", [13, 14, 15], ids=["partial page", "new page", "second row"])  # at the guess: 15, 16, 17


# --- hits


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.006])
@pytest.mark.parametrize("pause", [0.0, 0.001, 0.004])
async def test_a_loop_of_n_tokens_makes_at_most_one_step_more(delay: float, pause: float) -> None:
    runner, n = FakeRunner(delay=delay), 40
    async with running(runner) as engine:
        inst = engine.open_instance("hits")
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), [1, 2, 3]
        feed = list(tokens)
        for k in range(n):
            feed = [int(await inst.submit(pipe, greedy(feed, ws))[0])]  # type: ignore[arg-type]
            if pause:
                await asyncio.sleep(pause)
            tokens += feed
            assert ws.length == 3 + k
        assert tokens == [1, 2, 3, *generate([1, 2, 3], n)]
        await settle()
        metrics = engine.metrics
        assert len(runner.batches) <= n + 1
        assert metrics.adopted >= n - FIRST
        assert metrics.predicted == metrics.adopted + 1 and metrics.dropped == 0
        assert (metrics.prefill_tokens + metrics.decode_tokens, metrics.passes) == (3 + n - 1, n), "the open guess counts nowhere"
        assert engine.status()["pages_used"] == len(ws.pages) == inst.pages == 3
        inst.close()
        assert metrics.dropped == 1


@moments
@lengths
async def test_a_hit_is_the_pass_that_it_stands_for(prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        assert loop.engine.pool.used == loop.inst.pages == len(loop.ws.pages), "a lent page is nobody's"
        assert loop.ws.length == prompt + FIRST - 1, "a guess is no length"
        out = loop.inst.submit(loop.pipe, greedy(loop.tokens[-1:], loop.ws))[0]
        assert out.done() is not flying, "it has landed, so it is answered at once"
        assert len(loop.runner.batches) == loop.steps
        assert (loop.ws.length, loop.engine.metrics.adopted) == (prompt + FIRST, 1)
        assert loop.engine.pool.used == loop.inst.pages == len(loop.ws.pages)
        loop.release()
        assert await out == reference(loop.tokens)
        loop.tokens.append(int(await out))  # type: ignore[arg-type]
        await loop.go_on()


async def test_a_guess_is_submitted_while_the_program_thinks() -> None:
    async with guessed() as loop:
        assert loop.runner.batches[-1].rows[0] == loop.tokens[-1]
        assert len(loop.runner.batches) == FIRST + 1


async def test_run_ahead_behind_an_adopted_guess() -> None:
    async with guessed() as loop:
        first = loop.inst.submit(loop.pipe, greedy(loop.tokens[-1:], loop.ws))[0]
        assert loop.pipe.habit.streak == 2
        second = loop.inst.submit(loop.pipe, greedy([7], loop.ws))[0]
        assert loop.pipe.habit.streak == 0, "it did not wait for an answer"
        child = loop.inst.fork(loop.ws, loop.pipe)
        loop.release()
        assert (await first, await second) == (reference(loop.tokens), reference([*loop.tokens, 7]))
        assert await decode(loop.inst, [9], 3, child) == generate([*loop.tokens, 7, 9], 3)


async def test_off_means_off() -> None:
    runner = FakeRunner()
    async with running(runner, predict=False) as engine:
        inst = engine.open_instance("off")
        assert await decode(inst, [1], 30) == generate([1], 30)
        await settle()
        assert (engine.metrics.predicted, len(runner.batches)) == (0, 30)
        inst.close()


@pytest.mark.parametrize(("long", "guessed"), [(5.0, False), (0.002, True)])
async def test_without_a_core_to_spare_only_long_steps_are_worth_a_guess(
    monkeypatch: pytest.MonkeyPatch, long: float, guessed: bool
) -> None:
    monkeypatch.setattr("pie_core.engine.loop.LONG_STEP", long)
    engine = Engine(FakeRunner(limits(spare_core=False), delay=0.005))
    engine.start()
    inst = engine.open_instance("loop")
    assert await decode(inst, [1, 2, 3], 8) == generate([1, 2, 3], 8)
    assert (engine.metrics.adopted > 0) == guessed
    inst.close()
    await engine.stop()


async def test_who_claims_late_must_show_the_pattern_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guessed(flying=False) as loop:
        monkeypatch.setattr(predict, "LATE", 0.01)
        await asyncio.sleep(0.012)
        loop.tokens += await decode(loop.inst, loop.tokens[-1:], 1, loop.ws, loop.pipe)
        assert loop.engine.metrics.adopted == 1
        await settle()
        assert loop.guess is None
        monkeypatch.setattr(predict, "LATE", 5.0)
        loop.tokens += await decode(loop.inst, loop.tokens[-1:], 2, loop.ws, loop.pipe)
        await settle()
        assert loop.guess is not None and loop.engine.metrics.predicted == 2


async def test_silent_pipelines_have_one_guess_open_at_most() -> None:
    async with guessed(flying=False) as loop:
        for k in range(3):
            await decode(loop.engine.open_instance(str(k)), [k], 20)
        assert loop.engine.metrics.dropped == 3, "those of the three that ended"
        assert loop.guess is not None
        await loop.go_on()
        for inst in list(loop.engine.instances):
            inst.close()


# --- misses

OTHER = spec([0], [], lambda: argmax() + 1)


def with_param(tokens: Any, ws: WorkingSet, value: int) -> PassSpec:
    assert len(OTHER.params) == 1  # what is added
    return PassSpec(tokens, [ws], program=OTHER.program, params=[value])


def _feed(loop: Loop) -> PassSpec:
    return greedy(loop.inst.channel("i32", seed=loop.tokens[-1:]), loop.ws)


def _two_sets(loop: Loop) -> PassSpec:
    return greedy([loop.tokens[-1:], [5]], loop.ws, loop.inst.working_set())


MISSES: dict[str, Callable[[Loop], tuple[PassSpec, int]]] = {
    "another token": lambda p: (greedy([(p.tokens[-1] + 1) % 80], p.ws), reference([*p.tokens[:-1], (p.tokens[-1] + 1) % 80])),
    "two tokens": lambda p: (greedy([p.tokens[-1], 4], p.ws), reference([*p.tokens, 4])),
    "a window": lambda p: (greedy(p.tokens[-1:], p.ws, geometry=Geometry("folding", 4, 1)), reference(p.tokens, 4, 1)),
    "the buffer": lambda p: (greedy(p.tokens[-1:], p.ws, geometry=BUFFERED), reference(p.tokens)),
    "two reads": lambda p: (greedy(p.tokens[-1:], p.ws, reads=[[0, 0]]), reference(p.tokens)),
    "another constant": lambda p: (PassSpec(p.tokens[-1:], [p.ws], program=OTHER.program, params=OTHER.params), reference(p.tokens) + 1),
    "another program": lambda p: (spec(p.tokens[-1:], [p.ws], lambda: (argmax(), argmax())), reference(p.tokens)),
    "another set": lambda p: (greedy(p.tokens[-1:], p.inst.working_set()), reference(p.tokens[-1:])),
    "a channel that feeds": lambda p: (_feed(p), reference(p.tokens)),
    "two sets": lambda p: (_two_sets(p), reference(p.tokens)),
}


@moments
@lengths
@pytest.mark.parametrize("kind", MISSES)
async def test_every_kind_of_miss(kind: str, prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        made, expected = MISSES[kind](loop)
        length = loop.ws.length
        out = loop.inst.submit(loop.pipe, made)[0]
        loop.gone()
        assert loop.ws.length == length
        loop.release()
        assert await out == expected
        assert loop.engine.metrics.adopted == 0
        child = loop.inst.fork(loop.ws, loop.pipe)
        assert child.length == (length if kind == "another set" else length + (kind == "two tokens") + (kind != "the buffer"))


@moments
async def test_other_parameters_are_a_miss(flying: bool) -> None:
    async with guessed(flying=flying, make=lambda tokens, ws: with_param(tokens, ws, 0)) as loop:
        out = loop.inst.submit(loop.pipe, with_param(loop.tokens[-1:], loop.ws, 2))[0]
        loop.gone()
        loop.release()
        assert await out == reference(loop.tokens) + 2


@moments
async def test_other_channels_are_a_miss(flying: bool) -> None:
    made: dict[str, Any] = {}

    def counting(tokens: Any, ws: WorkingSet) -> PassSpec:
        if "ch" not in made:
            made["ch"] = ws._owner.channel("i32", seed=[40])  # type: ignore[attr-defined]
        return _counting(made["ch"])(tokens, ws)

    async with guessed(flying=flying, make=counting) as loop:
        one, two = made["ch"], loop.inst.channel("i32", seed=[70])
        assert one.tail - one.head == 1 and one.head == FIRST
        outs = loop.inst.submit(loop.pipe, _counting(two)(loop.tokens[-1:], loop.ws))
        loop.gone()
        loop.release()
        assert [await f for f in outs] == [reference(loop.tokens), 70]
        assert await loop.inst.submit(loop.pipe, _counting(one)([3], loop.ws))[1] == 40 + FIRST, "the dropped guess took nothing"


def _counting(ch: Any) -> Callable[[Any, WorkingSet], PassSpec]:
    def fn() -> Any:
        n = take(ch)
        put(ch, n + 1)
        return argmax(), n

    return lambda tokens, ws: spec(tokens, [ws], fn)


# --- whatever else happens first


def _fork(loop: Loop, pipe: Pipeline | None, *, buffer: bool = False) -> None:
    loop.inst.fork(loop.ws, pipe, buffer=buffer)


INTERFERING: dict[str, Callable[[Loop], Any]] = {
    "fork": lambda p: _fork(p, None),
    "fork by its pipeline": lambda p: _fork(p, p.pipe, buffer=True),
    "fork of another set by its pipeline": lambda p: p.inst.fork(p.inst.working_set(), p.pipe),
    "commit": lambda p: p.inst.commit(p.ws, 0),
    "discard": lambda p: p.inst.discard(p.ws, 0),
    "truncate": lambda p: p.inst.truncate(p.ws, p.ws.length),
    "length": lambda p: p.inst.length(p.ws, lambda value, error: None),
    "stop_when": lambda p: p.pipe.stop_when(p.inst.channel("bool")),
    "another pipeline": lambda p: p.inst.submit(p.inst.pipeline(), PassSpec([3], [p.inst.fork(p.ws)])),
}


@moments
@lengths
@pytest.mark.parametrize("kind", INTERFERING)
async def test_interfering_operations(kind: str, prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        length = loop.ws.length
        INTERFERING[kind](loop)
        loop.gone()
        assert loop.ws.length == length
        await loop.go_on()


@moments
@lengths
async def test_a_fork_never_sees_what_a_guess_wrote(prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        child = loop.inst.fork(loop.ws)
        loop.release()
        stem = loop.tokens[:-1]
        got = await asyncio.gather(
            decode(loop.inst, [50], 20, child), decode(loop.inst, [60], 20, loop.ws), decode(loop.inst, [70], 20, loop.inst.fork(child))
        )
        assert got == [generate([*stem, t], 20) for t in (50, 60, 70)]


async def test_a_shared_page_is_not_guessed_into() -> None:
    """A set that was cut back to before its fork: its next slot is a token of the fork."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("shared page")
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), [1, 2, 3]
        feed = list(tokens)
        for k in range(FIRST):
            out = inst.submit(pipe, greedy(feed, ws, geometry=BUFFERED))[0]
            if k == FIRST - 1:
                child = inst.fork(ws, buffer=True)
                inst.discard(ws, 1)
            feed = [int(await out)]  # type: ignore[arg-type]
            tokens += feed
        await settle()
        assert engine.pool.refs(ws.pages[0]) == 2 and ws.length == child.length - 1
        assert engine.metrics.predicted == 0
        assert await inst.submit(pipe, greedy([9], child, geometry=BUFFERED))[0] == reference([*tokens[:-1], 9])
        inst.close()


@moments
@lengths
async def test_another_pipeline_on_the_set(prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        out = loop.inst.submit(loop.inst.pipeline(), greedy(loop.tokens[-1:], loop.ws))[0]
        loop.gone()
        loop.release()
        assert await out == reference(loop.tokens)
        loop.tokens.append(int(await out))  # type: ignore[arg-type]
        await loop.go_on()
        assert loop.engine.metrics.adopted > 0, "the set is its own again"


@moments
async def test_truncated_and_grown_back_to_the_same_length(flying: bool) -> None:
    async with guessed(14, flying=flying) as loop:
        loop.inst.truncate(loop.ws, 0)
        again = list(range(20, 20 + len(loop.tokens) - 1))
        out = loop.inst.submit(loop.pipe, greedy(again, loop.ws))[0]
        loop.release()
        await out
        assert await decode(loop.inst, loop.tokens[-1:], 3, loop.ws, loop.pipe) == generate([*again, loop.tokens[-1]], 3)
        loop.gone()


@moments
@lengths
@pytest.mark.parametrize("how", ["drop", "close the pipeline", "close the instance"])
async def test_ends(how: str, prompt: int, flying: bool) -> None:
    async with guessed(prompt, flying=flying) as loop:
        other = loop.engine.open_instance("other")
        if how == "drop":
            loop.inst.drop(loop.ws)
        elif how == "close the pipeline":
            loop.inst.close_pipeline(loop.pipe)
            assert loop.pipe not in loop.inst.pipelines
        else:
            loop.inst.close()
        loop.gone()
        if how != "close the pipeline":
            assert loop.engine.pool.used == 0
        # the pages are used again while the step of the guess is still under way
        outs = [other.submit(other.pipeline(), greedy([k] * 40, other.working_set()))[0] for k in range(5)]
        await settle()
        loop.release()
        assert [await f for f in outs] == [reference([k] * 40) for k in range(5)]
        other.close()


@pytest.mark.parametrize("after", range(0, 60, 3))
@pytest.mark.parametrize("delay", [0.0, 0.0005])
async def test_closing_at_every_moment(after: int, delay: float) -> None:
    runner = FakeRunner(delay=delay)
    async with running(runner) as engine:
        victim, other = engine.open_instance("victim"), engine.open_instance("other")
        loops = [asyncio.ensure_future(decode(victim, [k] * 13, 90)) for k in range(3)]
        healthy = asyncio.ensure_future(decode(other, [9] * 13, 25))
        for _ in range(after):
            await asyncio.sleep(delay / 4)
        victim.close()
        for loop in loops:
            with pytest.raises(InstanceClosed):
                await loop
        assert victim.pages == 0
        assert await healthy == generate([9] * 13, 25)
        other.close()


# --- channels


async def outcome(predict: bool, n: int = 24) -> tuple[list[Any], list[Any], tuple[int, ...], FakeRunner]:
    """A loop with a counter, a device ring and a host reader: outputs, what the host read, heads and tails."""
    runner = FakeRunner()
    async with running(runner, predict=predict) as engine:
        inst = engine.open_instance("cells")
        ws, pipe = inst.working_set(), inst.pipeline()
        rng, ring = inst.channel("u32", [2], seed=[99, 0]), inst.channel("i32", capacity=2 * n)
        reader = inst.channel("i32", capacity=2, host="reader")

        def fn() -> Any:
            state = take(rng)
            put(rng, state + eta.iota(2))
            token = argmax()
            put(ring, token)
            put(reader, token)
            return token, state

        feed, outs, read = [1, 2, 3], [], []
        for _ in range(n):
            token, state = inst.submit(pipe, spec(feed, [ws], fn))
            feed = [int(await token)]  # type: ignore[arg-type]
            outs.append((feed[0], (await state).tolist()))  # type: ignore[union-attr]
            read.append(await inst.take(reader))
        await settle()
        if predict:
            assert engine.metrics.adopted >= n - FIRST and pipe.habit.guess is not None
        cells = (rng.head, rng.tail, ring.head, ring.tail, reader.head, reader.tail, ws.length)
        words = [runner.arena[ring.offset(k)] for k in range(ring.tail)] + list(
            runner.arena[rng.offset(rng.head) : rng.offset(rng.head) + 2]
        )
        inst.close()
    return outs, [*read, *words], cells, runner


async def test_cells_are_as_without_guesses() -> None:
    on, off = await outcome(True), await outcome(False)
    assert on[:3] == off[:3]
    assert [o[0] for o in off[0]] == generate([1, 2, 3], 24)
    assert len(on[3].batches) <= len(off[3].batches) + 1


async def test_a_full_ring_is_not_guessed_into() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("full")
        ws, pipe, reader = inst.working_set(), inst.pipeline(), inst.channel("i32", capacity=3, host="reader")

        def fn() -> Any:
            token = argmax()
            put(reader, token)
            return token

        feed = [1]
        for _ in range(3):
            feed = [int(await inst.submit(pipe, spec(feed, [ws], fn))[0])]  # type: ignore[arg-type]
        await settle()
        assert engine.metrics.predicted == 0
        blocked = inst.submit(pipe, spec(feed, [ws], fn))[0]
        await settle()
        assert not blocked.done()
        assert [await inst.take(reader) for _ in range(4)] == generate([1], 4)
        inst.close()


@pytest.mark.parametrize("kind", ["host-written", "shared", "stop_when", "fed"])
async def test_what_is_never_guessed(kind: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("never")
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), [1]
        ch = inst.channel("i32", capacity=9, host="writer") if kind == "host-written" else inst.channel("i32", capacity=9)
        if kind == "stop_when":
            pipe.stop_when(inst.channel("bool"))
        other = inst.pipeline()
        for _ in range(7):
            made = greedy(tokens[-1:], ws)
            if kind == "host-written":
                inst.put(ch, [5])
                made = spec(tokens[-1:], [ws], lambda: (argmax(), take(ch)))
            elif kind == "shared":
                made = spec(tokens[-1:], [ws], lambda: (put(ch, argmax()), argmax())[1])
            elif kind == "fed":
                made = greedy(inst.channel("i32", seed=tokens[-1:]), ws)
            tokens.append(int(await inst.submit(pipe, made)[0]))  # type: ignore[arg-type]
            if kind == "shared":
                await inst.submit(other, spec([1], [inst.working_set()], lambda: take(ch)))[0]
        await settle()
        assert tokens == [1, *generate([1], 7)]
        assert engine.metrics.predicted == 0
        inst.close()


# --- faults


async def test_nan_of_a_guess_is_reported_only_to_who_adopts_it() -> None:
    for adopted in (True, False):
        runner = FakeRunner()
        async with running(runner) as engine:
            loop = Loop(engine, runner)
            submit, bad = runner.submit, [False]

            def spoilt(batch: Any, submit: Any = submit, runner: Any = runner, bad: Any = bad) -> Any:
                bad[0] = len(runner.batches) == FIRST
                slot = batch.tables[0] * 16
                kept = runner.kv.get(slot)
                if bad[0]:
                    runner.kv[slot] = None
                handle = submit(batch)
                if bad[0]:
                    runner.kv[slot] = kept
                return handle

            runner.submit = spoilt  # type: ignore[method-assign]
            await loop.begin(14, flying=False)
            if adopted:
                with pytest.raises(PassFailed, match="NaN"):
                    await loop.inst.submit(loop.pipe, greedy(loop.tokens[-1:], loop.ws))[0]
                assert engine.metrics.failed_passes == 1
            else:
                out = loop.inst.submit(loop.pipe, greedy([77], loop.ws))[0]
                assert await out == reference([*loop.tokens[:-1], 77])
                assert engine.metrics.failed_passes == 0
            loop.inst.close()


@pytest.mark.parametrize("where", ["fail_submit", "fail_results"])
async def test_a_failed_step_with_an_open_guess(where: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        loop = Loop(engine, runner)
        setattr(runner, where, lambda batch: DeviceError("hiccup") if len(runner.batches) == FIRST + 1 else None)
        feed = [1, 2]
        for _ in range(FIRST):
            feed = [int(await loop.inst.submit(loop.pipe, greedy(feed, loop.ws))[0])]  # type: ignore[arg-type]
        await settle()
        loop.gone()
        assert engine.metrics.failed_steps == 1
        with pytest.raises(PassFailed, match="hiccup"):
            await loop.inst.submit(loop.pipe, greedy(feed, loop.ws))[0]
        other = engine.open_instance("other")
        assert await decode(other, [3], 9) == generate([3], 9)
        loop.inst.close()
        other.close()


async def test_a_failed_step_with_an_adopted_guess() -> None:
    async with guessed() as loop:
        loop.runner.handles[-1]._error = DeviceError("hiccup")
        out = loop.inst.submit(loop.pipe, greedy(loop.tokens[-1:], loop.ws))[0]
        loop.release()
        with pytest.raises(PassFailed, match="hiccup"):
            await out
        assert loop.engine.metrics.failed_passes == 1 and not loop.pipe.flying


async def test_a_lost_device_with_an_open_guess() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        loop = Loop(engine, runner)
        await loop.begin(14, flying=True)
        runner.handles[-1]._error = DeviceLost("unplugged")
        loop.release()
        await settle()
        with pytest.raises(EngineLost):
            engine.open_instance("late")
        assert engine.metrics.dropped == 1


# --- limits


async def test_the_context_ends_where_it_ends() -> None:
    runner = FakeRunner(limits(context=20))
    async with running(runner) as engine:
        inst = engine.open_instance("context")
        ws, pipe = inst.working_set(), inst.pipeline()
        tokens = await decode(inst, list(range(10)), 11, ws, pipe)
        assert tokens == generate(list(range(10)), 11)
        await settle()
        assert pipe.habit.guess is None and len(runner.batches) == 11
        with pytest.raises(ContextLengthExceeded):
            await inst.submit(pipe, greedy(tokens[-1:], ws))[0]
        inst.close()


async def test_a_budget_of_pages_ends_where_it_ends() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("budget", limits=InstanceLimits(pages=1))
        ws, pipe = inst.working_set(), inst.pipeline()
        tokens = await decode(inst, list(range(10)), 7, ws, pipe)
        await settle()
        assert pipe.habit.guess is None
        with pytest.raises(OutOfPages):
            await inst.submit(pipe, greedy(tokens[-1:], ws))[0]
        inst.close()


@moments
async def test_a_budget_used_up_after_the_guess(flying: bool) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        loop = Loop(engine, runner)
        loop.inst.max_pages = 2
        await loop.begin(14, flying=flying)
        assert loop.guess is not None and loop.guess.page is not None
        runner.hold = False
        extra = loop.inst.submit(loop.inst.pipeline(), greedy([1], loop.inst.working_set()))[0]
        loop.release()
        await extra
        with pytest.raises(OutOfPages):
            await loop.inst.submit(loop.pipe, greedy(loop.tokens[-1:], loop.ws))[0]
        loop.gone()
        loop.inst.close()


@moments
async def test_a_lent_page_is_free_for_everybody(flying: bool) -> None:
    runner = FakeRunner(limits(pages=8))
    async with running(runner) as engine:
        loop = Loop(engine, runner)
        await loop.begin(14, flying=flying)
        assert engine.pool.free == 7 and engine.pool.unlent == 6
        big = engine.open_instance("big")
        out = big.submit(big.pipeline(), greedy([2] * 112, big.working_set()))[0]
        loop.release()
        assert await out == reference([2] * 112)
        loop.gone()
        big.close()
        await loop.go_on()
        loop.inst.close()


async def test_no_guesses_when_pages_are_short() -> None:
    runner = FakeRunner(limits(pages=16))
    async with running(runner) as engine:
        hog, inst = engine.open_instance("hog"), engine.open_instance("inst")
        await hog.submit(hog.pipeline(), PassSpec([1] * 16 * 13, [hog.working_set()]))[0]
        ws, pipe = inst.working_set(), inst.pipeline()
        await decode(inst, [1] * 14, FIRST, ws, pipe)
        await settle()
        assert engine.metrics.predicted == 0 and engine.pool.free == 2
        hog.close()
        inst.close()


# --- the cost of misses, and of company


async def test_misses_are_bounded() -> None:
    """A loop that leaves the pattern every fourth pass is guessed for at most once in REST passes."""
    n = 120
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("moody")
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), [1]
        for k in range(n):
            answer = int(await inst.submit(pipe, greedy(tokens[-1:], ws))[0])  # type: ignore[arg-type]
            assert answer == reference(tokens)
            tokens.append((answer + (k % 4 == 3)) % 89)
        metrics = engine.metrics
        assert 0 < metrics.dropped <= n // REST
        inst.close()


async def test_a_loop_that_never_follows_costs_nothing() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("never")
        ws, pipe = inst.working_set(), inst.pipeline()
        for k in range(30):
            await inst.submit(pipe, greedy([k], ws))[0]
        assert engine.metrics.predicted == 0 and len(runner.batches) == 30
        inst.close()


@pytest.mark.parametrize("pace", [0.0, 0.0001])
async def test_eight_loops_stay_together(pace: float) -> None:
    runner, n = FakeRunner(delay=0.002), 30

    async def loop(inst: Instance, k: int) -> list[int]:
        ws, pipe, feed, out = inst.working_set(), inst.pipeline(), [k], []
        for _ in range(n):
            feed = [int(await inst.submit(pipe, greedy(feed, ws))[0])]  # type: ignore[arg-type]
            out += feed
            await asyncio.sleep(pace * k)
        inst.close_pipeline(pipe)
        return out

    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(8)]
        got = await asyncio.gather(*(loop(i, k) for k, i in enumerate(insts)))
        assert got == [generate([k], n) for k in range(8)]
        lanes = [len(b.reads) for b in runner.batches]
        assert len(lanes) <= n + 8 and lanes.count(8) >= n - 8, lanes
        assert engine.metrics.adopted >= 8 * (n - FIRST - 8)
        for inst in insts:
            inst.close()


async def test_loops_of_different_habits_stay_together() -> None:
    """Six that are guessed, one that leaves the pattern now and then, one that never follows it."""
    runner, n = FakeRunner(delay=0.002), 40

    async def loop(inst: Instance, k: int) -> None:
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), [k]
        for i in range(n):
            answer = int(await inst.submit(pipe, greedy(tokens[-1:], ws))[0])  # type: ignore[arg-type]
            assert answer == reference(tokens)
            tokens.append((answer + (k == 6 and i % 9 == 8) + (k == 7)) % 89)
        inst.close_pipeline(pipe)

    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(8)]
        await asyncio.gather(*(loop(i, k) for k, i in enumerate(insts)))
        lanes = [len(b.reads) for b in runner.batches]
        assert len(lanes) <= n + 12, lanes
        for inst in insts:
            inst.close()


async def test_a_prefill_waits_for_one_step_at_most() -> None:
    async with guessed() as loop:
        other = loop.engine.open_instance("prefill")
        out = other.submit(other.pipeline(), greedy([5] * 40, other.working_set()))[0]
        await settle()
        loop.runner.handles[loop.steps - 1].gate.set()  # type: ignore[union-attr]
        while len(loop.runner.batches) == loop.steps:
            await asyncio.sleep(0.001)
        assert loop.runner.batches[loop.steps].rows[0] == 5, "the next step is its"
        loop.release()
        assert await out == reference([5] * 40)
        other.close()


async def test_a_prefill_takes_the_step_and_the_loop_goes_on_beside_it() -> None:
    runner = FakeRunner(limits(max_tokens=8), delay=0.001)
    async with running(runner, deterministic=True) as engine:
        inst, other = engine.open_instance("loop"), engine.open_instance("prefill")
        loop = asyncio.ensure_future(decode(inst, [1], 30))
        await asyncio.sleep(0.01)
        before = len(runner.batches)
        out = other.submit(other.pipeline(), greedy([5] * 70, other.working_set()))[0]
        assert await out == reference([5] * 70)
        assert len(runner.batches) - before <= 12, "ten chunks of seven, and the step or two that were under way"
        assert await loop == generate([1], 30)
        inst.close()
        other.close()


@pytest.mark.parametrize("geometry", [FOLDING, BUFFERED, Geometry("folding", 6, 2)])
async def test_geometries(geometry: Geometry) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("geometry")
        ws, pipe, tokens = inst.working_set(), inst.pipeline(), list(range(12))
        feed = list(tokens)
        for _ in range(20):
            feed = [int(await inst.submit(pipe, greedy(feed, ws, geometry=geometry))[0])]  # type: ignore[arg-type]
            assert feed[0] == reference(tokens, geometry.window, geometry.sinks)
            tokens += feed
        assert engine.metrics.adopted == 20 - FIRST
        assert (ws.length, ws.frozen) == (31, 0 if geometry is BUFFERED else 31)
        inst.close()
