"""Real devices and engines for tests and benches: opens what the server would open, over a checkpoint file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from pie_core.device.protocol import Device
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.weights import open_gguf

Kind = Literal["cpu", "webgpu"]
LAVAPIPE = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")


async def open_device(kind: Kind) -> Device:
    """The cpu device, or webgpu on whatever adapter Vulkan gives (lavapipe on machines without a GPU)."""
    if kind == "webgpu" and LAVAPIPE.exists():
        os.environ.setdefault("VK_ICD_FILENAMES", str(LAVAPIPE))
    from pie_server.loading import open_device as open_named

    return await open_named(kind)


async def load_runner(kind: Kind, path: Path | str, *, kv_pool_mb: int = 64, deterministic: bool = False) -> ModelRunner:
    """A checkpoint on a fresh device."""
    device = await open_device(kind)
    checkpoint = open_gguf(path)
    try:
        return ModelRunner.load(device, checkpoint, kv_pool_bytes=kv_pool_mb << 20, deterministic=deterministic)
    except BaseException:
        device.close()
        raise
    finally:
        checkpoint.close()


@asynccontextmanager
async def running_engine(kind: Kind, path: Path | str, *, kv_pool_mb: int = 64, deterministic: bool = False) -> AsyncIterator[Engine]:
    """A started engine; stopped and closed at the end."""
    runner = await load_runner(kind, path, kv_pool_mb=kv_pool_mb, deterministic=deterministic)
    engine = Engine(runner)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        runner.close()
