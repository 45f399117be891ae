"""Scheduling: full batches, fair turns, decode before prefill, a linger that is bounded."""

from __future__ import annotations

import asyncio
import time

import pytest

from pie_core.engine.errors import EngineLost, InvalidPass
from pie_core.engine.forward import BUFFERED, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.linger import FURTHEST, LONGEST, Linger
from pie_core.engine.loop import Engine
from pie_core.engine.metrics import Metrics
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.runner import EpilogueGroup, StepBatch
from pie_core.engine.step_buffer import pack_step
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import GREEDY, decode, greedy, running, settle


def lanes(runner: FakeRunner) -> list[int]:
    """Read-outs of each step."""
    return [len(batch.reads) for batch in runner.batches]


async def test_eight_loops_share_every_step() -> None:
    runner = FakeRunner(delay=0.002)

    async def loop(inst: Instance, k: int) -> list[int]:
        ws, pipe, feed, out = inst.working_set(), inst.pipeline(), [k], []
        for _ in range(20):
            feed = [int(await inst.submit(pipe, greedy(feed, ws))[0])]  # type: ignore[arg-type]
            out += feed
            await asyncio.sleep(0.0001 * k)  # each comes back at its own pace
        inst.close_pipeline(pipe)
        return out

    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(8)]
        got = await asyncio.gather(*(loop(i, k) for k, i in enumerate(insts)))
        assert got == [generate([k], 20) for k in range(8)]
        assert len(runner.batches) <= 40, lanes(runner)  # 160 if nobody shared; a busy machine costs a few
        for inst in insts:
            inst.close()


async def test_pitfall_18_a_silent_pipeline_is_not_waited_for() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        quiet, busy = engine.open_instance("quiet"), engine.open_instance("busy")
        pipe = quiet.pipeline()  # answered once, never closed, never back
        await asyncio.gather(quiet.submit(pipe, greedy([1], quiet.working_set()))[0], decode(busy, [2], 1))
        assert await decode(busy, [3], 100) == generate([3], 100)
        assert engine.status()["lingers"] <= 5, "one linger for the silent one, not one a step (a busy machine may add some)"
        quiet.close()
        busy.close()


def test_the_linger_is_bounded_and_learns() -> None:
    linger = Linger(Metrics())
    engine_like = type("E", (), {"forget_return": lambda self, pipe: None})()
    inst = type("I", (), {"engine": engine_like})()
    slow, quick = Pipeline(inst), Pipeline(inst)  # type: ignore[arg-type]
    now = 10.0
    linger.answered(slow, now)
    linger.answered(quick, now)
    assert 0 < linger.wait(now) <= LONGEST + 1e-9
    linger.returned(quick, now + 0.001)
    assert linger.wait(now + 0.001) > 0, "slow is still expected"
    assert linger.wait(now + 2 * LONGEST) == 0
    linger.answered(slow, now + 1)
    assert linger.wait(now + 1) == 0, "who was late is not waited for"
    linger.returned(slow, now + 1.001)
    linger.answered(slow, now + 2)
    assert linger.wait(now + 2) > 0, "it came back quickly, so it is again"
    linger.forget(slow)
    assert linger.wait(now + 2) == 0


@pytest.mark.parametrize(("step", "longest"), [(0.0, LONGEST), (0.03, LONGEST), (0.2, 0.01), (5.0, FURTHEST)])
def test_the_linger_grows_with_the_step_within_bounds(step: float, longest: float) -> None:
    linger = Linger(Metrics())
    inst = type("I", (), {"engine": type("E", (), {"forget_return": lambda self, pipe: None})()})()
    pipe = Pipeline(inst)  # type: ignore[arg-type]
    linger.stepped(step)
    assert linger.longest == pytest.approx(longest)
    for k in range(20):
        linger.answered(pipe, 10.0 + k)
        assert linger.wait(10.0 + k) <= longest + 1e-9
        linger.returned(pipe, 10.0 + k + 0.9 * longest)
        assert not pipe.silent
    linger.answered(pipe, 50.0)
    assert linger.wait(50.0) == pytest.approx(longest)
    linger.returned(pipe, 50.0 + 1.1 * longest)
    assert pipe.silent


async def test_decode_goes_before_prefill() -> None:
    runner = FakeRunner(limits(max_tokens=8))
    ids = [k % 80 for k in range(480)]
    async with running(runner, deterministic=True) as engine:
        long, short = engine.open_instance("long"), engine.open_instance("short")
        first = long.submit(long.pipeline(), greedy(ids, long.working_set()))[0]
        assert await decode(short, [5], 6) == generate([5], 6)
        assert not first.done(), "the prompt takes what the decode leaves"
        assert await first == reference(ids)
        mixed = [b for b in runner.batches if len(b.reads) == 1 and b.n_tokens == 8]
        assert len(mixed) >= 5 and all(b.rows[2] < 6 for b in mixed), "the decode row comes first"
        long.close()
        short.close()


