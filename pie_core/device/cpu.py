"""The cpu device: the Device protocol over a WebAssembly SIMD module that the host runs (kernels_wasm/, cpu_module.py)."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Iterable, Sequence

from pie_core.device.cpu_kernels import FORMATS
from pie_core.device.cpu_memory import Allocator
from pie_core.device.cpu_module import CpuModule
from pie_core.device.cpu_plan import CpuKernel, CpuPlan, compile_spec
from pie_core.device.cpu_upload import upload_weight
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
    Weight,
)
from pie_core.device.step_timer import Clock, ClockTimer

MEMORY_LIMIT = (1 << 32) - (1 << 16)  # bytes; the address space of wasm32 less the last page
# One plan serves every row count (kernels read it from the step buffer), so a bucket costs nothing but activation buffers. Products
# gain nothing beyond 32 rows; 128 keeps the calls of a long prefill few and the pause of running decodes under a second.
TOKEN_BUCKETS = (128,)
_GROW_BYTES = 1 << 24  # linear memory grows in these steps
_TAIL_BYTES = 64  # behind the last buffer, for vector loads that reach over its end


class CpuBuffer:
    """A range of linear memory."""

    def __init__(self, device: CpuDevice, address: int, size: int, label: str) -> None:
        self._device, self._address, self._size, self._label = device, address, size, label
        self._plans: weakref.WeakSet[CpuPlan] = weakref.WeakSet()
        self.destroyed = False

    @property
    def size(self) -> int:
        """Bytes asked for."""
        return self._size

    @property
    def label(self) -> str:
        """The name given at creation."""
        return self._label

    @property
    def address(self) -> int:
        """Byte address in linear memory. Raises DeviceError once destroyed."""
        if self.destroyed:
            raise DeviceError(f"buffer {self._label!r} was destroyed and is used again")
        return self._address

    def bind(self, plan: CpuPlan) -> None:
        """Remember a plan that must not run once this buffer is gone."""
        self._plans.add(plan)

    def destroy(self) -> None:
        """Give the bytes back; work enqueued before still sees them. Further calls do nothing."""
        if self.destroyed:
            return
        self.destroyed = True
        for plan in self._plans:
            plan.dead = f"a plan was run after its buffer {self._label!r} was destroyed"
        self._device.release(self._address)

    def __repr__(self) -> str:
        return f"CpuBuffer({self._label!r}, {self._size} bytes{', destroyed' if self.destroyed else ''})"


class CpuDevice:
    """`module` runs the kernels; `memory_limit` bounds linear memory in bytes. The device owns the module and closes it."""

    def __init__(self, module: CpuModule, memory_limit: int = MEMORY_LIMIT) -> None:
        if not module.heap_base < memory_limit <= MEMORY_LIMIT:
            raise LimitError(f"memory_limit is {memory_limit} bytes; it must be above {module.heap_base} and at most {MEMORY_LIMIT}")
        self._module = module
        self._memory = Allocator(module.heap_base, memory_limit - _TAIL_BYTES)
        self._grown = 0  # linear memory reaches here
        self._kernels: weakref.WeakValueDictionary[KernelSpec, CpuKernel] = weakref.WeakValueDictionary()
        self._scratch: CpuBuffer | None = None
        self._closed = False
        self._info = DeviceInfo(
            kind="cpu",
            name="cpu",
            description=f"{module.description}, int16 activations",
            limits={"memory_bytes": memory_limit, "max_buffer_bytes": memory_limit - module.heap_base, "max_tokens": TOKEN_BUCKETS[-1]},
        )

    @property
    def info(self) -> DeviceInfo:
        """What runs, and `limits`: memory_bytes, max_buffer_bytes, max_tokens."""
        return self._info

    @property
    def token_buckets(self) -> Sequence[int]:
        """One bucket: kernels read the true row count from the step buffer."""
        return TOKEN_BUCKETS

    @property
    def used_bytes(self) -> int:
        """Bytes of linear memory handed out to buffers."""
        return self._memory.used

    # Buffers

    def create_buffer(self, size: int, label: str = "") -> CpuBuffer:
        """`size` zeroed bytes, aligned to 64. Raises LimitError (size < 1), DeviceOutOfMemory, DeviceLost."""
        self._check_open()
        fresh = self._memory.end
        address = self._memory.allocate(size, label)
        if address < fresh:  # bytes below were used before; above, memory is still as it was created
            self._module.call("mem_zero", address, min(size, fresh - address))
        needed = self._memory.end + _TAIL_BYTES
        if needed > self._grown:
            self._grown = min(-(-needed // _GROW_BYTES) * _GROW_BYTES, self._memory.limit + _TAIL_BYTES)
            self._module.grow(self._grown)
        return CpuBuffer(self, address, size, label)

    def release(self, address: int) -> None:
        """Free a buffer's range (called by the buffer)."""
        self._memory.free(address)

    def write(self, buffer: Buffer, offset: int, data: Data) -> None:
        """Copy `data` to `offset`. Raises LimitError when it leaves the buffer."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        address = self._range("write", buffer, offset, size)
        if size:
            self._module.write(address, data)

    def copy(self, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, size: int) -> None:
        """Copy within the device; ranges may overlap."""
        source, target = self._range("copy from", src, src_offset, size), self._range("copy to", dst, dst_offset, size)
        if size:
            self._module.call("mem_copy", target, source, size)

    def read(self, buffer: Buffer, offset: int, size: int) -> Awaitable[bytes]:
        """Bytes as of everything enqueued before this call; the awaitable belongs to the running event loop.

        Awaiting raises DeviceError when enqueued work failed.
        """
        return self._module.read(self._range("read", buffer, offset, size), size)

    def _range(self, what: str, buffer: Buffer, offset: int, size: int) -> int:
        self._check_open()
        if offset < 0 or size < 0 or offset + size > buffer.size:
            raise LimitError(f"{what} of {size} bytes at {offset} leaves buffer {buffer.label!r} of {buffer.size} bytes")
        return self.address_of(buffer) + offset

    def address_of(self, buffer: Buffer) -> int:
        """Address of one of this device's buffers. Raises DeviceError for others and for destroyed ones."""
        if not isinstance(buffer, CpuBuffer) or buffer._device is not self:
            raise DeviceError(f"buffer {buffer.label!r} belongs to another device")
        return buffer.address

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceLost("the cpu device is closed")

    # Kernels

    def compile(self, spec: KernelSpec) -> CpuKernel:
        """The checked kernel; one per spec for as long as somebody holds it. Raises KernelError."""
        self._check_open()
        kernel = self._kernels.get(spec)
        if kernel is None:
            self._kernels[spec] = kernel = compile_spec(self, spec)
        return kernel

    def compile_plan(self, launches: Sequence[Launch]) -> CpuPlan:
        """Records of the launches. Raises KernelError for wrong binding names and LimitError for a buffer that is too small."""
        self._check_open()
        plan = CpuPlan(self, launches, self.address_of)
        for buffer in {id(b): b for launch in launches for b in launch.bindings.values()}.values():
            assert isinstance(buffer, CpuBuffer)  # address_of refused others
            buffer.bind(plan)
        return plan

    def reserve_scratch(self, size: int) -> None:
        """Have at least `size` bytes for kernels' intermediate values; runs share them, since they follow each other.

        Raises DeviceOutOfMemory; what was reserved before stays.
        """
        before = self._scratch.size if self._scratch else 0
        if size <= before:
            return
        if self._scratch is not None:
            self._scratch.destroy()  # first, so that the larger one may take its place
            self._scratch = None
        try:
            self._scratch = self.create_buffer(size, "scratch")
        except DeviceError:
            if before:  # the plans made so far still run
                self._scratch = self.create_buffer(before, "scratch")
            raise

    def run_records(self, records: int, count: int, lane_offset: int, lanes: int, gated: bool = False) -> None:
        """Enqueue one call over `count` records (called by plans)."""
        self._check_open()
        scratch = self._scratch.address if self._scratch else 0
        self._module.call("run_plan", records, count, scratch, lane_offset, lanes, int(gated))

    # Weights

    def upload(self, fmt: str, rows: int, cols: int, chunks: Iterable[memoryview | HostBytes], label: str = "") -> Weight:
        """Repack checkpoint rows into device layout, in pieces of about 1 MiB. A chunk may be reused once the next is asked for.

        Raises KernelError (format, columns), LimitError (sizes of chunks), DeviceOutOfMemory; nothing stays allocated then.
        """
        self._check_open()
        return upload_weight(self, fmt, rows, cols, chunks, label=label)

    def repack(self, weight: Weight, staging: CpuBuffer, first: int, count: int) -> None:
        """Enqueue the repacking of `count` raw rows in `staging` into rows `first` .. of a q4_1 or q8_0 weight."""
        assert weight.scales is not None  # only those formats are repacked
        quants, scales = self.address_of(weight.quants), self.address_of(weight.scales)
        self._module.call("repack", FORMATS[weight.fmt], staging.address, first, count, weight.cols, quants, scales)

    def step_timer(self) -> StepTimer | None:
        """A timer by the clock of the module's thread, where the host has one."""
        clock: Clock | None = getattr(self._module, "thread_time", None)
        return None if clock is None else ClockTimer(self, clock)

    def close(self) -> None:
        """Finish what is enqueued, stop the module and join its thread. Every later call raises DeviceLost."""
        if not self._closed:
            self._closed = True
            self._module.close()

    def __repr__(self) -> str:
        return f"CpuDevice({self._info.description}, {self.used_bytes} bytes used)"
