"""What the timeline knows of a device: seconds of steps and epilogues where it was opened with timing, nothing where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.weights import open_gguf
from pie_server.loading import open_device
from tests.engine.test_on_devices import decode
from tests.support.engines import LAVAPIPE, Kind
from tests.support.tiny_gguf import write_tiny_gguf


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