async def test_prompts_beside_decode_run_in_small_chunks() -> None:
    """What long prompts add to a step that also decodes is bounded; alone they fill steps; two of them take turns."""
    runner = FakeRunner(limits(max_tokens=32, mixed_prefill=4))
    async with running(runner) as engine:
        first, second, short = (engine.open_instance(name) for name in ("first", "second", "short"))
        outs = [i.submit(i.pipeline(), greedy([k + 1] * 48, i.working_set()))[0] for k, i in enumerate((first, second))]
        assert await decode(short, [9], 16) == generate([9], 16)
        mixed = [b for b in runner.batches if any(b.rows[at] == 9 or b.rows[at + 2] < 17 for at in b.reads[:1]) and b.reads]
        assert mixed and all(b.n_tokens <= 5 for b in mixed), [b.n_tokens for b in mixed]
        assert [await f for f in outs] == [reference([k + 1] * 48) for k in range(2)]
        assert max(b.n_tokens for b in runner.batches) > 5, "alone they fill steps"
        for inst in (first, second, short):
            inst.close()


async def test_a_prompt_whose_read_outs_need_a_whole_step_gets_one() -> None:
    runner = FakeRunner(limits(max_tokens=16, max_reads=16, mixed_prefill=4))
    async with running(runner) as engine:
        long, short = engine.open_instance("long"), engine.open_instance("short")
        ids = list(range(40))
        out = long.submit(long.pipeline(), greedy(ids, long.working_set(), reads=[[26, 39]]))[0]
        loop = asyncio.ensure_future(decode(short, [5], 40))
        assert await out == reference(ids[:27])
        assert await loop == generate([5], 40)
        long.close()
        short.close()


async def test_prefills_take_turns() -> None:
    runner = FakeRunner(limits(max_tokens=8))
    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(3)]
        outs = [i.submit(i.pipeline(), greedy([k + 1] * 40, i.working_set()))[0] for k, i in enumerate(insts)]
        assert [await f for f in outs] == [reference([k + 1] * 40) for k in range(3)]
        owners = [batch.rows[0] for batch in runner.batches[:6]]
        assert owners == [1, 2, 3, 1, 2, 3]
        for inst in insts:
            inst.close()


async def test_tenants_share_steps_whatever_the_number_of_their_instances() -> None:
    """Prefills that fill whole steps, and short passes of which a step holds four: a tenant with one instance has half of both."""
    runner = FakeRunner(limits(max_tokens=8))
    async with running(runner, deterministic=True) as engine:
        many = [engine.open_instance(str(k), "many") for k in range(6)]
        one = engine.open_instance("one", "one")
        outs = [i.submit(i.pipeline(), greedy([k + 1] * 40, i.working_set()))[0] for k, i in enumerate([*many, one])]
        assert await outs[-1] == reference([7] * 40)
        assert [batch.rows[0] == 7 for batch in runner.batches[:6]] == [False, True] * 3
        assert await asyncio.gather(*outs[:-1]) == [reference([k + 1] * 40) for k in range(6)]
        for inst in (*many, one):
            inst.close()
    runner = FakeRunner(limits(max_tokens=4, max_reads=4))
    async with running(runner) as engine:
        crowd, single = [engine.open_instance(str(k), "many") for k in range(12)], engine.open_instance("single", "one")
        outs = [i.submit(i.pipeline(), greedy([1], i.working_set()))[0] for i in crowd]
        pipes = [single.pipeline() for _ in range(4)]
        mine = [single.submit(pipe, greedy([2], single.working_set()))[0] for pipe in pipes]
        await asyncio.gather(*mine)
        assert len(runner.batches) <= 3, "two of four in each step"
        await asyncio.gather(*outs)
        for inst in (*crowd, single):
            inst.close()


async def test_instances_share_a_step_that_cannot_hold_all() -> None:
    runner = FakeRunner(limits(max_tokens=4, max_reads=4))
    async with running(runner) as engine:
        crowd, single = engine.open_instance("crowd"), engine.open_instance("single")
        outs = []
        for _ in range(12):
            ws, pipe = crowd.working_set(), crowd.pipeline()
            outs += [crowd.submit(pipe, greedy([1], ws))[0] for _ in range(4)]
        ws, pipe = single.working_set(), single.pipeline()
        mine = [single.submit(pipe, greedy([2], ws))[0] for _ in range(4)]
        await asyncio.gather(*mine)
        assert len(runner.batches) <= 7, "one of two instances, so a share of every step, not 1/13 of it"
        await asyncio.gather(*outs)
        for inst in (crowd, single):
            inst.close()


async def test_one_pipeline_batches_passes_of_different_sets() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("beam")
        pipe, sets = inst.pipeline(), [inst.working_set() for _ in range(4)]
        outs = [inst.submit(pipe, greedy([k], ws))[0] for _ in range(3) for k, ws in enumerate(sets)]
        assert [await f for f in outs] == [reference([k] * n) for n in (1, 2, 3) for k in range(4)]
        assert lanes(runner) == [4, 4, 4]
        inst.close()


