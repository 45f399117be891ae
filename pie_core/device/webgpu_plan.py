"""Plans: a fixed list of dispatches, replayed by the browser's function where there is one, else recorded each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pie_core.device.protocol import LANE_ALIGN, DeviceError, Launch, LimitError
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


def bind(device: WebGpuDevice, kernel: WebGpuKernel, buffers: Mapping[str, Buffer], lane_bytes: int = 0) -> Any:
    """A bind group over whole buffers; `lanes` is bound with `lane_bytes` behind its dynamic offset."""
    entries = []
    check_alive((bound_buffer(kernel, name, buffers) for name, _ in kernel.bindings), "bind")
    for index, (name, _) in enumerate(kernel.bindings):
        buffer = bound_buffer(kernel, name, buffers)
        size = lane_bytes if name == "lanes" else buffer.raw.size
        entries.append({"binding": index, "resource": {"buffer": buffer.raw, "offset": 0, "size": size}})
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


class EpiloguePlan:
    """One epilogue kernel, one workgroup a lane; its bind groups differ only in how many lane bytes they show."""

    def __init__(self, device: WebGpuDevice, launch: Launch) -> None:
        self._device = device
        self._kernel = owned_kernel(launch.kernel)
        self._bindings = dict(launch.bindings)
        self._lane_table = bound_buffer(self._kernel, "lanes", launch.bindings)
        self._buffers = [bound_buffer(self._kernel, name, launch.bindings) for name, _ in self._kernel.bindings]
        self._epoch = -1
        self._groups: dict[int, Any] = {}

    def _group(self, lane_offset: int, lanes: int) -> Any:
        lane_bytes = self._kernel.lane_words * 4
        size = lane_bytes * (1 << (lanes - 1).bit_length())  # rounded up to few sizes, where the table has the room
        if lane_offset + size > self._lane_table.raw.size:
            size = lane_bytes * lanes
        if lane_offset + size > self._lane_table.raw.size:
            raise LimitError(
                f"{lanes} lanes of {lane_bytes} bytes at offset {lane_offset} do not fit the lane buffer of {self._lane_table.size} bytes"
            )
        group = self._groups.get(size)
        if group is None:
            group = self._groups[size] = bind(self._device, self._kernel, self._bindings, size)
        return group

    def run(self, *, lane_offset: int = 0, lanes: int = 0) -> None:
        """Enqueue one workgroup for each of `lanes` >= 1 lanes from `lane_offset` bytes, a multiple of 256."""
        if lanes < 1 or lane_offset < 0 or lane_offset % LANE_ALIGN:
            raise DeviceError(
                f"an epilogue plan needs lanes >= 1 and a lane_offset that is a multiple of {LANE_ALIGN} bytes; "
                f"got lanes {lanes}, lane_offset {lane_offset}"
            )
        device = self._device
        device.check()
        if device.epoch != self._epoch:
            check_alive(self._buffers, "run an epilogue")
            self._epoch = device.epoch
        group = self._group(lane_offset, lanes)
        try:
            compute = device.encoder().begin_compute_pass()
            compute.set_pipeline(self._kernel.pipeline)
            compute.set_bind_group(0, group, [lane_offset])
            compute.dispatch_workgroups(lanes, 1, 1)
            compute.end()
        except device.gpu.GPUError as error:
            raise device.failed(error, f"enqueue an epilogue of {lanes} lanes") from error


def make_plan(device: WebGpuDevice, launches: Sequence[Launch]) -> RecordedPlan | EpiloguePlan:
    """The plan of `launches`: an epilogue stands alone, everything else is one recorded list."""
    if not launches:
        raise DeviceError("a plan needs at least one launch")
    if len(launches) == 1 and owned_kernel(launches[0].kernel).grid is None:
        return EpiloguePlan(device, launches[0])
    return RecordedPlan(device, launches)
