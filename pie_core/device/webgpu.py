"""The webgpu device: the Device protocol on an injected module and device with wgpu-py's names (native, or the browser's shim).

Commands are recorded into one open encoder and submitted by `read`, by a `write` that must come after them, or when the event
loop turns: a step is one submission. (A software adapter blocks a submission until the one before it has finished.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from pie_core.device.protocol import (
    Buffer,
    Data,
    DeviceError,
    DeviceInfo,
    DeviceLost,
    HostBytes,
    KernelSpec,
    Launch,
    LimitError,
    StepTimer,
    TemplateSpec,
    Weight,
    flat,
)
from pie_core.device.webgpu_buffer import WebGpuBuffer, check_range
from pie_core.device.webgpu_epilogue import EpiloguePlan, EpilogueScratch
from pie_core.device.webgpu_errors import says_lost, translate
from pie_core.device.webgpu_kernels import KernelCache, WebGpuKernel, owned_kernel
from pie_core.device.webgpu_plan import RecordedPlan
from pie_core.device.webgpu_read import ReadPool
from pie_core.device.webgpu_timing import QueryTimer
from pie_core.device.webgpu_upload import Uploader

SIZE_LIMITS = ("max-storage-buffer-binding-size", "max-buffer-size")
SCRATCH_BYTES = 128 << 20  # most scratch of epilogues: what every WebGPU device binds, and more than one lane can need
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class WebGpuDevice:
    """`gpu` offers GPUError, BufferUsage, ShaderStage and MapMode; `raw` is its device. `map_read` is what map_async takes to
    read; `drain` blocks until the queue is empty, where the host has such a call; `indirect`: an indirect dispatch costs no more than
    a direct one (a host that checks each makes it dearer than a kernel that finds no rows); `timestamp_period`: nanoseconds of one tick
    of a timestamp query, where `raw` has the feature."""

    def __init__(
        self,
        gpu: Any,
        raw: Any,
        info: DeviceInfo,
        *,
        map_read: Any = None,
        drain: Callable[[], None] | None = None,
        indirect: bool = False,
        timestamp_period: float | None = None,
    ) -> None:
        self.gpu = gpu
        self.raw = raw
        self.indirect = indirect
        self.timing: QueryTimer | None = None  # of the step that is being enqueued
        self._timestamp_period = timestamp_period
        self.map_read = gpu.MapMode.READ if map_read is None else map_read
        most = min(info.limits.get(name, SCRATCH_BYTES) for name in SIZE_LIMITS)
        most = min(most, SCRATCH_BYTES) // 16 * 16  # buffers are rounded up to 16 bytes
        self.kernels = KernelCache(gpu, raw, "software" if info.software else "gpu", most)
        self.epilogue_scratch = EpilogueScratch(self, most)
        self.epoch = 0  # counts destroyed buffers; a plan checks its own when this moved
        self._info = info
        self._queue = raw.queue
        self._drain = drain
        self._encoder: Any = None
        self._reads = ReadPool(self)
        self._uploads = Uploader(self)
        self._scratch: WebGpuBuffer | None = None
        self._lost: str | None = None
        self._deferred: DeviceError | None = None

    @property
    def info(self) -> DeviceInfo:
        """What really runs."""
        return self._info

    @property
    def token_buckets(self) -> Sequence[int]:
        """Ascending row counts for which plans are built."""
        return TOKEN_BUCKETS

    # Errors

    def mark_lost(self, reason: str) -> None:
        """Record that the device is gone; every later call raises DeviceLost with this reason."""
        self._lost = self._lost or reason
        self._encoder = None

    def check(self) -> None:
        """Raise DeviceLost when the device is gone, and once the error of a submission that nobody could await."""
        if self._lost is not None:
            raise DeviceLost(f"the WebGPU device is gone: {self._lost}")
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error

    def failed(self, error: BaseException, doing: str) -> DeviceError:
        """The typed error of a failed call; drops the open encoder, which may be invalid now."""
        self._encoder = None
        if says_lost(error):
            self.mark_lost("lost by the driver or destroyed")
        elif self._lost is not None:
            return DeviceLost(f"the WebGPU device is gone: {self._lost}")
        return translate(error, doing)

    # Buffers

    def allocate(self, size: int, usage: int, label: str) -> Any:
        """A raw buffer. Raises DeviceOutOfMemory or DeviceLost."""
        self.check()
        try:
            return self.raw.create_buffer(label=label, size=size, usage=usage)
        except self.gpu.GPUError as error:
            raise self.failed(error, f"create buffer {label!r} of {size} bytes") from error

    def create_buffer(self, size: int, label: str = "") -> WebGpuBuffer:
        """A zeroed storage buffer. Raises LimitError over the adapter's binding or buffer size."""
        if size < 1:
            raise DeviceError(f"buffer {label!r} of {size} bytes: the size must be at least 1")
        rounded = size + -size % 16
        for limit in SIZE_LIMITS:
            most = self._info.limits.get(limit)
            if most is not None and rounded > most:
                raise LimitError(f"buffer {label!r} needs {size} bytes, over the {limit} of {most} bytes of {self._info.name}")
        usage = self.gpu.BufferUsage
        return WebGpuBuffer(self.allocate(rounded, usage.STORAGE | usage.COPY_SRC | usage.COPY_DST, label), size, label, self._released)

    def _released(self) -> None:
        """A buffer is about to be destroyed: submit what may name it, and have plans check theirs again."""
        self.epoch += 1
        if self._lost is None:
            self.flush()

    def write(self, buffer: Buffer, offset: int, data: Data) -> None:
        """Enqueue a write of `data`, a multiple of 4 bytes, at byte `offset`."""
        target, view = self._own(buffer), flat(data)
        check_range(target, offset, len(view), "write")
        if not len(view):
            return
        self.flush()
        try:
            self._queue.write_buffer(target.raw, offset, view)
        except self.gpu.GPUError as error:
            raise self.failed(error, f"write {len(view)} bytes to buffer {target.label!r}") from error

    def copy(self, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, size: int) -> None:
        """Enqueue a copy of `size` bytes between two different buffers."""
        source, target = self._own(src), self._own(dst)
        check_range(source, src_offset, size, "copy from")
        check_range(target, dst_offset, size, "copy to")
        if not size:
            return
        self.check()
        if source is target:
            self._copy_within(source, src_offset, dst_offset, size)
            return
        try:
            self.encoder().copy_buffer_to_buffer(source.raw, src_offset, target.raw, dst_offset, size)
        except self.gpu.GPUError as error:
            raise self.failed(error, f"copy {size} bytes from {source.label!r} to {target.label!r}") from error

    def _copy_within(self, buffer: WebGpuBuffer, src_offset: int, dst_offset: int, size: int) -> None:
        """WebGPU refuses a copy inside one buffer (a KV page to another page): it goes through a scratch buffer."""
        if self._scratch is None or self._scratch.size < size:
            if self._scratch is not None:
                self._scratch.destroy()
            self._scratch = self.create_buffer(1 << (size - 1).bit_length(), "copy scratch")
        scratch = self._scratch.raw
        try:
            encoder = self.encoder()
            encoder.copy_buffer_to_buffer(buffer.raw, src_offset, scratch, 0, size)
            encoder.copy_buffer_to_buffer(scratch, 0, buffer.raw, dst_offset, size)
        except self.gpu.GPUError as error:
            raise self.failed(error, f"copy {size} bytes inside {buffer.label!r}") from error

    def read(self, buffer: Buffer, offset: int, size: int, *, tail: tuple[Any, int, int] | None = None) -> Coroutine[Any, Any, bytes]:
        """The bytes as they are now: the copy is enqueued by the call, not by the await. Several reads may be in flight. `tail`: a raw
        buffer, offset and size of bytes to add behind them."""
        self.check()
        return self._reads.read(self._own(buffer), offset, size, tail)

    def step_timer(self) -> StepTimer | None:
        """A timer of steps, where the device was opened with timestamp queries. Raises DeviceError."""
        return None if self._timestamp_period is None else QueryTimer(self, self._timestamp_period)

    # Kernels

    def compile(self, spec: KernelSpec) -> WebGpuKernel:
        """The kernel of `spec`, cached. Raises KernelError."""
        self.check()
        return self.kernels.get(spec)

    def prepare(self, spec: TemplateSpec) -> Awaitable[None]:
        """Begin to compile a template beside the queue: what is enqueued meanwhile does not wait for it. The call enqueues; awaiting it
        raises KernelError. `compile` finds the kernel from then on."""
        self.check()
        return self.kernels.prepare(spec)

    def compile_plan(self, launches: Sequence[Launch]) -> RecordedPlan | EpiloguePlan:
        """A plan over fixed buffers; an epilogue launch is a plan of its own."""
        self.check()
        if not launches:
            raise DeviceError("a plan needs at least one launch")
        if len(launches) == 1 and owned_kernel(launches[0].kernel).grid is None:
            return EpiloguePlan(self, launches[0])
        return RecordedPlan(self, launches)

    def dispatch(self, kernel: WebGpuKernel, group: Any) -> None:
        """Enqueue one kernel with a fixed grid, outside any plan."""
        self.check()
        try:
            compute = self.begin_pass()
            compute.set_pipeline(kernel.pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*(kernel.grid or (1, 1, 1)))
            compute.end()
        except self.gpu.GPUError as error:
            raise self.failed(error, "enqueue a kernel") from error

    def upload(self, fmt: str, rows: int, cols: int, chunks: Iterable[memoryview | HostBytes], label: str = "") -> Weight:
        """Stream raw checkpoint blocks (whole rows a chunk) into device layout, at most 8 MiB staged at a time."""
        self.check()
        return self._uploads.upload(fmt, rows, cols, chunks, label)

    # The open encoder

    def encoder(self) -> Any:
        """The open command encoder; submitted by `flush`, at the latest when the event loop turns."""
        if self._encoder is None:
            self._encoder = self.raw.create_command_encoder()
            with suppress(RuntimeError):  # no running loop: the next read or write submits
                asyncio.get_running_loop().call_soon(self._flush_soon)
        return self._encoder

    def begin_pass(self) -> Any:
        """A compute pass in the open encoder; it notes its times while a step is timed."""
        if self.timing is None:
            return self.encoder().begin_compute_pass()
        return self.encoder().begin_compute_pass(timestamp_writes=self.timing.writes())

    def flush(self) -> None:
        """Submit what is recorded. Raises DeviceError, DeviceLost."""
        self.check()
        encoder, self._encoder = self._encoder, None
        if encoder is None:
            return
        try:
            self._queue.submit([encoder.finish()])
        except self.gpu.GPUError as error:
            raise self.failed(error, "submit commands") from error

    def _flush_soon(self) -> None:
        try:
            self.flush()
        except DeviceError as error:  # nobody awaits this call: the next one raises it
            self._deferred = error

    def drain(self) -> None:
        """Submit, then wait for the queue where the host can block."""
        self.flush()
        if self._drain is not None:
            self._drain()

    def close(self) -> None:
        """Free the device; later calls raise DeviceLost."""
        if self._lost is not None:
            return
        self._reads.close()
        self._uploads.close()
        self.epilogue_scratch.close()
        self.mark_lost("it was closed")
        self.raw.destroy()

    def _own(self, buffer: Buffer) -> WebGpuBuffer:
        if not isinstance(buffer, WebGpuBuffer):
            raise DeviceError(f"{buffer!r} is not a buffer of this WebGPU device")
        return buffer
