"""Plans of the cpu device: launches become records in linear memory, a run is one call of the module."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pie_core.codegen import emit_epilogue_cpu, emit_map_cpu, lane_layout
from pie_core.device.cpu_kernels import (
    OP_EPILOGUE,
    OP_MAP,
    RECORD_WORDS,
    Bindings,
    Record,
    RecordOf,
    binding_names,
    compile_template,
    record,
)
from pie_core.device.protocol import (
    LANE_ALIGN,
    Buffer,
    DeviceError,
    EpilogueSpec,
    Kernel,
    KernelError,
    KernelSpec,
    Launch,
    LimitError,
    MapSpec,
    TemplateSpec,
)
from pie_core.eta.errors import ProgramError

if TYPE_CHECKING:
    from pie_core.device.cpu import CpuBuffer, CpuDevice

_ROWS = {"tokens": 0, "reads": 1}
TABLE_WORD = 6  # the map record's word that holds the address of its table of inputs


class CpuKernel:
    """A checked spec. `build` makes the record of one launch; `constants` are buffers it owns (a VM program)."""

    def __init__(
        self, spec: KernelSpec, names: tuple[str, ...], build: RecordOf, constants: Sequence[CpuBuffer] = (), work: int = 0
    ) -> None:
        self._spec, self.names, self.build, self.constants, self.work = spec, names, build, tuple(constants), work
        for constant in constants:
            weakref.finalize(self, constant.destroy)

    first_work = 0

    @property
    def size(self) -> int:
        """Ops of its program."""
        return 1 if isinstance(self._spec, TemplateSpec) else len(self._spec.program.ops)

    @property
    def spec(self) -> KernelSpec:
        """What was compiled."""
        return self._spec

    def __repr__(self) -> str:
        return f"CpuKernel({describe(self._spec)})"


def describe(spec: KernelSpec) -> str:
    """A short name for messages."""
    match spec:
        case TemplateSpec():
            return f"template {spec.name}"
        case EpilogueSpec():
            return f"epilogue {spec.program.hash[:12]}"
        case MapSpec():
            return f"map {spec.program.hash[:12]}"


def compile_spec(device: CpuDevice, spec: KernelSpec) -> CpuKernel:
    """The kernel of any spec. Raises KernelError when the spec is malformed."""
    try:
        match spec:
            case TemplateSpec():
                return CpuKernel(spec, *_template(spec))
            case EpilogueSpec():
                return _epilogue(device, spec)
            case MapSpec():
                return _map(device, spec)
    except ProgramError as error:
        raise KernelError(f"{describe(spec)}: {error}") from error
    raise KernelError(f"a kernel spec is a TemplateSpec, EpilogueSpec or MapSpec, not {type(spec).__name__}")


def _template(spec: TemplateSpec) -> tuple[tuple[str, ...], RecordOf]:
    build = compile_template(spec)
    return binding_names(spec), build


def _constant(device: CpuDevice, words: Sequence[int], label: str) -> CpuBuffer:
    buffer = device.create_buffer(4 * len(words), label)
    device.write(buffer, 0, struct.pack(f"<{len(words)}I", *words))
    return buffer


def _epilogue(device: CpuDevice, spec: EpilogueSpec) -> CpuKernel:
    program = spec.program
    if program.stage != "epilogue":
        raise KernelError(f"{describe(spec)}: the program's stage is {program.stage!r}; an EpilogueSpec takes an epilogue program")
    code = emit_epilogue_cpu(program)
    constant = _constant(device, code.words, describe(spec))
    widths = {name: program.width(name) for name in ("logits", "hidden")}
    read = tuple(name for name, width in widths.items() if width)
    names = (*read, "arena", "lanes", "results")
    address = constant.address
    scratch = code.scratch_bytes

    def build(b: Bindings) -> Record:
        rows = [b.address(name, 4 * (widths[name] or 0)) if name in read else 0 for name in ("logits", "hidden")]
        words = [OP_EPILOGUE, 0, 0, 0, 0, address, *rows, b.address("arena"), b.address("lanes"), b.address("results")]
        return Record((*words, *[0] * (RECORD_WORDS - len(words))), scratch)

    return CpuKernel(spec, names, build, [constant], code.work)


def _map(device: CpuDevice, spec: MapSpec) -> CpuKernel:
    if spec.program.stage != "map":
        raise KernelError(f"{describe(spec)}: the program's stage is {spec.program.stage!r}; a MapSpec takes a map program")
    if spec.n < 1 or spec.bucket < 1 or spec.rows not in _ROWS:
        raise KernelError(f"{describe(spec)}: n={spec.n}, bucket={spec.bucket}, rows={spec.rows!r}: sizes >= 1, rows tokens or reads")
    for k, (stride, offset) in enumerate(spec.inputs):
        if offset < 0 or stride < offset + spec.n:
            raise KernelError(f"{describe(spec)}: input {k}: {spec.n} elements at offset {offset} leave its rows of {stride}")
    code = emit_map_cpu(spec.program, spec.n, spec.inputs, spec.rows, spec.bucket)
    code_words = _constant(device, code.words, describe(spec))
    inputs = tuple(f"in{k}" for k in range(len(spec.inputs)))
    scratch = code.scratch_bytes

    def build(b: Bindings) -> Record:
        reach = [stride * (spec.bucket - 1) + offset + spec.n for stride, offset in spec.inputs]
        addresses = tuple(b.address(name, 4 * elements) for name, elements in zip(inputs, reach, strict=True))
        out = b.address("out", 4 * spec.n * spec.bucket)
        base = record(OP_MAP, b, _ROWS[spec.rows], spec.bucket, [code_words.address, 0, out])
        return Record(base.words, scratch, addresses)

    return CpuKernel(spec, ("step", *inputs, "out"), build, [code_words])


class CpuPlan:
    """Records in linear memory. Dead, with a reason, once a buffer that it binds is destroyed."""

    def __init__(self, device: CpuDevice, launches: Sequence[Launch], address_of: Callable[[Buffer], int]) -> None:
        self._device = device
        self.dead: str | None = None
        self._kernels = [_own_kernel(launch.kernel) for launch in launches]  # keeps their constants alive
        records = [
            kernel.build(Bindings(describe(kernel.spec), kernel.names, launch.bindings, address_of))
            for kernel, launch in zip(self._kernels, launches, strict=True)
        ]
        self._lanes = [
            (lane_layout(kernel.spec.program).words, launch.bindings["lanes"])
            for kernel, launch in zip(self._kernels, launches, strict=True)
            if isinstance(kernel.spec, EpilogueSpec)
        ]
        self._count = len(records)
        self._records: CpuBuffer | None = None
        if records:
            self._records = self._store(records)
            weakref.finalize(self, self._records.destroy)
        device.reserve_scratch(max((r.scratch for r in records), default=0))

    def _store(self, records: Sequence[Record]) -> CpuBuffer:
        """Records first, the tables they point to behind them."""
        size = 4 * RECORD_WORDS * len(records)
        buffer = self._device.create_buffer(size + 4 * sum(len(r.table) for r in records), "plan")
        words: list[int] = []
        tables: list[int] = []
        for r in records:
            row = list(r.words)
            if r.table:
                row[TABLE_WORD] = buffer.address + size + 4 * len(tables)
                tables += r.table
            words += row
        self._device.write(buffer, 0, struct.pack(f"<{len(words) + len(tables)}I", *words, *tables))
        return buffer

    def run(self, *, lane_offset: int = 0, lanes: int = 0, gated: bool = False) -> None:
        """Enqueue once, as one call. An epilogue plan needs `lanes` >= 1 and `lane_offset` (bytes, multiple of 256). `gated`:
        records that a gate left without rows are skipped.

        Raises LimitError when the lanes leave their buffer, DeviceError when a bound buffer was destroyed.
        """
        if self.dead:
            raise DeviceError(self.dead)
        if self._lanes or lanes or lane_offset:
            self._check_lanes(lane_offset, lanes)
        if self._records is not None:
            self._device.run_records(self._records.address, self._count, lane_offset, lanes, gated)

    def _check_lanes(self, lane_offset: int, lanes: int) -> None:
        if not self._lanes:
            raise LimitError(f"the plan has no epilogue, but was run with lanes={lanes}, lane_offset={lane_offset}")
        if lanes < 1 or lane_offset < 0 or lane_offset % LANE_ALIGN:
            raise LimitError(
                f"an epilogue plan was run with lanes={lanes}, lane_offset={lane_offset}: "
                f"lanes start at 1, the offset is a multiple of {LANE_ALIGN}"
            )
        for words, buffer in self._lanes:
            if lane_offset + 4 * words * lanes > buffer.size:
                raise LimitError(
                    f"{lanes} lanes of {words} words at byte {lane_offset} leave the lane buffer {buffer.label!r} of {buffer.size} bytes"
                )


def _own_kernel(kernel: Kernel) -> CpuKernel:
    if not isinstance(kernel, CpuKernel):
        raise KernelError(f"a launch holds a {type(kernel).__name__}, which this cpu device did not compile")
    return kernel
