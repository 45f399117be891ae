"""What the timeline knows of a device: seconds of steps and epilogues where it was opened with timing, nothing where not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.weights import open_gguf
from pie_server.config import Settings
from pie_server.loading import open_device
from pie_server.service import Service
from tests.engine.test_on_devices import decode
from tests.support.engines import LAVAPIPE, Kind
from tests.support.tiny_gguf import write_tiny_gguf

ONE_PASS = """
from inferlet import model
from inferlet.eta import ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    fwd, pipe = ForwardPass(), Pipeline()
    fwd.embed(model.encode("hello world"))
    fwd.state([WorkingSet()])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    return await out
"""


@pytest.mark.parametrize(("kind", "timed"), [("cpu", True), ("webgpu", True), ("webgpu", False)])
async def test_steps_and_epilogues_are_timed_where_the_device_can(kind: Kind, timed: bool, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=1, context=64, seed=3)
    os.environ.setdefault("VK_ICD_FILENAMES", str(LAVAPIPE))
    device = await open_device(kind, timed=timed)
    with open_gguf(path) as checkpoint:
        runner = ModelRunner.load(device, checkpoint, kv_pool_bytes=1 << 20)
    runner.timer = device.step_timer()
    engine = Engine(runner)
    engine.start()
    try:
        inst = engine.open_instance("t")
        waits = []
        for prompt in ([1, 2, 3], list(range(1, 50))):
            before = engine.status()["host_waits"]
            await decode(engine, inst, prompt, 3)
            waits.append(engine.status()["host_waits"] - before)
        inst.close()
        assert waits == [2, 2]  # as many as without timing
        assert len(engine.metrics.timeline) >= 6
        for record in engine.metrics.timeline:
            if not timed:
                assert record.device_s is None and record.epilogue_s is None
            else:
                assert record.device_s is not None and record.epilogue_s is not None
                assert 0 < record.epilogue_s < record.device_s < record.busy_s + 1
        assert engine.status()["busy_s"] > 0
    finally:
        await engine.stop()
        runner.close()


@pytest.mark.parametrize(("kind", "timed"), [("cpu", True), ("cpu", False), ("webgpu", True)])
async def test_a_service_measures_when_it_is_asked_to(kind: Kind, timed: bool, tiny_model: Path) -> None:
    os.environ.setdefault("VK_ICD_FILENAMES", str(LAVAPIPE))
    service = Service.from_settings(Settings(model=str(tiny_model), device=kind, kv_pool_mb=4, timeline=timed))
    await service.load()
    try:
        assert service.status.state == "ready", service.status.error
        assert await service.run(ONE_PASS, "one", {}) >= 0
        timeline: Any = service.timeline(-1)
        found = [dict(zip(timeline["columns"], step, strict=True)) for step in timeline["steps"]]
        assert found and all((step["device_s"] is not None) is timed and (step["epilogue_s"] is not None) is timed for step in found)
    finally:
        await service.close()
