"""Opens a device in the page: which one, what it may do, and why it was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyodide.ffi import JsException, jsnull

from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import DeviceError, DeviceInfo
from pie_web import wgpu_shim
from pie_web.cpu_adapter import PageCpuModule
from pie_web.turns import Turns

if TYPE_CHECKING:
    from pie_core.device.webgpu import WebGpuDevice

SOFTWARE_NAMES: Final = ("swiftshader", "llvmpipe", "lavapipe", "microsoft basic render", "warp")
# What the kernels need, by WebGPU's names; the first two are asked for as large as the adapter has them.
NEEDED: Final = {
    "maxStorageBufferBindingSize": 128 << 20,
    "maxBufferSize": 128 << 20,
    "maxStorageBuffersPerShaderStage": 8,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupStorageSize": 16384,
}


class NoWebGpu(DeviceError):
    """Why WebGPU cannot be used here."""


class OpenDevice:
    """A device with what only its host knows: bytes it holds, milliseconds it was busy."""

    def __init__(self, device: CpuDevice | WebGpuDevice, raw: PageCpuModule | wgpu_shim.GPUDevice, why: str) -> None:
        self.device = device
        self.why = why
        self._raw = raw

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self._raw.allocated if isinstance(self._raw, wgpu_shim.GPUDevice) else self._raw.memory_bytes

    @property
    def busy_ms(self) -> float:
        """How long it worked: in calls (cpu), or from a step's commands to its read-back (webgpu)."""
        return self._raw.busy_ms


def is_software(info: Any) -> bool:
    """Whether an adapter is a rasteriser on the CPU."""
    names = f"{info.vendor} {info.architecture} {info.device} {info.description}".lower()
    return bool(getattr(info, "isFallbackAdapter", False)) or any(name in names for name in SOFTWARE_NAMES)


def adapter_name(info: Any) -> str:
    """What the browser tells of an adapter, for people."""
    return str(info.device or " ".join(filter(None, (info.vendor, info.architecture))) or "an adapter without a name")


async def find_adapter(gpu: Any, allow_software: bool) -> Any:
    """The browser's adapter. Raises NoWebGpu."""
    if gpu is jsnull:
        raise NoWebGpu("this browser has no WebGPU here")
    try:
        adapter = await gpu.requestAdapter(wgpu_shim.descriptor({"powerPreference": "high-performance"}))
    except JsException as error:
        raise NoWebGpu(f"this browser gave no WebGPU adapter: {error.message}") from None
    if adapter is jsnull:
        raise NoWebGpu("this browser gave no WebGPU adapter")
    if is_software(adapter.info) and not allow_software:
        raise NoWebGpu(f"the only WebGPU adapter, {adapter_name(adapter.info)}, is software, which is used only when asked for by name")
    short = [f"{name} {getattr(adapter.limits, name)} < {least}" for name, least in NEEDED.items() if getattr(adapter.limits, name) < least]
    if short:
        raise NoWebGpu(f"the WebGPU adapter {adapter_name(adapter.info)} is too small: {', '.join(short)}")
    return adapter


async def open_webgpu(host: Any, adapter: Any, why: str) -> OpenDevice:
    """A device on `adapter`. Raises NoWebGpu."""
    from pie_core.device.webgpu import WebGpuDevice  # with the template engine of its kernels: a third of a second that the cpu needs not

    limits = adapter.limits
    wanted = {name: getattr(limits, name) for name in ("maxStorageBufferBindingSize", "maxBufferSize")}
    try:
        raw_device = await adapter.requestDevice(wgpu_shim.descriptor({"label": "pie", "requiredLimits": wanted}))
    except JsException as error:
        raise NoWebGpu(f"the WebGPU adapter {adapter_name(adapter.info)} gave no device: {error.message}") from None
    info = adapter.info

    def lost(message: str) -> None:
        device.mark_lost(f"the browser took it back ({message})")
        host.lost(f"the WebGPU device was lost, and every run with it; load again to go on (the browser says: {message.rstrip('.')})")

    raw = wgpu_shim.GPUDevice(raw_device, host.makeReplay, lost)
    facts = DeviceInfo(
        kind="webgpu",
        name=adapter_name(info),
        description=str(info.description or "the browser's WebGPU"),
        software=is_software(info),
        limits={
            "max-storage-buffer-binding-size": int(wanted["maxStorageBufferBindingSize"]),
            "max-buffer-size": int(wanted["maxBufferSize"]),
        },
    )
    device = WebGpuDevice(wgpu_shim, raw, facts)
    return OpenDevice(device, raw, why)


async def open_cpu(host: Any, turns: Turns, why: str) -> OpenDevice | None:
    """The cpu device; None when the page has no module for it, and the host knows why. Raises DeviceError."""
    kernels = await host.openCpu()
    if kernels is jsnull:
        return None
    module = PageCpuModule(kernels, turns)
    return OpenDevice(CpuDevice(module), module, why)


async def open_device(host: Any, turns: Turns) -> OpenDevice | None:
    """The device that `host.device` asks for: `auto` is a real adapter where there is one, else the cpu. Raises DeviceError."""
    wanted = str(host.device)
    if wanted == "cpu":
        return await open_cpu(host, turns, "asked for by name")
    try:
        adapter = await find_adapter(host.gpu, allow_software=wanted == "webgpu")
        return await open_webgpu(host, adapter, "asked for by name" if wanted == "webgpu" else "a WebGPU adapter that is not software")
    except NoWebGpu as reason:
        if wanted == "webgpu":
            raise
        return await open_cpu(host, turns, str(reason))
