"""What tests of passes ahead share: models of both kinds on real devices, an engine that must be empty at the end, results that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner, StepRun
from pie_core.engine.runner import StepBatch
from pie_core.weights import open_gguf
from tests.support.engines import Kind, open_device
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_recurrent import POEM, write_tiny_recurrent

RUNNERS: list[tuple[Kind, str]] = [(kind, name) for name in ("attention", "hybrid") for kind in ("cpu", "webgpu")]
AHEAD = 6  # steps in flight


def write_models(folder: Path) -> dict[str, Path]:
    """A model of attention alone, and one with a recurrent layer: a pass that is cancelled must not write its state either."""
    write_tiny_gguf(folder / "attention.gguf", layers=2, context=128, seed=3)
    return {"attention": folder / "attention.gguf", "hybrid": write_tiny_recurrent(folder / "hybrid.gguf", ("attention", "recurrent"))}


@asynccontextmanager
async def loaded(kind: Kind, name: str, models: Mapping[str, Path]) -> AsyncIterator[ModelRunner]:
    """One of RUNNERS, with `models` as `write_models` gave them."""
    device = await open_device(kind)
    with open_gguf(models[name]) as checkpoint:
        runner = ModelRunner.load(device, checkpoint, poem=POEM if name == "hybrid" else None, kv_pool_bytes=1 << 20)
    try:
        yield runner
    finally:
        runner.close()


@asynccontextmanager
async def running_ahead(runner: ModelRunner) -> AsyncIterator[Engine]:
    """An engine up to AHEAD steps ahead; nothing may be left over at the end."""
    engine = Engine(runner, ahead=AHEAD)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
    assert engine.pool.used == 0 and engine.arena.used == 0
    assert engine.states is None or engine.states.used == 0


class Held:
    """Results that wait until `go` is set."""

    def __init__(self, run: StepRun, go: asyncio.Event) -> None:
        self.run, self.go, self.times = run, go, run.times

    async def results(self) -> bytes:
        """Those of the run."""
        data = await self.run.results()
        await self.go.wait()
        return data


def hold(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on results come when the event is set."""
    go, submit = asyncio.Event(), runner.submit

    def held(batch: StepBatch) -> Any:
        return Held(submit(batch), go)

    monkeypatch.setattr(runner, "submit", held)
    return go
