"""The smallest launch of the cpu device's tests: an rms_norm over one row of eight."""

from __future__ import annotations

from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.protocol import ParamValue

NORM: dict[str, ParamValue] = {"width": 8, "eps": 1e-5, "rows": "tokens", "bucket": 1}


def norm(device: CpuDevice, width: int = 8, **sizes: int) -> dict[str, CpuBuffer]:
    """Its bindings; `sizes` overrides bytes by binding name."""
    size = {"step": 4 * 128, "x": 4 * width, "weight": 4 * width, "out": 4 * width, **sizes}
    return {name: device.create_buffer(n, name) for name, n in size.items()}
