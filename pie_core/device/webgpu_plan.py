"""Plans: a fixed list of dispatches, replayed by the browser's function where there is one, else recorded each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pie_core.device.protocol import DeviceError, Launch
from pie_core.device.webgpu_buffer import WebGpuBuffer, check_alive
from pie_core.device.webgpu_kernels import WebGpuKernel, owned_kernel

if TYPE_CHECKING:
    from pie_core.device.protocol import Buffer
    from pie_core.device.webgpu import WebGpuDevice

Step = tuple[Any, Any, tuple[int, int, int]]  # pipeline, bind group, workgroups


def bound_buffer(kernel: WebGpuKernel, name: str, buffers: Mapping[str, Buffer]) -> WebGpuBuffer:
    """The buffer bound to `name`. Raises DeviceError when it is missing or another device's."""
    buffer = buffers.get(name)
    if buffer is None:
        raise DeviceError(f"{kernel.spec} needs a buffer for binding {name!r}; given: {', '.join(sorted(buffers))}")
    if not isinstance(buffer, WebGpuBuffer):
        raise DeviceError(f"binding {name!r} of {kernel.spec} is {buffer!r}, not a buffer of this WebGPU device")
    return buffer


def bind(device: WebGpuDevice, kernel: WebGpuKernel, buffers: Mapping[str, Buffer]) -> Any:
    """A bind group over whole buffers."""
    entries = []
    check_alive((bound_buffer(kernel, name, buffers) for name, _ in kernel.bindings), "bind")
    for index, (name, _) in enumerate(kernel.bindings):
        buffer = bound_buffer(kernel, name, buffers)
        entries.append({"binding": index, "resource": {"buffer": buffer.raw, "offset": 0, "size": buffer.raw.size}})
    try:
        return device.raw.create_bind_group(layout=kernel.layout, entries=entries)
    except device.gpu.GPUError as error:
        raise device.failed(error, f"bind the buffers of {kernel.spec}") from error


class RecordedPlan:
    """Launches with fixed grids, recorded into a compute pass each run."""

    def __init__(self, device: WebGpuDevice, launches: Sequence[Launch]) -> None:
        self._device = device
        self._steps: list[Step] = []
        self._buffers: list[WebGpuBuffer] = []
        self._epoch = device.epoch
        for launch in launches:
            kernel = owned_kernel(launch.kernel)
            if kernel.grid is None:
                raise DeviceError("an epilogue kernel has a grid of its own: give it a plan of one launch")
            self._buffers += [bound_buffer(kernel, name, launch.bindings) for name, _ in kernel.bindings]
            self._steps.append((kernel.pipeline, bind(device, kernel, launch.bindings), kernel.grid))
        compile_plan: Callable[[list[Step]], Callable[[Any], None]] | None = getattr(device.raw, "compile_plan", None)
        self._replay = compile_plan(self._steps) if compile_plan is not None else None

    def run(self, *, lane_offset: int = 0, lanes: int = 0) -> None:
        """Enqueue every launch once, in order. Raises DeviceError for lane arguments and DeviceLost."""
        if lane_offset or lanes:
            raise DeviceError(f"lane_offset {lane_offset} and lanes {lanes} belong to an epilogue plan; this plan has none")
        device = self._device
        device.check()
        if device.epoch != self._epoch:
            check_alive(self._buffers, "run a plan")
            self._epoch = device.epoch
        try:
            if self._replay is not None:
                self._replay(device.encoder())
                return
            compute = device.encoder().begin_compute_pass()
            set_pipeline, set_bind_group, dispatch = compute.set_pipeline, compute.set_bind_group, compute.dispatch_workgroups
            last = None
            for pipeline, group, grid in self._steps:
                if pipeline is not last:
                    set_pipeline(pipeline)
                    last = pipeline
                set_bind_group(0, group)
                dispatch(*grid)
            compute.end()
        except device.gpu.GPUError as error:
            raise device.failed(error, f"enqueue a plan of {len(self._steps)} launches") from error
