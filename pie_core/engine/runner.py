"""The boundary below the engine: what a step is, and what must run it (docs/architecture.md, sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pie_core.device.protocol import NONE, PAGE_TOKENS, DeviceError
from pie_core.eta.program import Program

ROW_WORDS = 8  # u32 words of one token row of the step buffer
RUN_WORDS = 5  # of one run of its recurrence table


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes fixed when a model is loaded. The engine never builds a batch over one of them."""

    max_tokens: int  # token rows of one step
    max_reads: int  # read-out rows of one step
    context: int  # positions of one sequence: what the model can see, or what all pages hold, whichever is less
    pages: int  # KV pages of 16 tokens, numbered 0 .. pages-1
    vocab: int
    hidden: int
    arena_words: int  # u32 words of the arena (channel cells) at most
    results_words: int  # u32 words of the results region of one step
    table_words: int  # page numbers of one step, all sequences together
    lane_words: int  # lane-table words of one step, each group rounded up to LANE_ALIGN bytes
    mask_words: int = 1 << 16  # words of the mask blocks of one step
    mixed_prefill: int = 1 << 30  # token rows of prefill in a step that also decodes: bounds what a long prompt adds to everybody's token
    deterministic: bool = False  # the runner computes a row in the same way whatever else a step holds
    state_slots: int = 0  # slots of recurrent state, numbered from 0 on; 0: the model has none
    arena_start: int | None = None  # words that it has at first, see `Runner.grow_arena`; None: all
    ahead: int = 4  # most steps in flight, where all that they need is on the device
    step_work: int = 1 << 62  # work of the epilogues of one step, all lanes together, where it has more than one: see `Runner.prepare`
    spare_core: bool = True  # False where the device computes on every core of the host: work beside a step then only slows the step

    @property
    def context_text(self) -> str:
        """The context, for messages: with the reason where it is the KV cache that bounds it."""
        return f"{self.context}, all that the KV cache holds" if self.context == self.pages * PAGE_TOKENS else str(self.context)


