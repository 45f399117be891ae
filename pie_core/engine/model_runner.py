"""The engine's runner over a real model: packs a step into one write, runs its plans, and starts the read-back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pie_core.device.kept import MOST_OPS, Kept
from pie_core.device.move_slots import SlotMover
from pie_core.device.protocol import (
    LANE_ALIGN,
    PAGE_TOKENS,
    Buffer,
    Device,
    DeviceError,
    DeviceLost,
    EpilogueSpec,
    Kernel,
    Launch,
    Plan,
    StepTimer,
    Times,
)
from pie_core.device.templates import template
from pie_core.engine.page_io import PageIO
from pie_core.engine.runner import ROW_WORDS, RUN_WORDS, RunnerLimits, StepBatch
from pie_core.engine.step_buffer import GATE_WORDS, HEADER_WORDS, SHIFT_WORDS, pack_step
from pie_core.eta.program import Program
from pie_core.models.registry import resolve
from pie_core.poem import trace_model
from pie_core.poem.compile import CompiledModel, Tables
from pie_core.weights import Checkpoint

MAX_READS = 64  # read-out rows of one step: bounds the logits buffer
ARENA_START = 1 << 20  # 4 MiB of channel cells: a request with penalties and biases takes up to 6,150 words an answer
ARENA_WORDS = 1 << 24  # it grows to 64 MiB, where authors keep vocabularies: half of what every WebGPU device binds
RESULTS_WORDS = 1 << 16
TABLE_WORDS = 1 << 15
LANE_WORDS = 1 << 14
MASK_WORDS = 1 << 16
MIXED_PREFILL = 64  # rows a step beside decode at most, where products gain nothing from more (see pacing.py)
STATE_SHARE = 4  # one part in so many of the pool's bytes holds recurrent state, where the model has some
STATE_BYTES = 128 << 20  # most of it: one buffer, which every WebGPU device binds
MAX_SLOTS = 1024
COUNTED_PAGES = 1 << 16  # of a model without attention: they hold nothing and still bound the tokens alive
BUFFER_LIMITS = ("max-storage-buffer-binding-size", "max-buffer-size", "max_buffer_bytes")  # as devices call them
EPILOGUE_PLANS = 320  # compiled epilogues kept: more than infos of programs, so that a pass that waits does not compile its own again
STEP_WORK = 300_000_000  # nanoseconds that the epilogues of one step may take where they are several: everybody's token waits for them


@dataclass(slots=True)
class _Epilogue:
    """A compiled epilogue: its kernel, and the plan over `arena`."""

    kernel: Kernel
    plan: Plan
    arena: Buffer


class ModelRunner:
    """Implements `engine.runner.Runner` on a Device. Buffers outlive the plans; nothing here awaits."""

    def __init__(self, device: Device, model: CompiledModel, tables: Tables, limits: RunnerLimits) -> None:
        self.device, self.model, self._limits = device, model, limits
        self.tables = tables
        self.results = device.create_buffer(4 * limits.results_words, "results")
        self._epilogues: Kept[_Epilogue] = Kept(EPILOGUE_PLANS, MOST_OPS * 5 // 4)
        self.timer: StepTimer | None = None  # measures each step, where somebody asks (the timeline)
        self._mover = SlotMover(device, model.caches, model.cache_widths)
        self._page_io = PageIO(device, model.caches, model.cache_widths)
        self._gates, self._shifts = self._moving("gate"), self._moving("shift")

    @classmethod
    def load(
        cls,
        device: Device,
        checkpoint: Checkpoint,
        *,
        poem: Path | None = None,
        kv_pool_bytes: int = 512 << 20,
        progress: Callable[[int, int], None] | None = None,
        deterministic: bool = False,
    ) -> ModelRunner:
        """Trace the checkpoint's model, upload its weights and allocate `kv_pool_bytes` (rounded down to pages) of KV cache; of a model
        with recurrent state, a part of them as state slots.

        `deterministic`: every step runs the plans of the largest bucket, and every lane a launch of its own, so that no kernel is
        chosen by what else the step holds; slower where buckets differ. `progress(done, total)` counts checkpoint bytes.
        Raises UnknownArchitecture, PoemError, WeightsError, DeviceError;
        DeviceError too when the pool holds less than one page.
        """
        checkpoint.check_runnable()
        architecture = resolve(checkpoint.metadata, poem)
        config = architecture.Config.from_metadata(checkpoint.metadata)
        graph = trace_model(architecture.Model, config, checkpoint)
        page, slot = CompiledModel.page_bytes(graph), CompiledModel.slot_bytes(graph)
        slots = 0
        if slot:
            slots = min(min(kv_pool_bytes // STATE_SHARE, STATE_BYTES) // slot, MAX_SLOTS)
            if slots < 2:  # the state before a pass and the one behind it
                raise DeviceError(
                    f"the KV pool of {kv_pool_bytes} bytes leaves 1/{STATE_SHARE} for recurrent state, less than two slots of {slot} "
                    "bytes; raise --kv-pool-mb"
                )
            kv_pool_bytes -= slots * slot
        pages = min(kv_pool_bytes // page, 1 << 20) if page else COUNTED_PAGES
        if pages < 1:
            raise DeviceError(f"the KV pool of {kv_pool_bytes} bytes is smaller than one page of {page} bytes; raise --kv-pool-mb")
        max_tokens = device.token_buckets[-1]
        words = HEADER_WORDS + ROW_WORDS * max_tokens + MAX_READS + TABLE_WORDS + MASK_WORDS + 64 + LANE_WORDS
        if slots:
            words += RUN_WORDS * max_tokens
        words += (GATE_WORDS + 3 + SHIFT_WORDS) * max_tokens  # gates, and what they mask: rows, runs, lanes; shifts
        if deterministic:  # each lane is aligned
            words += LANE_ALIGN // 4 * max_tokens
        tables = Tables(device.create_buffer(4 * words, "step"), device.create_buffer(4 * ARENA_START, "arena"))
        model = CompiledModel(device, graph, checkpoint, tables, pages=pages, max_reads=MAX_READS, slots=slots, progress=progress)
        limits = RunnerLimits(
            max_tokens=max_tokens,
            max_reads=model.max_reads,
            context=min(config.context, pages * PAGE_TOKENS),  # of one sequence: the pool may hold less than the model could see
            pages=pages,
            vocab=config.vocab,
            hidden=config.width,
            arena_words=arena_words(device),
            arena_start=ARENA_START,
            results_words=RESULTS_WORDS,
            table_words=TABLE_WORDS,
            lane_words=LANE_WORDS,
            mask_words=MASK_WORDS,
            mixed_prefill=MIXED_PREFILL if device.info.kind == "cpu" or device.info.software else max_tokens,
            deterministic=deterministic,
            state_slots=slots,
            ahead=2 if device.info.software else 4,  # a software adapter blocks a submission until the one before it has run
            step_work=STEP_WORK,
            spare_core=not device.info.software,
        )
        return cls(device, model, tables, limits)

    @property
    def limits(self) -> RunnerLimits:
        """Sizes that the engine keeps every step within."""
        return self._limits

    def prepare(self, program: Program) -> tuple[int, int, int]:
        """Compile `program`'s kernel unless it is cached; the nanoseconds that one lane takes at most, about, and that its first run takes
        besides; and what keeping it costs. Raises DeviceError."""
        kernel = self._epilogue(program).kernel
        return kernel.work, kernel.first_work, kernel.size

    def submit(self, batch: StepBatch) -> StepRun | TimedRun:
        """Enqueue one step: one write, shifts and gates, the body, the head when something is read, the epilogues, the read-back."""
        fixed = self._limits.deterministic
        packed = pack_step(batch, single_lanes=fixed)
        timer = self.timer
        if timer is not None:
            timer.start()
        device, model = self.device, self.model
        device.write(self.tables.step, 0, packed.data)
        if batch.may_shift:
            self._shifts.run()
        if batch.may_cancel:
            self._gates.run()  # behind the shifts, which would give masked rows a slot
        gated = batch.skippable
        model.body(model.max_tokens if fixed else batch.n_tokens).run(gated=gated)
        if batch.reads:
            model.head(model.max_reads if fixed else len(batch.reads)).run(gated=gated)
        if timer is not None:
            timer.epilogues()
        for group in packed.groups:
            try:
                self.epilogue_plan(group.program).run(lane_offset=group.lane_offset, lanes=group.lanes)
            except DeviceLost:
                raise
            except DeviceError as error:  # its kernel had to be compiled again, or its scratch found no room
                batch.refused[group.program.hash] = error
        size = 4 * max(1, batch.results_words)
        return StepRun(device.read(self.results, 0, size)) if timer is None else TimedRun(timer.read(self.results, 0, size))

    def write_arena(self, word: int, data: bytes | bytearray | memoryview) -> None:
        """Write u32 words at word offset `word` of the arena, before any later step."""
        self.device.write(self.tables.arena, 4 * word, data)

    def grow_arena(self, words: int) -> None:
        """A larger arena takes the place of the one there is, behind all that was enqueued. Raises DeviceError."""
        device, old = self.device, self.tables.arena
        arena = device.create_buffer(4 * words, "arena")
        device.copy(old, 0, arena, 0, old.size)
        self.tables = replace(self.tables, arena=arena)
        self.model.rebind(self.tables)
        self._gates, self._shifts = self._moving("gate"), self._moving("shift")
        old.destroy()

    def copy_page(self, src: int, dst: int) -> None:
        """Copy one KV page in every layer."""
        self.model.copy_page(src, dst)

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move KV rows between slots in every layer, in list order. Raises LimitError."""
        self._mover.move(pairs)

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page of all layers."""
        return self._page_io.page_bytes

    def read_pages(self, pages: Sequence[int]) -> Awaitable[bytes]:
        """The bytes of KV pages as of now. Awaiting raises DeviceError."""
        return self._page_io.read(pages)

    def write_pages(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Fill KV pages with what `read_pages` gave, before any later step. Raises DeviceError, ValueError."""
        self._page_io.write(pages, data)

    def close(self) -> None:
        """Release the device with everything on it."""
        self.device.close()

    def epilogue_plan(self, program: Program) -> Plan:
        """The plan that runs `program`'s kernel; compiled at first use. Raises DeviceError."""
        return self._epilogue(program).plan

    def _epilogue(self, program: Program) -> _Epilogue:
        found = self._epilogues.find(program.hash)
        arena = self.tables.arena
        if found is None:
            kernel = self.device.compile(EpilogueSpec(program))
            found = _Epilogue(kernel, self._epilogue_plan(kernel, program), arena)
            self._epilogues.keep(program.hash, found, max(kernel.size, len(program.ops)))
        elif found.arena is not arena:  # it has grown
            found.plan, found.arena = self._epilogue_plan(found.kernel, program), arena
        return found

    def _epilogue_plan(self, kernel: Kernel, program: Program) -> Plan:
        buffers = {"arena": self.tables.arena, "lanes": self.tables.step, "results": self.results}
        rows = (("logits", self.model.logits), ("hidden", self.model.hidden))
        buffers |= {name: given for name, given in rows if program.width(name)}
        return self.device.compile_plan([Launch(kernel, buffers)])

    def _moving(self, name: str) -> Plan:
        """The plan of a template that changes the step buffer by what the arena says."""
        kernel = self.device.compile(template(name, bucket=self._limits.max_tokens))
        return self.device.compile_plan([Launch(kernel, {"step": self.tables.step, "arena": self.tables.arena})])


