"""Pacing and streams: prefill beside decode is cut by what rows cost, and stands aside for streams that come back any moment."""

from __future__ import annotations

import asyncio
import json

import pytest

from pie_core.engine.loop import Engine
from pie_core.engine.metrics import TIMELINE_STEPS
from pie_core.engine.pacing import FEWEST, FEWEST_ALONE, FIRST, LONGEST, SHARE, Pace
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.streams import ALIVE, Streams
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import decode, greedy, running


def test_nothing_known_is_a_first_guess() -> None:
    pace = Pace(128, 64)
    assert pace.prefill_rows(1, 0) == FIRST
    assert Pace(128, 4).prefill_rows(1, 0) == 4
    assert pace.prefill_rows(0, 0) == 128


@pytest.mark.parametrize(
    ("decode_s", "row_s", "rows"),
    [
        (0.010, 0.0067, FEWEST),  # the cpu device: a row of prefill costs most of a decode step
        (0.060, 0.0067, int(SHARE * 0.060 / 0.0067)),
        (0.020, 0.0001, 64),  # a GPU: rows cost next to nothing
    ],
)
def test_prefill_beside_decode_takes_its_share_of_the_step(decode_s: float, row_s: float, rows: int) -> None:
    pace = Pace(128, 64)
    for _ in range(20):
        pace.ran(4, 0, decode_s)
        pace.ran(4, 16, decode_s + 16 * row_s)
    assert pace.decode_seconds(4) == pytest.approx(decode_s) and pace.row_seconds == pytest.approx(row_s)
    assert pace.prefill_rows(4, 0) == pace.prefill_rows(0, 4) == rows
    alone = pace.prefill_rows(0, 0)
    assert alone == min(128, max(FEWEST_ALONE, int(LONGEST / row_s)))


def test_widths_are_told_apart_and_the_nearest_answers() -> None:
    pace = Pace(128, 64)
    pace.ran(1, 0, 0.01)
    pace.ran(32, 0, 0.2)
    assert (pace.decode_seconds(1), pace.decode_seconds(2), pace.decode_seconds(20), pace.decode_seconds(60)) == (0.01, 0.01, 0.2, 0.2)


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = Pace(128, 64)
    for _ in range(10):
        pace.ran(1, 0, 0.01)
    pace.ran(1, 0, 3.0)
    assert pace.decode_seconds(1) < 0.02  # type: ignore[operator]
    pace.ran(2, 16, 0.001)  # faster than decode alone: says nothing of rows
    assert pace.row_seconds is None


def test_fixed_sizes_when_off() -> None:
    pace = Pace(128, 16, enabled=False)
    pace.ran(1, 0, 0.01)
    pace.ran(1, 16, 1.0)
    assert (pace.prefill_rows(3, 5), pace.prefill_rows(0, 5), pace.prefill_rows(0, 0)) == (16, 128, 128)


def test_streams_are_those_answered_lately() -> None:
    streams = Streams()
    inst = type("I", (), {"engine": type("E", (), {"forget_return": lambda self, pipe: None})()})()
    a, b = Pipeline(inst), Pipeline(inst)  # type: ignore[arg-type]
    streams.answered(a, 1.0)
    streams.answered(b, 1.1)
    assert streams.count(1.1) == 2 and streams.away(1.1)
    assert streams.count(1.05 + ALIVE) == 1
    streams.answered(a, 2.0)
    streams.forget(a)
    assert streams.count(2.0) == 0 and not streams.away(2.0)


