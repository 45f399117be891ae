"""Epilogue plans: lanes of one kernel, fused or split, with the scratch that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Any

from pie_core.device.protocol import LANE_ALIGN, DeviceError, Launch, LimitError
from pie_core.device.webgpu_buffer import WebGpuBuffer, check_alive
from pie_core.device.webgpu_kernels import EpilogueForm, owned_kernel
from pie_core.device.webgpu_plan import bound_buffer

if TYPE_CHECKING:
    from pie_core.device.webgpu import WebGpuDevice

SPLIT_LANES = 4  # most lanes that run split: more workgroups fill a GPU by themselves, and split launches wait for each other


class EpilogueScratch:
    """The scratch buffer of a device, for one epilogue at a time (launches on a queue wait for what they read), and the staged lanes."""

    def __init__(self, device: WebGpuDevice, limit: int) -> None:
        self._device = device
        self.limit = limit
        self.buffer: WebGpuBuffer | None = None
        self._staging: WebGpuBuffer | None = None

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(b.size for b in (self.buffer, self._staging) if b is not None)

    def hold(self, size: int) -> WebGpuBuffer:
        """The buffer, grown to at least `size` bytes or to the limit."""
        if self.buffer is None or self.buffer.size < min(size, self.limit):
            self.buffer = self._grown(self.buffer, size, "epilogue scratch")
        return self.buffer

    def staging(self, size: int) -> WebGpuBuffer:
        """A lane table of its own for lanes that no aligned offset reaches."""
        if self._staging is None or self._staging.size < size:
            self._staging = self._grown(self._staging, size, "epilogue lanes")
        return self._staging

    def _grown(self, old: WebGpuBuffer | None, size: int, label: str) -> WebGpuBuffer:
        if old is not None:
            old.destroy()  # submits what uses it; a second buffer beside it might not fit
        return self._device.create_buffer(min(max(1 << (size - 1).bit_length(), LANE_ALIGN), self.limit), label)

    def close(self) -> None:
        """Free the buffers."""
        for buffer in (self.buffer, self._staging):
            if buffer is not None:
                buffer.destroy()
        self.buffer = self._staging = None


class EpiloguePlan:
    """One epilogue kernel; its bind groups differ only in the form, the lane table and how many lane bytes they show."""

    def __init__(self, device: WebGpuDevice, launch: Launch) -> None:
        self._device = device
        self._kernel = owned_kernel(launch.kernel)
        self._lane_bytes = self._kernel.lane_words * 4
        self._bound = {n: bound_buffer(self._kernel, n, launch.bindings) for n in self._kernel.buffers}
        self._lane_table = self._bound["lanes"]
        self._epoch = -1
        self._scratch: WebGpuBuffer | None = None  # that the groups were made with
        self._groups: dict[tuple[int, int], Any] = {}

    def run(self, *, lane_offset: int = 0, lanes: int = 0, gated: bool = False) -> None:
        """Enqueue `lanes` >= 1 lanes from `lane_offset` bytes, a multiple of 256. Lanes whose scratch does not fit at once follow in
        further dispatches. `gated` changes nothing: a lane whose gate is shut returns by itself."""
        if lanes < 1 or lane_offset < 0 or lane_offset % LANE_ALIGN:
            raise DeviceError(
                f"an epilogue plan needs lanes >= 1 and a lane_offset that is a multiple of {LANE_ALIGN} bytes; "
                f"got lanes {lanes}, lane_offset {lane_offset}"
            )
        if lane_offset + lanes * self._lane_bytes > self._lane_table.raw.size:
            raise LimitError(
                f"{lanes} lanes of {self._lane_bytes} bytes at offset {lane_offset} do not fit the lane buffer of "
                f"{self._lane_table.size} bytes"
            )
        device = self._device
        device.check()
        if device.epoch != self._epoch:
            check_alive(self._bound.values(), "run an epilogue")
            self._epoch = device.epoch
        form = self._kernel.form(split=lanes <= SPLIT_LANES)
        fit = lanes
        if form.scratch_bytes:
            scratch = device.epilogue_scratch.hold(form.scratch_bytes * lanes)
            if scratch is not self._scratch:
                self._groups.clear()
                self._scratch = scratch
            fit = min(lanes, scratch.size // form.scratch_bytes)
        try:
            for first, count in self._parts(lanes, fit):
                self._dispatch(form, lane_offset + first * self._lane_bytes, count)
        except device.gpu.GPUError as error:
            raise device.failed(error, f"enqueue an epilogue of {lanes} lanes") from error

    def _parts(self, lanes: int, fit: int) -> Iterator[tuple[int, int]]:
        """(first lane, lanes) of each dispatch; where a multiple of lanes ends on an aligned offset, each but the last does."""
        step = LANE_ALIGN // gcd(LANE_ALIGN, self._lane_bytes)
        if fit < lanes:
            fit -= fit % step if fit >= step else 0
        for first in range(0, lanes, fit):
            yield first, min(fit, lanes - first)

    def _dispatch(self, form: EpilogueForm, offset: int, lanes: int) -> None:
        device, table = self._device, self._lane_table
        size = self._lane_bytes * (1 << (lanes - 1).bit_length())  # rounded up to few sizes, where the table has the room
        if offset % LANE_ALIGN:
            table = device.epilogue_scratch.staging(size)
            device.encoder().copy_buffer_to_buffer(self._lane_table.raw, offset, table.raw, 0, self._lane_bytes * lanes)
            offset = 0
        if offset + size > table.raw.size:
            size = self._lane_bytes * lanes
        group = self._group(form, table, size)
        compute = device.begin_pass()
        compute.set_bind_group(0, group, [offset])
        for pipeline, grid in form.steps:
            compute.set_pipeline(pipeline)
            compute.dispatch_workgroups(*[n or lanes for n in grid])
        compute.end()

    def _group(self, form: EpilogueForm, table: WebGpuBuffer, size: int) -> Any:
        key = (id(form), size)
        group = self._groups.get(key) if table is self._lane_table else None  # a staged table may be another buffer each time
        if group is not None:
            return group
        entries = []
        for index, (name, _) in enumerate(form.bindings):
            buffer = table if name == "lanes" else self._scratch if name == "scratch" else self._bound[name]
            assert buffer is not None
            part = {"buffer": buffer.raw, "offset": 0, "size": size if name == "lanes" else buffer.raw.size}
            entries.append({"binding": index, "resource": part})
        group = self._device.raw.create_bind_group(layout=form.layout, entries=entries)
        if table is self._lane_table:
            self._groups[key] = group
        return group
