"""Run-ahead on real devices: tokens, random numbers, KV and lengths of loops that feed themselves equal those of host-fed ones, bit
for bit, however many passes are in flight behind a stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pie_core import eta
from pie_core.engine.errors import InstanceClosed, PassFailed, PassSkipped
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import StepBatch
from pie_core.eta import Model, gumbel_max, intrinsics, trace_epilogue
from pie_core.eta.channel import put, take
from pie_core.eta.tracing import Traced
from tests.support.ahead import RUNNERS, hold, loaded, running_ahead, write_models

PROMPT = [5, 17, 30, 71, 2, 9, 44, 200, 13, 101, 8, 66, 31, 150, 99]  # decoding crosses into the second page
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(params=RUNNERS, ids="-".join)
async def runner(request: pytest.FixtureRequest, models: dict[str, Path]) -> AsyncIterator[ModelRunner]:
    async with loaded(*request.param, models) as opened:
        yield opened


@pytest_asyncio.fixture
async def engine(runner: ModelRunner) -> AsyncIterator[Engine]:
    async with running_ahead(runner) as started:
        yield started


class Sampler:
    """A Gumbel loop: its token feeds the next pass, through the device or through the host; it says stop at token `target`."""

    def __init__(self, engine: Engine, inst: Instance, *, seed: int = 7, target: int = -1) -> None:
        self.inst, self.ws, self.pipe, self.target = inst, inst.working_set(), inst.pipeline(), target
        self.model = Model(engine.limits.vocab, engine.limits.hidden)
        self.feed = inst.channel("i32")
        self.rng = inst.channel("u32", [2], seed=[seed, 0])
        self.stop = inst.channel("bool")
        self.pipe.stop_when(self.stop)

    def traced(self, *, feed: bool = True, stop: bool = True) -> Traced:
        def fn() -> Any:
            state = take(self.rng)
            put(self.rng, state + eta.iota(2))
            token = gumbel_max(intrinsics.output(0, "logits") / 0.8, state)
            if feed:
                put(self.feed, token)
            if stop:
                put(self.stop, eta.eq(token, self.target))
            return token

        return trace_epilogue(fn, self.model)

    def submit(self, tokens: Any, n: int = 1, **how: Any) -> list[asyncio.Future[Any]]:
        t = self.traced(**how)
        spec = PassSpec(tokens, [self.ws], program=t.program, params=t.params, channels=t.channels)
        return [self.inst.submit(self.pipe, spec)[0] for _ in range(n)]

    async def host_fed(self, n: int, feed: list[int] | None = None) -> list[int]:
        """`n` tokens, each of which the host gives back to the device."""
        tokens, feed = [], feed or PROMPT
        for _ in range(n):
            tokens.append(int(await self.submit(feed, feed=False, stop=False)[0]))
            feed = tokens[-1:]
        return tokens


async def outcomes(futures: list[asyncio.Future[Any]]) -> list[Any]:
    """The value of each, or the class of its error."""
    got = await asyncio.gather(*futures, return_exceptions=True)
    return [type(value) if isinstance(value, BaseException) else value for value in got]


async def wanted(engine: Engine, n: int, seed: int = 7) -> list[int]:
    """What a host-fed loop gives."""
    inst = engine.open_instance("host-fed")
    tokens = await Sampler(engine, inst, seed=seed).host_fed(n)
    inst.close()
    return tokens


async def test_passes_ahead_equal_the_host_fed_tokens(engine: Engine) -> None:
    want = await wanted(engine, 12)
    waits = engine.metrics.host_waits
    inst = engine.open_instance("ahead")
    loop = Sampler(engine, inst)
    assert await outcomes(loop.submit(PROMPT) + loop.submit(loop.feed, 11)) == want
    assert engine.metrics.host_waits == waits
    inst.close()


@pytest.mark.parametrize("behind", [1, 2, 5])
async def test_passes_behind_a_stop_change_nothing(
    runner: ModelRunner, engine: Engine, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = await wanted(engine, 8)
    at = next(k for k in range(2, 6) if want[k] not in want[:k])
    inst = engine.open_instance("stop")
    loop = Sampler(engine, inst, target=want[at])
    assert await outcomes(loop.submit(PROMPT) + loop.submit(loop.feed, at - 1)) == want[:at]
    go = hold(runner, monkeypatch)
    out = loop.submit(loop.feed, behind + 1)
    while engine.status()["in_flight"] < behind + 1:
        await asyncio.sleep(0.001)
    pages = list(loop.ws.pages)
    cells = await runner.device.read(runner.tables.arena, 0, 4 * 64)
    stored = await runner.read_pages(pages)
    go.set()
    assert await outcomes(out) == [want[at]] + [PassSkipped] * behind
    assert engine.metrics.skipped_passes == behind
    assert loop.ws.length == len(PROMPT) + at
    assert await runner.device.read(runner.tables.arena, 0, 4 * 64) == cells
    after = await runner.read_pages(pages[: len(loop.ws.pages)])
    assert after == stored[: len(after)]
    # the loop goes on from where it stopped as if nobody had been behind: same token fed, same numbers, same KV
    loop.pipe = inst.pipeline()
    go_on = loop.submit(loop.feed, 8 - at - 1, stop=False)
    assert await outcomes(go_on) == want[at + 1 :]
    inst.close()


async def test_what_is_behind_a_stop_stores_no_kv_and_puts_no_cell(
    runner: ModelRunner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read on the device before and behind the cancelled steps."""
    (target, *_) = await wanted(engine, 1)
    inst = engine.open_instance("stop")
    loop = Sampler(engine, inst, target=target)
    go = hold(runner, monkeypatch)
    seen: list[tuple[bytes, bytes]] = []
    submit = runner.submit

    def watched(batch: StepBatch) -> Any:
        handle = submit(batch)
        reads.append((runner.device.read(runner.tables.arena, 0, 4 * 64), runner.read_pages([0, 1, 2, 3])))
        return handle

    reads: list[Any] = []
    monkeypatch.setattr(runner, "submit", watched)
    out = loop.submit(PROMPT) + loop.submit(loop.feed, 3)
    while engine.status()["in_flight"] < 2:
        await asyncio.sleep(0.001)
    go.set()
    assert await outcomes(out) == [target] + [PassSkipped] * 3
    for arena, pages in reads:
        seen.append((await arena, await pages))
    assert len(seen) >= 2
    latched = [sum(a != b for a, b in zip(before[0], after[0], strict=True)) for before, after in pairwise(seen)]
    assert latched[0] == 1 and not any(latched[1:]), "the gate alone"
    assert all(pages == seen[0][1] for _, pages in seen)
    inst.close()