@dataclass(slots=True)
class EpilogueGroup:
    """Passes of one batch that run the same kernel: one launch, one lane each.

    A lane is the list of u32 words that `codegen.layout.lane_layout(program).pack(...)` returns.
    """

    program: Program
    lanes: list[Sequence[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shift:
    """How far the rows of a pass go back, as only the device knows when the step is packed (see the template "shift").

    Its set committed drafts by counts that the host has not read, and its rows are packed as if all had been kept. Arena word `total`
    (0 where the shift is `fresh`) says how many were dropped. Unless `cell` is NONE it grows by `limit` less the count in arena word
    `cell`. Positions go back by the total, less the part `known` to the host; those of the first `early` rows, which are replayed, by
    the total before. Where the model has recurrent state the pass's run folds so many of these rows as `cell` says.
    """

    total: int
    fresh: bool
    cell: int
    limit: int
    known: int
    early: int


@dataclass(slots=True)
class Gate:
    """A pass of which the device decides something.

    Behind a stop that nobody knows yet, whether it runs (see the template "gate"): it runs unless arena word `word` is set, or becomes
    set because arena word `cell` (NONE: none), the stop cell of the pass before, is not 0. Otherwise it must change nothing: its rows
    store no K and V, its runs no state, its lane nothing at all. `word` NONE: it runs anyway.
    Behind a count that nobody knows yet, where its rows are: `shift`.
    """

    word: int
    cell: int
    rows: range  # token rows of the step
    runs: range  # entries of the recurrence table
    lane: Sequence[int] | None  # in its group's list
    shift: Shift | None = None


@dataclass(slots=True)
class StepBatch:
    """One step. `engine.step_buffer.pack_step` turns it into the words that kernels read.

    rows: flat, 8 words a token in the step buffer's order: id, src, pos, slot, pages, window, sinks, mask. Here `pages` is an
        index into `tables`, and `mask` one more than an index into `masks`, or 0; packing adds the offsets at which they start.
    tables: page numbers of every sequence of the step, one after another.
    masks: mask blocks, one after another (see device/mask_block.py).
    runs: of a model with recurrent state: 5 words a run of rows of one sequence, in order, and every row in one: the row behind its last,
        slot to start from, slot to write, rows that may be folded, arena word with their count (see the template "recur").
    reads: token row of each read-out; a pass's read-outs are consecutive.
    results_words: words of the results region that the lanes use, from 0 on.
    gates: passes that may turn out cancelled, or whose rows move; of words, rows and lanes of their own.
    refused: filled by `Runner.submit`: programs, by hash, whose epilogues the device could not run. All else of the step runs.
    """

    rows: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    n_seqs: int = 0
    reads: list[int] = field(default_factory=list)
    epilogues: list[EpilogueGroup] = field(default_factory=list)
    results_words: int = 0
    gates: list[Gate] = field(default_factory=list)
    refused: dict[str, DeviceError] = field(default_factory=dict)

    @property
    def skippable(self) -> bool:
        """Whether every row has a gate that may be shut, so that the device may find nothing to do."""
        return bool(self.gates) and self.gated_rows == self.n_tokens

    @property
    def gated_rows(self) -> int:
        """Token rows of passes that may turn out cancelled."""
        return sum(len(gate.rows) for gate in self.gates if gate.word != NONE)

    @property
    def may_cancel(self) -> bool:
        """Whether a pass of the step may turn out cancelled."""
        return any(gate.word != NONE for gate in self.gates)

    @property
    def may_shift(self) -> bool:
        """Whether rows of the step may move."""
        return any(gate.shift is not None for gate in self.gates)

    @property
    def n_tokens(self) -> int:
        """Token rows in the batch."""
        return len(self.rows) // ROW_WORDS


class StepHandle(Protocol):
    """A step that was enqueued."""

    def results(self) -> Awaitable[bytes | bytearray | memoryview]:
        """The first `results_words` u32 words (little endian) of this step's results region, once the step has run.
        Awaited at most once, also when `results_words` is 0. Raises DeviceError when the step did not run as asked."""
        ...

    def times(self) -> tuple[float, float] | None:
        """(seconds of the whole step, of its epilogues) as the device measured them, once the results are here; None where it does not."""
        ...


class Runner(Protocol):
    """A loaded model on a device: an ordered queue. `submit`, writes, copies, moves and reads take effect in call order and
    return at once; the engine keeps at most `limits.ahead` steps in flight, whose results it reads in order."""

    @property
    def limits(self) -> RunnerLimits: ...

    def prepare(self, program: Program) -> tuple[int, int, int] | None:
        """Compile the epilogue kernel of `program` (cached by its hash); the work of one lane, what its first run takes besides, both in
        units of `limits.step_work`, and what keeping it costs, where the runner knows them. Raises DeviceError when it does not compile,
        so that one program's fault rejects only the passes that use it; KernelError and LimitError where it never will."""
        ...

    def submit(self, batch: StepBatch) -> StepHandle:
        """Enqueue one step. An epilogue that cannot run goes into `batch.refused`. Raises DeviceError; then nothing of the batch may
        be relied on."""
        ...

    def write_arena(self, word: int, data: bytes | bytearray | memoryview) -> None:
        """Write whole u32 words (little endian) at word offset `word` of the arena."""
        ...

    def grow_arena(self, words: int) -> None:
        """Let the arena have `words` words, more than before and `arena_words` at most; it keeps what it holds. Raises DeviceError, and
        then it is as it was."""
        ...

    def copy_page(self, src: int, dst: int) -> None:
        """Copy one KV page, K and V of every layer."""
        ...

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """For each (source, target) in list order: KV slot `target` becomes what slot `source` holds by then, in every layer."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page, K and V of all layers."""
        ...

    def read_pages(self, pages: Sequence[int]) -> Awaitable[bytes]:
        """The bytes of KV pages, `page_bytes` for each, in an order of the runner's, as they are at the call: later steps change nothing
        of it. Awaiting raises DeviceError."""
        ...

    def write_pages(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Fill KV pages with what `read_pages` gave of as many."""
        ...
