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
        self._indirect: IndirectGrids | None = None
        self._step = launches[0].bindings.get("step")

    def run(self, *, lane_offset: int = 0, lanes: int = 0, gated: bool = False) -> None:
        """Enqueue every launch once, in order. `gated`: as indirect dispatches, of no workgroups where the step has become empty; where
        those are dear, or the host replays the plan, kernels find no rows instead. Raises DeviceError for lane arguments and
        DeviceLost."""
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
            compute = device.begin_pass()
            set_pipeline, set_bind_group, dispatch = compute.set_pipeline, compute.set_bind_group, compute.dispatch_workgroups
            if gated and device.indirect and self._step is not None:
                self._run_gated(compute, self._step)
                return
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

    def _run_gated(self, compute: Any, step: Buffer) -> None:
        """The launches behind a kernel that writes their grids, or zeros."""
        grids = self._indirect
        if grids is None:
            grids = self._indirect = IndirectGrids(self._device, [grid for _, _, grid in self._steps], step)
        grids.write(compute)
        last = None
        for (pipeline, group, _), offset in zip(self._steps, grids.offsets, strict=True):
            if pipeline is not last:
                compute.set_pipeline(pipeline)
                last = pipeline
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups_indirect(grids.buffer, offset)
        compute.end()


class IndirectGrids:
    """Dispatch arguments in a buffer: each distinct grid of a plan, or no workgroups when the step holds no tokens."""

    def __init__(self, device: WebGpuDevice, grids: Sequence[tuple[int, int, int]], step: Buffer) -> None:
        distinct = list(dict.fromkeys(grids))
        self.offsets = [12 * distinct.index(grid) for grid in grids]
        self._kernel = device.kernels.grids(distinct)
        usage = device.gpu.BufferUsage
        self.buffer = device.allocate(12 * len(distinct), usage.STORAGE | usage.INDIRECT, "dispatch arguments")
        assert isinstance(step, WebGpuBuffer)
        entries = [
            {"binding": 0, "resource": {"buffer": step.raw, "offset": 0, "size": step.raw.size}},
            {"binding": 1, "resource": {"buffer": self.buffer, "offset": 0, "size": 12 * len(distinct)}},
        ]
        self._group = device.raw.create_bind_group(layout=self._kernel.layout, entries=entries)

    def write(self, compute: Any) -> None:
        """Enqueue the kernel that fills the buffer from the step's header."""
        compute.set_pipeline(self._kernel.pipeline)
        compute.set_bind_group(0, self._group)
        compute.dispatch_workgroups(1, 1, 1)
