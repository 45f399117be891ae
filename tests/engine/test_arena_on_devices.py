"""The arena grows on real devices while loops that feed themselves are in flight; wide state that stays there shares a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pie_core.engine.channel import Channel
from pie_core.engine.forward import PassSpec
from pie_core.engine.loop import Engine
from pie_core.eta import Model, cast, intrinsics, iota, reduce_argmax, reduce_max, trace_epilogue
from pie_core.eta.channel import put, read, take
from tests.support.engines import Kind, running_engine
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path, layers=2, context=256, seed=3)
    return path


@pytest_asyncio.fixture(params=["cpu", "webgpu"])
async def engine(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Engine]:
    kind: Kind = request.param
    async with running_engine(kind, tiny, kv_pool_mb=1) as e:
        yield e
        assert e.arena.used == 0


def spec(engine: Engine, tokens: Any, ws: Any, fn: Any) -> PassSpec:
    t = trace_epilogue(fn, Model(engine.limits.vocab, engine.limits.hidden))
    return PassSpec(tokens, [ws], program=t.program, params=t.params, channels=t.channels)


def greedy() -> Any:
    return reduce_argmax(intrinsics.output(0, "logits"))


async def test_it_grows_beside_loops_in_flight(engine: Engine) -> None:
    inst = engine.open_instance("grow")

    async def loop(grow: bool) -> list[int]:
        ws, pipe, feed, state = inst.working_set(), inst.pipeline(), inst.channel("i32"), inst.channel("i32", [300], seed=[7] * 300)

        def fn() -> Any:
            token = greedy()
            put(feed, token)
            put(state, take(state) + token)
            return token

        outs = [inst.submit(pipe, spec(engine, [5, 17, 30], ws, fn))[0]]
        outs += [inst.submit(pipe, spec(engine, feed, ws, fn))[0] for _ in range(11)]
        if grow:
            await outs[1]  # steps are in flight
            assert not outs[-1].done()
            big = inst.channel("u32", [600_000], seed=[0] * 600_000)
        tokens = [await out for out in outs]
        total = inst.submit(pipe, spec(engine, [1], inst.working_set(), lambda: reduce_max(read(state))))[0]
        assert await total == 7 + sum(tokens), "the state went along"
        if grow:
            last = spec(engine, [1], inst.working_set(), lambda: reduce_max(cast(read(big), "f32")))
            assert await inst.submit(pipe, last)[0] == 0.0
        for channel in (feed, state, *([big] if grow else [])):
            inst.drop_channel(channel)
        return tokens

    before = await loop(False)
    assert engine.arena.there == 1 << 20
    assert await loop(True) == before
    assert engine.arena.there == 1 << 21
    assert await loop(False) == before
    assert engine.arena.used == 0
    inst.close()


async def test_wide_state_shares_a_step(engine: Engine) -> None:
    """Two passes, each with more state than a step has room for results."""
    inst, n = engine.open_instance("wide"), 49_152

    def keep(ch: Channel) -> Any:
        def fn() -> Any:
            put(ch, take(ch) + cast(iota(n), "f32"))
            return greedy()

        return fn

    channels = [inst.channel("f32", [n], seed=[0] * n) for _ in range(2)]
    passes = [(inst.pipeline(), inst.working_set(), ch) for ch in channels]
    for k in range(3):
        steps = engine.metrics.steps
        outs = [inst.submit(pipe, spec(engine, [k], ws, keep(ch)))[0] for pipe, ws, ch in passes]
        tokens = await asyncio.gather(*outs)
        assert tokens[0] == tokens[1] and engine.metrics.steps == steps + 1
    for pipe, ws, ch in passes:
        assert await inst.submit(pipe, spec(engine, [9], ws, lambda ch=ch: reduce_max(read(ch))))[0] == 3.0 * (n - 1)
    inst.close()
