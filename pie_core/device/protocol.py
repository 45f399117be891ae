"""The device protocol: what the engine asks of a machine that runs kernels (docs/architecture.md, section 4)."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pie_core.eta.program import Program

ParamValue = int | float | str | bool
NONE = 0xFFFFFFFF  # an unused offset in step and lane tables
PAGE_TOKENS = 16  # tokens in one KV page
LANE_ALIGN = 256  # bytes; WebGPU's minimum alignment of a dynamic storage offset


class DeviceError(Exception):
    """A device refused or failed a request; the message names what, with numbers."""


class DeviceLost(DeviceError):
    """The device is gone; every buffer and kernel on it is invalid."""


class DeviceOutOfMemory(DeviceError):
    """An allocation did not fit."""


class KernelError(DeviceError):
    """A kernel spec is unknown, malformed or did not compile."""


class LimitError(DeviceError):
    """A size is over one of the device's limits."""


@dataclass(frozen=True)
class DeviceInfo:
    """What really runs. `software` is true for a rasteriser on the CPU (lavapipe, SwiftShader)."""

    kind: Literal["cpu", "webgpu"]
    name: str
    description: str
    software: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)


class Buffer(Protocol):
    """`size` bytes on the device, zeroed at creation."""

    @property
    def size(self) -> int: ...
    @property
    def label(self) -> str: ...
    def destroy(self) -> None: ...


@dataclass(frozen=True)
class TemplateSpec:
    """A kernel of `device/templates.py` with its parameters as sorted (name, value) pairs; use `template(...)`."""

    name: str
    params: tuple[tuple[str, ParamValue], ...] = ()

    def param(self, name: str) -> ParamValue:
        """The value of parameter `name`; KeyError when the spec has none."""
        return dict(self.params)[name]


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue Program over read-out rows. Bindings: logits [R, vocab] f32, hidden [R, d] f32 (each only if the
    program reads it), arena u32 (rw), lanes u32 (dynamic offset), results u32 (rw)."""

    program: Program


@dataclass(frozen=True)
class MapSpec:
    """A `map` Program applied to every row: element i of row t of input k is `in{k}[t*stride_k + offset_k + i]`, i < n,
    all f32; the result goes to `out[t*n + i]`. Rows come from the step buffer (`rows`: "tokens" or "reads")."""

    program: Program
    n: int
    inputs: tuple[tuple[int, int], ...]  # (stride, offset) in elements, one pair an input
    rows: Literal["tokens", "reads"]
    bucket: int  # most rows of one launch


KernelSpec = TemplateSpec | EpilogueSpec | MapSpec


class HostBytes(Protocol):
    """Bytes that the host keeps outside Python (in the page a JavaScript array). Only `write` of a device that runs there looks inside."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> HostBytes: ...
    def __bytes__(self) -> bytes: ...


Data = bytes | bytearray | memoryview | HostBytes


def flat(data: Data) -> memoryview | HostBytes:
    """`data` so that `len` and slices count bytes."""
    return memoryview(data).cast("B") if isinstance(data, bytes | bytearray | memoryview) else data


class Kernel(Protocol):
    """A compiled spec. `work`: of an epilogue, the nanoseconds that one lane takes at most, about; `first_work`: those that its first run
    takes besides, where a driver compiles only then; 0 of others. `size`: what keeping an epilogue costs, in ops or lines of code."""

    @property
    def spec(self) -> KernelSpec: ...
    @property
    def work(self) -> int: ...
    @property
    def first_work(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Launch:
    """One kernel over its buffers, by the binding names of its spec."""

    kernel: Kernel
    bindings: Mapping[str, Buffer]


class Plan(Protocol):
    """A fixed list of launches."""

    def run(self, *, lane_offset: int = 0, lanes: int = 0, gated: bool = False) -> None:
        """Enqueue once. An epilogue plan needs `lanes` >= 1 and `lane_offset` in bytes (multiple of 256). `gated`: a gate may have
        emptied the step by the time the plan runs; then its kernels are skipped."""
        ...


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, cols] (or vector, rows = 1) in device layout. `fmt` is the checkpoint's format: f32 f16 q4_1 q8_0.
    `quants` holds the values; `scales` the per-block numbers of quantised formats."""

    fmt: str
    rows: int
    cols: int
    quants: Buffer
    scales: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.quants.size + (self.scales.size if self.scales else 0)


Times = tuple[float, float]  # device seconds of a whole step and of its epilogues


class StepTimer(Protocol):
    """Measures steps on the device, one being enqueued at a time, several in flight: `start`, then body and head, `epilogues`, then
    those, then `read`. A `start` forgets a step that was not read."""

    def start(self) -> None:
        """What is enqueued from here on belongs to a step."""
        ...

    def epilogues(self) -> None:
        """What is enqueued from here on are the step's epilogues."""
        ...

    def read(self, buffer: Buffer, offset: int, size: int) -> Awaitable[tuple[bytes, Times | None]]:
        """`Device.read`, with the times of the step that ends here, or None where the device's numbers cannot be right."""
        ...


class Device(Protocol):
    """An ordered queue: write, copy and Plan.run take effect in call order; read sees everything enqueued before it."""

    @property
    def info(self) -> DeviceInfo: ...
    @property
    def token_buckets(self) -> Sequence[int]:
        """Ascending row counts for which plans are built; the last is the most tokens of one step."""
        ...

    def create_buffer(self, size: int, label: str = "") -> Buffer: ...
    def write(self, buffer: Buffer, offset: int, data: Data) -> None: ...
    def copy(self, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, size: int) -> None: ...
    def read(self, buffer: Buffer, offset: int, size: int) -> Awaitable[bytes]:
        """Enqueued AT THE CALL (not when awaited), so that work enqueued later never delays or changes what is read."""
        ...

    def compile(self, spec: KernelSpec) -> Kernel: ...
    def compile_plan(self, launches: Sequence[Launch]) -> Plan: ...
    def upload(self, fmt: str, rows: int, cols: int, chunks: Iterable[memoryview | HostBytes], label: str = "") -> Weight:
        """Stream raw checkpoint blocks (row-major, whole rows, any chunking at row boundaries) into device layout."""
        ...

    def step_timer(self) -> StepTimer | None:
        """A timer of steps, None where the device cannot tell or was opened without timing. A step pays for it only where it is used."""
        ...

    def close(self) -> None: ...
