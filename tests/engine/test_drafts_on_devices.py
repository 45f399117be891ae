"""Speculative decoding without host waits on real devices: drafts are verified, committed by the epilogue's count and built upon before
the host has read anything, and the tokens are those of plain greedy decoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pie_core import eta
from pie_core.engine.errors import PassSkipped
from pie_core.engine.forward import BUFFERED, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.values import Cell
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import Model, intrinsics, trace_epilogue
from pie_core.eta.channel import put, take
from tests.support.ahead import RUNNERS, hold, loaded, running_ahead, write_models

PROMPT = [5, 17, 30, 71, 2, 9, 44, 200, 13, 101, 8, 66, 31]
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


WIDTH = 4  # rows of a round: the last token and three drafts


def ids(value: Any) -> list[int]:
    assert isinstance(value, Cell)
    return [int(v) for v in value.tolist()]


class Speculation:
    """Verifies the last token and drafts of what comes behind it; keeps those that plain greedy decoding would have made."""

    def __init__(self, engine: Engine, inst: Instance) -> None:
        self.inst, self.pipe, self.ws = inst, inst.pipeline(), inst.working_set()
        self.model = Model(engine.limits.vocab, engine.limits.hidden)
        self.feed, self.fed = inst.channel("i32", (WIDTH,)), inst.channel("i32", (WIDTH,))  # tokens of a round, and what it compares with
        self.given = inst.channel("i32", (WIDTH,), 16, host="writer")
        self.kept = inst.channel("i32", (), 2, host="reader")
        self.done = inst.channel("bool", (), 16)

    def prompt(self) -> Any:
        """The greedy token behind the prompt, with which the first round starts."""

        def fn() -> Any:
            token = eta.reduce_argmax(intrinsics.output(0, "logits"))
            put(self.feed, eta.broadcast(token, (WIDTH,)))
            put(self.fed, eta.broadcast(token, (WIDTH,)))
            return token

        t = trace_epilogue(fn, self.model)
        return self.inst.submit(self.pipe, PassSpec(PROMPT, [self.ws], program=t.program, params=t.params, channels=t.channels))[0]

    def round(self, tokens: Sequence[int] | None = None, *, stop: int | None = None) -> Any:
        """(greedy token behind each row, how many rows were kept), futures. `tokens` None: the drafts of the round before, from the
        device. `stop`: the token that ends the pipeline."""
        source = self.fed if tokens is None else self.given
        if tokens is not None:
            self.inst.put(self.given, tokens)

        def fn() -> Any:
            fed, said = take(source), eta.reduce_argmax(intrinsics.outputs("logits"))
            at = eta.iota(WIDTH).cast("i32")
            good = eta.eq(eta.gather(fed, eta.minimum(at + 1, WIDTH - 1)), said)
            n = eta.reduce_sum(eta.cumprod(eta.select(eta.lt(at, WIDTH - 1), good.cast("i32"), 0))) + 1
            put(self.kept, n)
            if tokens is None:
                after = eta.gather(said, eta.minimum(at + (n - 1), WIDTH - 1))
                put(self.feed, after)
                put(self.fed, after)
            if stop is not None:
                hit = eta.logical_and(eta.eq(said, stop), eta.lt(at, n))
                put(self.done, eta.gt(eta.reduce_sum(hit.cast("i32")), 0))
            return said, n

        t = trace_epilogue(fn, self.model, rows=WIDTH)
        spec = PassSpec(
            self.feed if tokens is None else list(tokens),
            [self.ws],
            BUFFERED,
            [list(range(WIDTH))],
            t.program,
            t.params,
            t.channels,
        )
        outs = self.inst.submit(self.pipe, spec)
        self.inst.commit(self.ws, self.kept)
        self.inst.discard(self.ws)
        return asyncio.gather(*outs, return_exceptions=True)


async def plain(engine: Engine, n: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Greedy decoding of one token a pass."""
    inst = engine.open_instance("plain")
    ws, pipe, feed, tokens = inst.working_set(), inst.pipeline(), list(prompt), []
    t = trace_epilogue(lambda: eta.reduce_argmax(intrinsics.output(0, "logits")), Model(engine.limits.vocab, engine.limits.hidden))
    for _ in range(n):
        tokens.append(int(await inst.submit(pipe, PassSpec(feed, [ws], program=t.program, params=t.params))[0]))  # type: ignore[arg-type]
        feed = tokens[-1:]
    inst.close()
    return tokens


