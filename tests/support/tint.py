"""Chromium's WGSL compiler (Tint) for tests: wgpudawn on SwiftShader, in a process of its own (one Vulkan driver a process).

`compile_wgsl(sources)` returns the errors by name. `python -m tests.support.tint selftest` runs the start-up self-test of both
kernel variants there.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
ICDS = (Path("/usr/lib/chromium/vk_swiftshader_icd.json"), Path("/usr/lib64/chromium-browser/vk_swiftshader_icd.json"))


def swiftshader() -> Path:
    """SwiftShader's ICD file. Raises RuntimeError when chromium is not installed."""
    for path in ICDS:
        if path.exists():
            return path
    raise RuntimeError(f"none of {', '.join(map(str, ICDS))} exists: install chromium (make test does, as root)")


def run_in_dawn(command: Sequence[str], given: str = "", seconds: float = 100.0) -> str:
    """Run `python -m tests.support.tint *command` on SwiftShader and return its standard output. Raises AssertionError with its errors."""
    environment = {**os.environ, "VK_ICD_FILENAMES": str(swiftshader()), "VK_DRIVER_FILES": str(swiftshader())}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tint", *command],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} failed on SwiftShader:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def compile_wgsl(sources: Mapping[str, str], pipelines: bool = False) -> dict[str, str]:
    """Compile named WGSL sources with Tint; the errors by name, empty when all are fine. `pipelines` also builds a compute
    pipeline of `main` from each (SwiftShader then compiles it too, about 0.4 s a kernel)."""
    given = json.dumps({"sources": dict(sources), "pipelines": pipelines})
    errors: dict[str, str] = json.loads(run_in_dawn(["compile"], given).splitlines()[-1])
    return errors


async def _device() -> tuple[Any, Any, Any]:
    import wgpudawn as dawn

    adapter = await dawn.gpu.request_adapter_async(power_preference="high-performance")
    limits = {name: int(adapter.limits[name]) for name in ("max-storage-buffer-binding-size", "max-buffer-size")}
    return dawn, adapter.info, await adapter.request_device_async(required_limits=limits)


async def _compile() -> None:
    dawn, _, device = await _device()
    errors = {}
    given = json.loads(sys.stdin.read())
    for name, source in given["sources"].items():
        try:
            module = device.create_shader_module(code=source)
            if given["pipelines"]:
                device.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
        except dawn.GPUError as error:
            errors[name] = str(error)
    print(json.dumps(errors))


async def _selftest() -> None:
    from pie_core.device.protocol import DeviceInfo
    from pie_core.device.selftest import SelfTest, q4_1_block, self_test
    from pie_core.device.webgpu import WebGpuDevice

    dawn, adapter, raw = await _device()
    for software in (True, False):
        info = DeviceInfo("webgpu", str(adapter["device"]), "Dawn", software=software)
        device = WebGpuDevice(dawn, raw, info)
        await self_test(device)
        # The other variants of the linear kernel; the self-test itself runs that of bucket 4.
        for bucket in (1, 2) if software else (1, 8, 16, 32):
            variant = SelfTest(device, bucket)
            await variant.linear(variant.step(), "q4_1", q4_1_block(variant.values, 40, 64), add=False)
        print(f"self-test passed, software={software}")


if __name__ == "__main__":
    asyncio.run({"compile": _compile, "selftest": _selftest}[sys.argv[1]]())