def arena_words(device: Device) -> int:
    """The most words that the arena may grow to on `device`: it is one buffer, which kernels bind as a whole."""
    bytes_ = min((device.info.limits.get(name, 4 * ARENA_WORDS) for name in BUFFER_LIMITS), default=4 * ARENA_WORDS)
    return max(ARENA_START, min(ARENA_WORDS, bytes_ // 4))


class StepRun:
    """A step that was enqueued; `results` resolves when its read-back has arrived."""

    __slots__ = ("_read",)

    def __init__(self, read: Awaitable[bytes]) -> None:
        self._read = read

    def results(self) -> Awaitable[bytes]:
        """The step's results region (u32 words, little endian), the device's own future where it has one: a coroutine around it would be
        a task more for the engine. Awaiting raises DeviceError."""
        return self._read

    def times(self) -> Times | None:
        """None: nobody measures."""
        return None


class TimedRun:
    """A step that was enqueued and is measured."""

    __slots__ = ("_read", "_times")

    def __init__(self, read: Awaitable[tuple[bytes, Times | None]]) -> None:
        self._read = read
        self._times: Times | None = None

    async def results(self) -> bytes:
        """The step's results region (u32 words, little endian). Raises DeviceError."""
        data, self._times = await self._read
        return data

    def times(self) -> Times | None:
        """Device seconds of the step and of its epilogues, once the results are here."""
        return self._times
