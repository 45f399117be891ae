"""What the timeline knows of a device: the cpu device's own clock, nothing where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pie_core.engine.model_runner import ModelRunner
from pie_server.metrics_timeline import device_clock
from tests.engine.test_on_devices import decode
from tests.support.engines import Kind, running_engine
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize("kind", ["cpu", "webgpu"])
async def test_steps_and_epilogues_are_timed_where_the_device_can(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=1, context=64, seed=3)
    async with running_engine(kind, path, kv_pool_mb=1) as engine:
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        runner.clock = device_clock(runner.device)
        inst = engine.open_instance("t")
        await decode(engine, inst, [1, 2, 3], 3)
        inst.close()
        for record in engine.metrics.timeline:
            if kind == "webgpu":
                assert record.device_s is None and record.epilogue_s is None
            else:
                assert record.device_s is not None and record.epilogue_s is not None
                assert 0 < record.epilogue_s < record.device_s < record.busy_s + 1
        assert engine.status()["busy_s"] > 0
