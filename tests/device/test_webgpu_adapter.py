"""Which adapter native wgpu opens, and what it says when there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_server.adapters.wgpu_native import NEEDED, choose, is_software, open_webgpu, use_shader_cache
from tests.support.lavapipe import lavapipe


class Adapter:
    """What `choose` looks at."""

    def __init__(self, device: str, kind: str, backend: str = "Vulkan", **short: int) -> None:
        self.info = {"device": device, "adapter_type": kind, "backend_type": backend, "description": "", "vendor": ""}
        self.limits = {**NEEDED, **{name.replace("_", "-"): value for name, value in short.items()}}


DISCRETE, INTEGRATED = Adapter("Big GPU", "DiscreteGPU"), Adapter("Small GPU", "IntegratedGPU")
LLVMPIPE, SWIFT = Adapter("llvmpipe (LLVM 15)", "CPU"), Adapter("SwiftShader Device", "DiscreteGPU")
GL = Adapter("Big GPU", "DiscreteGPU", "OpenGL")
TINY = Adapter("Phone", "IntegratedGPU", max_storage_buffers_per_shader_stage=4)


@pytest.mark.parametrize(
    ("adapters", "software", "chosen"),
    [
        ([LLVMPIPE, INTEGRATED, GL, DISCRETE], False, DISCRETE),
        ([LLVMPIPE, INTEGRATED], True, INTEGRATED),
        ([TINY, LLVMPIPE], True, LLVMPIPE),
        ([SWIFT, INTEGRATED], True, INTEGRATED),
        ([Adapter("Metal GPU", "IntegratedGPU", "Metal")], False, "Metal GPU"),
    ],
)
def test_choice(adapters: list[Any], software: bool, chosen: Any) -> None:
    got = choose(adapters, software)
    assert got is chosen or got.info["device"] == chosen


@pytest.mark.parametrize(
    ("adapters", "software", "message"),
    [
        ([], False, "none found; is a Vulkan, Metal or D3D12 driver installed"),
        ([GL], True, r"Big GPU \(OpenGL\): not one of Vulkan, Metal, D3D12"),
        ([LLVMPIPE], False, "llvmpipe.*: software, used only when asked for by name"),
        ([TINY], False, "max-storage-buffers-per-shader-stage 4 < 8"),
    ],
)
def test_no_adapter_says_why(adapters: list[Any], software: bool, message: str) -> None:
    with pytest.raises(DeviceError, match=f"no usable WebGPU adapter: .*{message}"):
        choose(adapters, software)


async def test_software_is_not_taken_unasked() -> None:
    lavapipe()  # the driver list of this process is lavapipe alone
    with pytest.raises(DeviceError, match="software, used only when asked for by name"):
        await open_webgpu()


@pytest.mark.parametrize(
    ("info", "software"),
    [
        ({"device": "llvmpipe (LLVM 15.0.6, 256 bits)", "adapter_type": "CPU"}, True),
        ({"device": "Google SwiftShader", "adapter_type": "Unknown"}, True),
        ({"device": "", "description": "Microsoft Basic Render Driver", "adapter_type": "DiscreteGPU"}, True),
        ({"device": "NVIDIA H200", "description": "550.54", "adapter_type": "DiscreteGPU"}, False),
    ],
)
def test_software_adapters_are_recognised(info: dict[str, Any], software: bool) -> None:
    assert is_software(info) is software


def test_shaders_are_cached_under_the_project_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_CACHE", str(tmp_path))
    monkeypatch.delenv("MESA_SHADER_CACHE_DIR", raising=False)
    assert use_shader_cache() == tmp_path / "shaders" and (tmp_path / "shaders").is_dir()
    assert os.environ["MESA_SHADER_CACHE_DIR"] == str(tmp_path / "shaders")
    monkeypatch.setenv("MESA_SHADER_CACHE_DIR", "/elsewhere")
    use_shader_cache()
    assert os.environ["MESA_SHADER_CACHE_DIR"] == "/elsewhere"


def test_a_cache_that_cannot_be_written_has_no_shaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIE_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv("MESA_SHADER_CACHE_DIR", raising=False)
    assert use_shader_cache() is None
    assert "MESA_SHADER_CACHE_DIR" not in os.environ
