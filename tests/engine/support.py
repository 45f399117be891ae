"""Programs, passes and loops that the engine's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pie_core.engine.forward import FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import Model, Tensor, intrinsics, trace_epilogue
from pie_core.eta.tracing import Traced
from tests.engine.fake_runner import HIDDEN, VOCAB, FakeRunner

MODEL = Model(VOCAB, HIDDEN)


def traced(fn: Callable[[], Any]) -> Traced:
    """An epilogue over the fake model; it may close over engine Channels through `cell`."""
    return trace_epilogue(fn, MODEL)


def argmax(index: int = 0) -> Tensor:
    """The greedy token of read-out `index`, i32."""
    from pie_core import eta

    return eta.reduce_argmax(intrinsics.output(index, "logits"))


GREEDY = traced(argmax)


def greedy(tokens: Any, *sets: WorkingSet, geometry: Geometry = FOLDING, **more: Any) -> PassSpec:
    """A pass that returns the greedy token of its first read-out."""
    return PassSpec(tokens, list(sets), geometry, program=GREEDY.program, params=GREEDY.params, **more)


def spec(tokens: Any, sets: Sequence[WorkingSet], fn: Callable[[], Any], geometry: Geometry = FOLDING, **more: Any) -> PassSpec:
    """A pass with a traced epilogue."""
    t = traced(fn)
    return PassSpec(tokens, list(sets), geometry, program=t.program, params=t.params, channels=t.channels, **more)


async def decode(inst: Instance, prompt: Sequence[int], n: int, ws: WorkingSet | None = None, pipe: Pipeline | None = None) -> list[int]:
    """The seed's greedy loop, straight on the engine."""
    ws = ws or inst.working_set()
    own = pipe is None
    pipe = pipe or inst.pipeline()
    tokens: list[int] = []
    feed = list(prompt)
    for _ in range(n):
        token = await inst.submit(pipe, greedy(feed, ws))[0]
        assert isinstance(token, int)
        tokens.append(token)
        feed = [token]
    if own:
        inst.close_pipeline(pipe)
    return tokens


@asynccontextmanager
async def running(
    runner: FakeRunner, *, predict: bool = True, deterministic: bool = False, ahead: int | None = None
) -> AsyncIterator[Engine]:
    """A started engine; at the end nothing may be left over."""
    engine = Engine(runner, predict=predict, deterministic=deterministic, ahead=ahead)
    engine.start()
    try:
        yield engine
    finally:
        runner.release()
        runner.hold = False
        await engine.stop()
    assert engine.pool.used == 0, "pages leaked"
    assert engine.pool.unlent == engine.pool.total, "a lent page was not given back"
    assert engine.arena.used == 0, "arena words leaked"
    assert not engine.instances


async def settle(times: int = 20) -> None:
    """Let everything that is ready happen."""
    for _ in range(times):
        await asyncio.sleep(0)
