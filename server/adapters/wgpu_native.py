"""Opens a WebGPU device through native wgpu: chooses the adapter, asks for its limits, says what really runs."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

from pie_core.device.protocol import DeviceError, DeviceInfo
from pie_core.device.webgpu import WebGpuDevice
from pie_core.device.webgpu_timing import FEATURE
from pie_server.build.cpu_module import cache_root

BACKENDS = ("Vulkan", "Metal", "D3D12")  # wgpu falls back to OpenGL without a word; its compute limits and speed do not fit
SOFTWARE_NAMES = ("llvmpipe", "lavapipe", "swiftshader", "microsoft basic render")
WANTED_LIMITS = ("max-storage-buffer-binding-size", "max-buffer-size")
NEEDED = {
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-storage-size": 16384,
}


def use_shader_cache() -> Path | None:
    """Keep Mesa's compiled shaders under $PIE_CACHE/shaders unless the user chose a place. Takes effect before the first adapter.

    None where the folder cannot be made: shaders are then compiled anew at each start, which only costs time.
    """
    folder = cache_root() / "shaders"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    os.environ.setdefault("MESA_SHADER_CACHE_DIR", str(folder))
    return folder


@cache
def trust_grids() -> bool:
    """Have wgpu not check each indirect dispatch by a dispatch of its own, which doubles the work of recording: all grids are written by a
    kernel of this repository, within the limits. Takes effect before the first adapter; whether it did."""
    try:
        from wgpu.backends.wgpu_native import extras  # type: ignore[import-untyped]

        extras.set_instance_extras(flags=("Empty",))
    except (ImportError, AttributeError, KeyError, RuntimeError):  # another back end, or an instance that somebody else made
        return False
    return True


def is_software(info: dict[str, Any]) -> bool:
    """Whether an adapter is a rasteriser on the CPU."""
    names = f"{info.get('device', '')} {info.get('description', '')} {info.get('vendor', '')}".lower()
    return str(info.get("adapter_type", "")).lower() == "cpu" or any(name in names for name in SOFTWARE_NAMES)


def choose(adapters: list[Any], allow_software: bool) -> Any:
    """The adapter to use: a discrete GPU, else an integrated one, else (only when allowed) software.

    Raises DeviceError that lists what was found and why each was passed over.
    """
    rank = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "VirtualGPU": 2, "CPU": 3}
    usable, passed = [], []
    for adapter in adapters:
        info = adapter.info
        name = f"{info['device']} ({info['backend_type']})"
        short = [f"{key} {adapter.limits[key]} < {least}" for key, least in NEEDED.items() if adapter.limits[key] < least]
        if info["backend_type"] not in BACKENDS:
            passed.append(f"{name}: not one of {', '.join(BACKENDS)}")
        elif is_software(info) and not allow_software:
            passed.append(f"{name}: software, used only when asked for by name (--device webgpu)")
        elif short:
            passed.append(f"{name}: {', '.join(short)}")
        else:
            usable.append((rank.get(info["adapter_type"], 2) + 4 * is_software(info), adapter))
    if usable:
        return min(usable, key=lambda pair: pair[0])[1]
    found = "; ".join(passed) or "none found; is a Vulkan, Metal or D3D12 driver installed?"
    raise DeviceError(f"no usable WebGPU adapter: {found}")


def timestamp_period(raw: Any) -> float | None:
    """Nanoseconds of one tick of a timestamp query; None where the back end does not tell."""
    try:
        from wgpu.backends.wgpu_native import lib
    except ImportError:  # another back end
        return None
    period = float(lib.wgpuQueueGetTimestampPeriod(raw.queue._internal))
    return period if period > 0 else None


class NativeDevice(WebGpuDevice):
    """Over wgpu-native, whose object has a thread that polls it, and memory that only an explicit end frees at once."""

    def close(self) -> None:
        """Free the device, a lost one too; later calls raise DeviceLost."""
        super().close()
        self.raw.destroy()


async def open_webgpu(allow_software: bool = False, timed: bool = False) -> WebGpuDevice:
    """A device on the best adapter, with timestamp queries if `timed` and the adapter has them. Raises DeviceError when there is none
    (or only software and that is not allowed)."""
    use_shader_cache()
    try:
        import wgpu  # type: ignore[import-untyped]
    except ImportError as error:
        raise DeviceError("the webgpu device needs the Python package wgpu: install pie-webgpu[gpu]") from error
    indirect = trust_grids()
    adapter = choose(await wgpu.gpu.enumerate_adapters_async(), allow_software)
    limits = {key: int(adapter.limits[key]) for key in WANTED_LIMITS}
    features = [FEATURE] if timed and FEATURE in adapter.features else []
    try:
        raw = await adapter.request_device_async(label="pie", required_features=features, required_limits=limits)
    except wgpu.GPUError as error:
        raise DeviceError(f"adapter {adapter.info['device']} gave no device: {error}") from error
    info = DeviceInfo(
        kind="webgpu",
        name=str(adapter.info["device"]),
        description=f"{adapter.info['description']}, {adapter.info['backend_type']}".strip(", "),
        software=is_software(dict(adapter.info)),
        limits=limits,
    )
    probe = raw.create_buffer(size=16, usage=wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.STORAGE)

    def drain() -> None:
        raw.queue.read_buffer(probe, 0, 4)

    # READ_NOSYNC leaves out wgpu-py's extra empty submission a map; the copy before it is already submitted here.
    period = timestamp_period(raw) if features else None
    return NativeDevice(wgpu, raw, info, map_read="READ_NOSYNC", drain=drain, indirect=indirect, timestamp_period=period)


def open_webgpu_sync(allow_software: bool = False) -> WebGpuDevice:
    """`open_webgpu` for code without an event loop."""
    return asyncio.run(open_webgpu(allow_software))