async def test_two_loops_of_different_lengths_and_a_host_fed_one(engine: Engine) -> None:
    want = [await wanted(engine, 14, seed) for seed in (7, 8, 9)]
    ends = [next(k for k in range(lowest, 14) if tokens[k] not in tokens[:k]) for lowest, tokens in ((3, want[0]), (7, want[1]))]
    inst = engine.open_instance("mixed")
    loops = [Sampler(engine, inst, seed=seed, target=want[k][end]) for k, (seed, end) in enumerate(zip((7, 8), ends, strict=True))]
    host = asyncio.ensure_future(Sampler(engine, inst, seed=9).host_fed(14))
    outs = [loop.submit(PROMPT) + loop.submit(loop.feed, 13) for loop in loops]
    for out, tokens, end in zip(outs, want, ends, strict=False):
        assert await outcomes(out) == tokens[: end + 1] + [PassSkipped] * (13 - end)
    assert await host == want[2]
    inst.close()


async def test_a_masked_lane_beside_a_live_one(runner: ModelRunner, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [await wanted(engine, 6, seed) for seed in (7, 8)]
    inst = engine.open_instance("masked")
    stops, goes = Sampler(engine, inst, seed=7, target=want[0][0]), Sampler(engine, inst, seed=8)
    go = hold(runner, monkeypatch)
    outs = [loop.submit(PROMPT) + loop.submit(loop.feed, 5) for loop in (stops, goes)]
    while engine.status()["in_flight"] < 2:
        await asyncio.sleep(0.001)
    go.set()
    assert await outcomes(outs[0]) == want[0][:1] + [PassSkipped] * 5
    assert await outcomes(outs[1]) == want[1]
    assert engine.metrics.skipped_passes > 0
    inst.close()


@pytest.mark.parametrize("turns", [0, 3, 9, 20, 40])
async def test_closing_at_any_moment_frees_everything_and_others_go_on(engine: Engine, turns: int) -> None:
    inst, other = engine.open_instance("closed"), engine.open_instance("goes on")
    loop = Sampler(engine, inst)
    out = loop.submit(PROMPT) + loop.submit(loop.feed, 12)
    kept = Sampler(engine, other, seed=8)
    goes_on = kept.submit(PROMPT) + kept.submit(kept.feed, 9)
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    inst.close()
    got = await outcomes(out)
    known = [value for value in got if value is not InstanceClosed]
    tokens = await outcomes(goes_on)
    other.close()
    assert known == (await wanted(engine, 13))[: len(known)]
    assert tokens == await wanted(engine, 10, 8)


async def test_a_fault_with_passes_in_flight_fails_them(engine: Engine) -> None:
    inst = engine.open_instance("fault")
    loop = Sampler(engine, inst)
    bad = inst.channel("i32", seed=[1 << 20])
    out = loop.submit(PROMPT) + loop.submit(bad, feed=False) + loop.submit(loop.feed, 3)
    assert await outcomes(out) == [*await wanted(engine, 1), *[PassFailed] * 4]
    inst.close()