async def length(inst: Instance, ws: WorkingSet) -> int:
    out: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    inst.length(ws, lambda n, error: out.set_exception(error) if error else out.set_result(n))  # type: ignore[arg-type]
    return await out


@pytest.mark.parametrize("runner", [("cpu", "attention"), ("webgpu", "attention")], ids="-".join, indirect=True)
async def test_drafts_of_the_device_make_the_greedy_tokens(runner: ModelRunner, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jacobi decoding: what a round predicts behind the tokens that it keeps are the drafts of the next. All rounds are submitted at once,
    four and more are in flight before the first is read."""
    want = await plain(engine, 40)
    inst = engine.open_instance("jacobi")
    loop = Speculation(engine, inst)
    tokens, waits = [await loop.prompt()], engine.metrics.host_waits
    go = hold(runner, monkeypatch)
    rounds = [loop.round() for _ in range(10)]
    async with asyncio.timeout(20):
        while engine.status()["in_flight"] < 4:
            await asyncio.sleep(0.001)
    go.set()
    for said, n in [await out for out in rounds]:
        tokens += ids(said)[:n]
    assert tokens == want[: len(tokens)] and len(tokens) > 11
    assert engine.metrics.host_waits <= waits + 1, "the first round alone finds an idle device"
    assert await length(inst, loop.ws) == len(PROMPT) + len(tokens) - 1
    inst.close()


def script(want: Sequence[int], kept: Sequence[int]) -> list[list[int]]:
    """The tokens of rounds that keep so many each, where plain decoding gives `want`."""
    at, rounds = 0, []
    for n in kept:
        tokens = list(want[at : at + WIDTH])
        if n < WIDTH:
            tokens[n] = (tokens[n] + 1) % 200
        rounds.append(tokens)
        at += n
    return rounds


@pytest.mark.parametrize("kept", [[1] * 8, [4] * 6, [2, 4, 1, 3, 3, 1, 4, 2]], ids=["least", "most", "mixed"])
async def test_drafts_of_the_host_go_out_before_counts_come_in(
    runner: ModelRunner, engine: Engine, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host knows what will be kept only because the test says so."""
    want = await plain(engine, 40)
    inst = engine.open_instance("script")
    loop = Speculation(engine, inst)
    assert await loop.prompt() == want[0]
    go, batches = hold(runner, monkeypatch), []
    submit = runner.submit
    monkeypatch.setattr(runner, "submit", lambda batch: (batches.append(batch), submit(batch))[1])
    rounds = [loop.round(tokens) for tokens in script(want, kept)]
    async with asyncio.timeout(20):
        while engine.status()["in_flight"] < 2:
            await asyncio.sleep(0.001)
    go.set()
    at = 0
    for out, n in zip(rounds, kept, strict=True):
        said, got = await out
        assert got == n
        assert ids(said)[:n] == want[at + 1 : at + n + 1]
        at += n
    assert any(batch.may_shift for batch in batches)
    assert await length(inst, loop.ws) == len(PROMPT) + at
    inst.close()


async def test_a_stop_in_a_round_cancels_what_is_in_flight_behind_it(
    runner: ModelRunner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is what the round that stopped has left, and goes on from there."""
    kept = [2, 3, 4, 1, 2]
    want = await plain(engine, 40)
    at = sum(kept[:2])  # tokens behind the prompt's when the second round has ended
    inst = engine.open_instance("stop")
    loop = Speculation(engine, inst)
    loop.pipe.stop_when(loop.done)
    assert await loop.prompt() == want[0]
    go = hold(runner, monkeypatch)
    rounds = [loop.round(tokens, stop=want[at] if k == 1 else -1) for k, tokens in enumerate(script(want, kept))]
    async with asyncio.timeout(20):
        while engine.status()["in_flight"] < 2:
            await asyncio.sleep(0.001)
    go.set()
    outs = [await out for out in rounds]
    assert [n for _, n in outs[:2]] == kept[:2]
    assert all(isinstance(value, PassSkipped) for out in outs[2:] for value in out)
    assert await length(inst, loop.ws) == len(PROMPT) + at
    loop.pipe = inst.pipeline()
    loop.given = inst.channel("i32", (WIDTH,), 1, host="writer")  # the other one holds what the cancelled rounds did not take
    [(said, n)] = [await loop.round(script(want[at:], [3])[0])]
    assert n == 3 and ids(said)[:3] == want[at + 1 : at + 4]
    inst.close()
