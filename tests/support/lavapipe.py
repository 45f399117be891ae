"""The WebGPU device on lavapipe for tests. Import this before wgpu: it picks the Vulkan driver and the shader cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

LAVAPIPE = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
os.environ.setdefault("VK_ICD_FILENAMES", str(LAVAPIPE))

from pie_core.device.webgpu import WebGpuDevice  # noqa: E402
from pie_server.adapters.wgpu_native import open_webgpu_sync  # noqa: E402


@lru_cache(maxsize=1)
def lavapipe() -> WebGpuDevice:
    """The one software device of this test process."""
    if not LAVAPIPE.exists():
        raise RuntimeError(f"{LAVAPIPE} is missing: install mesa-vulkan-drivers (make test does, as root)")
    with ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
        return thread.submit(open_webgpu_sync, True).result()


@lru_cache(maxsize=1)
def as_gpu() -> WebGpuDevice:
    """The same raw device with the kernels that a real GPU gets (shared memory and barriers)."""
    device = lavapipe()
    return WebGpuDevice(device.gpu, device.raw, replace(device.info, software=False), map_read=device.map_read, indirect=False)
