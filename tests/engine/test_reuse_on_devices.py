"""Shared pages, pausing and deterministic steps over real devices and a tiny random model: the same tokens either way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pausing import PATIENCE
from pie_core.eta import Model, Tensor, gumbel_max, intrinsics, trace_epilogue
from pie_core.eta import channel as ch
from tests.engine.test_on_devices import CONTEXT, PROMPT, CounterLike, decode, spec
from tests.support.engines import Kind, running_engine
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path, layers=4, context=CONTEXT, seed=3)
    return path


@pytest_asyncio.fixture(params=["cpu", "webgpu"])
async def engine(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Engine]:
    kind: Kind = request.param
    async with running_engine(kind, tiny, kv_pool_mb=1) as e:
        yield e
        assert e.pool.used == 0


def prompt(engine: Engine, n: int, seed: int = 3) -> list[int]:
    return [(7 * i + seed) % engine.limits.vocab for i in range(n)]


async def test_the_same_tokens_with_shared_pages_and_without(engine: Engine) -> None:
    long = prompt(engine, 100)
    fresh = engine.open_instance("fresh", reuse=False)
    want = await decode(engine, fresh, long, 12)
    fresh.close()
    for k in range(3):
        inst = engine.open_instance(str(k))
        assert await decode(engine, inst, long, 12) == want
        inst.close()
    assert engine.metrics.reused_tokens == 2 * 96
    both = [engine.open_instance(name, reuse=reuse) for name, reuse in (("shared", True), ("alone", False))]
    turn = [*long, *want, 5, 6, 7]
    got = await asyncio.gather(*(decode(engine, inst, turn, 6) for inst in both))
    assert got[0] == got[1] and engine.metrics.reused_tokens == 2 * 96 + 96
    for inst in both:
        inst.close()


async def test_identical_prompts_at_once(engine: Engine) -> None:
    long = prompt(engine, 150)
    solo = engine.open_instance("solo", "other tenant")
    want = [await decode(engine, solo, [*long, k], 3) for k in range(4)]
    solo.close()
    before = engine.metrics.prefill_tokens
    insts = [engine.open_instance(str(k)) for k in range(4)]
    assert await asyncio.gather(*(decode(engine, inst, [*long, k], 3) for k, inst in enumerate(insts))) == want
    assert engine.metrics.prefill_tokens - before <= 151 + 3 * 7
    for inst in insts:
        inst.close()


async def test_paused_sets_come_back_as_they_were(engine: Engine) -> None:
    tokens = prompt(engine, 70)
    inst = engine.open_instance("paused")
    ws = inst.working_set()
    first = await decode(engine, inst, tokens, 1, ws)
    want = await decode(engine, inst, [*tokens, *first, 9], 5)
    ws.used_at -= 2 * PATIENCE
    ws.pause()
    engine.cache.clear()
    assert await decode(engine, inst, [*first, 9], 5, ws) == want
    assert engine.metrics.revived == 1
    inst.close()


# --- deterministic


async def sampled(engine: Engine, inst: Instance, feed: list[int], seed: int, n: int) -> list[Any]:
    """Tokens, and the bits of the logits that they were drawn from."""
    rng = inst.channel("u32", (2,), 1, seed=(seed, 0))
    like = CounterLike(rng)

    def draw() -> tuple[Tensor, Tensor]:
        logits = intrinsics.output(0, "logits")
        return gumbel_max(logits / 0.9, ch.take(like)), logits

    t = trace_epilogue(draw, Model(engine.limits.vocab, engine.limits.hidden))
    ws, pipe = inst.working_set(), inst.pipeline()
    seen: list[Any] = []
    for _ in range(n):
        token, logits = [await out for out in inst.submit(pipe, spec(t, list(feed), ws, channels=[rng]))]
        assert isinstance(token, int)
        seen.append((token, logits.data))  # type: ignore[union-attr]
        feed = [token]
    inst.close_pipeline(pipe)
    return seen


@pytest.mark.parametrize("kind", ["cpu", "webgpu"])
async def test_deterministic_means_the_same_bits_alone_and_in_any_batch(kind: Kind, tiny: Path) -> None:
    async with running_engine(kind, tiny, kv_pool_mb=2, deterministic=True) as engine:
        assert engine.deterministic and engine.limits.deterministic and not engine.pace.enabled
        inst = engine.open_instance("t", reuse=False)
        feeds = [PROMPT, prompt(engine, 100), prompt(engine, 3), prompt(engine, 40, 9), PROMPT[:5]]
        alone = [await sampled(engine, inst, feed, k, 6) for k, feed in enumerate(feeds)]
        crowd = await asyncio.gather(
            *(sampled(engine, inst, feed, k, 6) for k, feed in enumerate(feeds)), *(decode(engine, inst, [k], 12) for k in range(6))
        )
        assert crowd[: len(feeds)] == alone
        again = engine.open_instance("with shared pages")
        for k, feed in enumerate(feeds):
            for _ in range(2):
                assert await sampled(engine, again, feed, k, 6) == alone[k]
        assert engine.metrics.reused_tokens >= 96
        again.close()
        inst.close()