async def test_a_stream_that_is_away_for_a_moment_does_not_find_two_full_steps_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes longer to come back than anybody waits: what runs meanwhile is small, and one step at most."""
    monkeypatch.setattr("pie_core.engine.streams.ALIVE", 60.0)  # whatever else this machine does
    runner = FakeRunner(limits(max_tokens=32, mixed_prefill=4), delay=0.001)
    async with running(runner) as engine:
        long, short = engine.open_instance("long"), engine.open_instance("short")
        ws, pipe = short.working_set(), short.pipeline()
        feed = [9]
        feed = [int(await short.submit(pipe, greedy(feed, ws))[0])]  # type: ignore[arg-type]
        out = long.submit(long.pipeline(), greedy([1] * 300, long.working_set()))[0]
        for _ in range(8):
            await asyncio.sleep(0.01)
            feed = [int(await short.submit(pipe, greedy(feed, ws))[0])]  # type: ignore[arg-type]
        beside = list(runner.batches[1:])
        assert max(batch.n_tokens for batch in beside) <= 5
        assert await out == reference([1] * 300)
        long.close()
        short.close()


@pytest.mark.parametrize(("away", "steps"), [(True, 1), (False, 2)])
async def test_prefill_does_not_run_ahead_of_a_stream_that_comes_back(monkeypatch: pytest.MonkeyPatch, away: bool, steps: int) -> None:
    monkeypatch.setattr("pie_core.engine.streams.ALIVE", 60.0)
    runner = FakeRunner(limits(max_tokens=32, mixed_prefill=4))
    async with running(runner) as engine:
        long, short = engine.open_instance("long"), engine.open_instance("short")
        pipe = short.pipeline()
        await short.submit(pipe, greedy([9], short.working_set()))[0]
        if not away:
            short.close_pipeline(pipe)
        before = len(runner.batches)
        runner.hold = True
        out = long.submit(long.pipeline(), greedy([1] * 200, long.working_set()))[0]
        await asyncio.sleep(0.02)  # longer than anybody is waited for
        assert len(runner.batches) - before == steps
        runner.hold = False
        runner.release()
        assert await out == reference([1] * 200)
        long.close()
        short.close()


async def test_a_prompt_does_not_starve_and_decode_is_in_every_step() -> None:
    runner = FakeRunner(limits(max_tokens=32, mixed_prefill=4))
    async with running(runner) as engine:
        long, short = engine.open_instance("long"), engine.open_instance("short")
        out = long.submit(long.pipeline(), greedy([1] * 100, long.working_set()))[0]
        loop = asyncio.ensure_future(decode(short, [9], 60))
        assert await out == reference([1] * 100)
        assert await loop == generate([9], 60)
        long.close()
        short.close()


# --- the timeline


async def test_the_timeline_tells_what_steps_held() -> None:
    runner = FakeRunner()
    async with running(runner, predict=False) as engine:
        inst = engine.open_instance("t")
        prompt = list(range(40))
        await decode(inst, prompt, 3)
        await decode(inst, prompt, 1)
        line = engine.timeline()
        names = line["columns"]
        steps = [dict(zip(names, step, strict=True)) for step in line["steps"]]  # type: ignore[arg-type, call-overload]
        assert [s["prefill_tokens"] for s in steps] == [32, 8, 0, 0, 0]
        assert [s["decode_tokens"] for s in steps] == [0, 0, 1, 1, 8], "what shared pages leave of a prompt counts as short"
        assert steps[-1]["reused_tokens"] == 32 and steps[0]["reused_tokens"] == 0
        assert all(s["pages_used"] + s["pages_free"] == runner.limits.pages for s in steps)
        assert all(s["busy_s"] >= 0 and s["settled"] >= s["submitted"] and not s["failed"] for s in steps)
        assert sum(s["passes"] for s in steps) == 4 and all(s["device_s"] is None for s in steps)
        assert json.loads(json.dumps(line))["most"] == TIMELINE_STEPS
        assert len(engine.timeline(since=steps[-2]["number"])["steps"]) == 1  # type: ignore[arg-type]
        inst.close()


async def test_the_timeline_is_bounded_and_keeps_failed_steps() -> None:
    from pie_core.device.protocol import DeviceError

    runner = FakeRunner()
    async with running(runner) as engine:
        runner.fail_results = lambda batch: DeviceError("injected") if len(runner.batches) == 2 else None
        inst = engine.open_instance("t")
        await decode(inst, [1], 1)
        with pytest.raises(Exception, match="injected"):
            await decode(inst, [2], 1)
        assert [record.failed for record in engine.metrics.timeline] == [False, True]
        assert engine.metrics.timeline.maxlen == TIMELINE_STEPS
        inst.close()


async def test_what_the_device_measures_is_in_the_timeline() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        submit = runner.submit

        def timed(batch):  # type: ignore[no-untyped-def]
            handle = submit(batch)
            handle.times = lambda: (0.5, 0.25)  # type: ignore[method-assign]
            return handle

        runner.submit = timed  # type: ignore[method-assign]
        inst = engine.open_instance("t")
        await decode(inst, [1], 1)
        record = engine.metrics.timeline[-1]
        assert (record.device_s, record.epilogue_s) == (0.5, 0.25)
        inst.close()


def test_deterministic_engines_cut_by_fixed_sizes() -> None:
    assert Engine(FakeRunner(), deterministic=True).pace.enabled is False
    assert Engine(FakeRunner(limits(deterministic=True))).deterministic