@pytest.mark.parametrize("field", ["max_reads", "results_words", "lane_words", "table_words"])
async def test_every_limit_of_a_step_is_respected(field: str) -> None:
    small = {"max_reads": 2, "results_words": 4, "lane_words": 64, "table_words": 3}[field]
    runner = FakeRunner(limits(**{field: small}))
    async with running(runner) as engine:
        insts = [engine.open_instance(str(k)) for k in range(24)]
        got = await asyncio.gather(*(decode(i, [k], 3) for k, i in enumerate(insts)))
        assert got == [generate([k], 3) for k in range(24)]
        assert max(lanes(runner)) < 24
        for batch in runner.batches:
            assert sum(-(-sum(map(len, g.lanes)) // 64) * 64 for g in batch.epilogues) <= runner.limits.lane_words
        for inst in insts:
            inst.close()


async def test_tables_over_a_step_are_refused_in_words() -> None:
    async with running(FakeRunner(limits(table_words=1))) as engine:
        inst = engine.open_instance("tables")
        with pytest.raises(InvalidPass, match="2 words, a step has 1"):
            await inst.submit(inst.pipeline(), greedy([1] * 17, inst.working_set()))[0]
        inst.close()


async def test_a_pass_that_needs_most_of_a_step_is_not_starved_by_decode() -> None:
    runner = FakeRunner(limits(max_tokens=32, max_reads=32))
    async with running(runner) as engine:
        busy, wide = engine.open_instance("busy"), engine.open_instance("wide")
        loops = [asyncio.ensure_future(decode(busy, [k], 30)) for k in range(4)]
        await settle(6)
        out = wide.submit(wide.pipeline(), greedy(list(range(30)), wide.working_set(), reads=[[0]]))[0]
        assert await out == reference([0])
        assert not any(task.done() for task in loops)
        assert await asyncio.gather(*loops) == [generate([k], 30) for k in range(4)]
        busy.close()
        wide.close()


async def test_speculative_passes_count_as_decode() -> None:
    runner = FakeRunner(limits(max_tokens=16))
    async with running(runner) as engine:
        a, b = engine.open_instance("a"), engine.open_instance("b")
        ws = a.working_set()
        prompt = b.submit(b.pipeline(), PassSpec(list(range(60)), [b.working_set()]))[0]
        assert await a.submit(a.pipeline(), greedy([1, 2, 3, 4, 5], ws, geometry=BUFFERED))[0] == reference([1, 2, 3, 4, 5])
        await prompt
        assert runner.batches[0].n_tokens == 16 and engine.metrics.decode_tokens >= 5
        a.close()
        b.close()


async def test_idle_sleeps() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("idle")
        await decode(inst, [1], 2)
        before = time.thread_time()
        await asyncio.sleep(0.2)
        assert time.thread_time() - before < 0.02
        inst.close()


async def test_metrics_count_what_ran() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("count")
        await decode(inst, list(range(20)), 3)
        status = engine.status()
        assert (status["steps"], status["passes"], status["prefill_tokens"], status["decode_tokens"]) == (3, 3, 20, 2)
        assert [r.tokens for r in engine.metrics.timeline] == [20, 1, 1]
        assert status["pages_used"] + status["pages_free"] == runner.limits.pages
        assert status["queue_wait_max"] >= 0
        inst.close()


async def test_an_engine_starts_once() -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(RuntimeError, match="before"):
            engine.start()


async def test_a_fault_of_the_loop_itself_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(FakeRunner())
    engine.start()
    inst = engine.open_instance("fault")

    def broken(number: int) -> None:
        raise AssertionError("a bug")

    engine.scheduler.fill = broken  # type: ignore[assignment, method-assign]
    out = inst.submit(inst.pipeline(), greedy([1], inst.working_set()))[0]
    with pytest.raises(EngineLost, match="a bug"):
        await out
    assert "a bug" in caplog.text
    await engine.stop()


def test_the_step_buffer_is_as_the_contract_says() -> None:
    batch = StepBatch(
        rows=[7, 0xFFFFFFFF, 3, 19, 0, 0, 0, 0, 8, 5, 0, 32, 1, 4, 2, 0],
        tables=[1, 2],
        n_seqs=2,
        reads=[1],
        epilogues=[EpilogueGroup(GREEDY.program, [[0, 9, 10], [1, 11, 12]]), EpilogueGroup(GREEDY.program, [[2, 13, 14]])],
        results_words=15,
    )
    packed = pack_step(batch)
    words = memoryview(packed.data).cast("I").tolist()
    assert words[:16] == [2, 1, 2, 16, 32, 33] + [0] * 10
    assert words[16:32] == [7, 0xFFFFFFFF, 3, 19, 33, 0, 0, 0, 8, 5, 0, 32, 34, 4, 2, 0]
    assert words[32:35] == [1, 1, 2]
    assert [(g.lane_offset, g.lanes) for g in packed.groups] == [(256, 2), (512, 1)]
    assert words[64:70] == [0, 9, 10, 1, 11, 12] and words[128:131] == [2, 13, 14] and len(words) == 131


async def test_settled_steps_do_not_pile_up() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("many")
        await decode(inst, [1], 30)
        await settle()
        assert engine.status()["in_flight"] == 0
        inst.close()
