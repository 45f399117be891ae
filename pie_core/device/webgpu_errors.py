"""Turns errors of the injected WebGPU module into the protocol's typed errors."""

from __future__ import annotations

from pie_core.device.protocol import DeviceError, DeviceLost, DeviceOutOfMemory, KernelError

_LOST = ("device is lost", "device lost", "device was lost", "devicelost")
_MEMORY = ("out of memory", "outofmemory", "not enough memory")


def summary(error: BaseException) -> str:
    """The last telling line of a WebGPU error: implementations put the cause below a general heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line not in ("Validation Error", "Caused by:") and not line.startswith("In wgpu")]
    return "; ".join(causes)[:2000] if causes else type(error).__name__


def says_lost(error: BaseException) -> bool:
    """Whether the error says that the device is gone."""
    text = str(error).lower()
    return any(phrase in text for phrase in _LOST)


def translate(error: BaseException, doing: str, *, kernel: bool = False) -> DeviceError:
    """The typed error for `error` raised while `doing` something ("create a buffer of 12 bytes")."""
    if isinstance(error, DeviceError):
        return error
    text = f"could not {doing}: {summary(error)}"
    if says_lost(error):
        return DeviceLost(f"the WebGPU device was lost; {text}")
    names = {cls.__name__.lower() for cls in type(error).__mro__}
    if any("outofmemory" in name for name in names) or any(phrase in str(error).lower() for phrase in _MEMORY):
        return DeviceOutOfMemory(text)
    return KernelError(text) if kernel else DeviceError(text)
