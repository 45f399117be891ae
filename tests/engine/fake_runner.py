"""A deterministic runner with real paging: the batch is packed into step-buffer words, and only those words are interpreted.

KV slots hold (token, position). A read-out row is a function of everything that its token sees (`answer`), so a wrong page, slot,
position, order, window or lane gives another answer. `reference` computes the same from a plain list of tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pie_core.codegen.layout import CHAN_WORDS, FIXED, lane_layout
from pie_core.device.protocol import NONE, PAGE_TOKENS, DeviceError
from pie_core.engine.runner import RunnerLimits, StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.eta.program import Program

VOCAB = 89
HIDDEN = 4
Seen = list[tuple[int, int]]


def limits(**changes: int) -> RunnerLimits:
    """Small limits; `changes` by field name."""
    fields = {
        "max_tokens": 32, "max_reads": 16, "context": 512, "pages": 64, "vocab": VOCAB, "hidden": HIDDEN,
        "arena_words": 4096, "results_words": 2048, "table_words": 1024, "lane_words": 4096, "mask_words": 1024,
    }  # fmt: skip
    return RunnerLimits(**(fields | changes))


def answer(seen: Seen) -> int:
    """The greedy token after `seen`, (token, position) in order of position."""
    return int.from_bytes(hashlib.blake2b(repr(seen).encode(), digest_size=8).digest(), "little") % VOCAB


def reference(tokens: Sequence[int], window: int = 0, sinks: int = 0) -> int:
    """The greedy token after `tokens` at positions 0, 1, …"""
    last = len(tokens) - 1
    return answer([(t, p) for p, t in enumerate(tokens) if not window or p > last - window or p < sinks])


def generate(prompt: Sequence[int], n: int) -> list[int]:
    """What a greedy loop gives."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(reference(tokens))
    return tokens[len(prompt) :]


class FakeHandle:
    """A step that "runs" for `delay` seconds."""

    def __init__(self, data: bytes, delay: float, error: Exception | None) -> None:
        self._data, self._delay, self._error = data, delay, error
        self.gate: asyncio.Event | None = None

    async def results(self) -> bytes:
        if self.gate is not None:
            await self.gate.wait()
        elif self._delay:
            await asyncio.sleep(self._delay)
        if self._error is not None:
            raise self._error
        return self._data

    def times(self) -> tuple[float, float] | None:
        return None


class FakeRunner:
    """Runs each step at submit (an ordered queue) and hands its results out later."""

    def __init__(self, limits_: RunnerLimits | None = None, delay: float = 0.0) -> None:
        self._limits = limits_ or limits()
        self.delay = delay
        self.kv: dict[int, tuple[int, int] | None] = {}  # slot -> (token, position); None: NaN
        self.arena = array("I", bytes(4 * (self._limits.arena_start or self._limits.arena_words)))
        self.fail_grow: Exception | None = None
        self.batches: list[StepBatch] = []
        self.handles: list[FakeHandle] = []
        self.copies: list[tuple[int, int]] = []
        self.moves: list[tuple[int, int]] = []
        self.prepared: list[str] = []
        self.fail_submit: Callable[[StepBatch], Exception | None] = lambda batch: None
        self.fail_results: Callable[[StepBatch], Exception | None] = lambda batch: None
        self.fail_read: Exception | None = None
        self.hold = False  # results wait for `release`
        self.bad_programs: set[str] = set()
        self.masked = 0  # words of steps behind gates that were shut, and steps that they left empty
        self.empty_steps = 0
        self.shifted = 0  # shifts of steps

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def prepare(self, program: Program) -> None:
        if program.hash in self.bad_programs:
            raise DeviceError("the shader compiler refused it")
        self.prepared.append(program.hash)

    def write_arena(self, word: int, data: bytes) -> None:
        words = array("I", bytes(data))
        assert word + len(words) <= len(self.arena), "the device has no such words"
        self.arena[word : word + len(words)] = words

    def grow_arena(self, words: int) -> None:
        assert len(self.arena) < words <= self._limits.arena_words
        if self.fail_grow is not None:
            raise self.fail_grow
        self.arena = self.arena + array("I", bytes(4 * (words - len(self.arena))))

    def copy_page(self, src: int, dst: int) -> None:
        self.copies.append((src, dst))
        for k in range(PAGE_TOKENS):
            if src * PAGE_TOKENS + k in self.kv:
                self.kv[dst * PAGE_TOKENS + k] = self.kv[src * PAGE_TOKENS + k]

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.moves.append((source, target))
            self.kv[target] = self.kv[source]

    @property
    def page_bytes(self) -> int:
        return 8 * PAGE_TOKENS

    def read_pages(self, pages: Sequence[int]) -> Awaitable[bytes]:
        words = array("I")
        for page in pages:
            for slot in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
                words.extend(self.kv.get(slot) or (NONE, NONE))
        return self._later(words.tobytes())

    async def _later(self, data: bytes) -> bytes:
        await asyncio.sleep(self.delay)
        if self.fail_read is not None:
            raise self.fail_read
        return data

    def write_pages(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        words = memoryview(data).cast("I")
        for k in range(len(pages) * PAGE_TOKENS):
            token, pos = words[2 * k], words[2 * k + 1]
            self.kv[pages[k // PAGE_TOKENS] * PAGE_TOKENS + k % PAGE_TOKENS] = (token, pos) if token != NONE else None

    def submit(self, batch: StepBatch) -> FakeHandle:
        self._check(batch)
        self.batches.append(batch)
        error = self.fail_submit(batch)
        if error is not None:
            raise error
        handle = FakeHandle(self._execute(batch), self.delay, self.fail_results(batch))
        if self.hold:
            handle.gate = asyncio.Event()
        self.handles.append(handle)
        return handle

    def release(self) -> None:
        """Let every held step land."""
        for handle in self.handles:
            if handle.gate is not None:
                handle.gate.set()

    def _check(self, batch: StepBatch) -> None:
        limits_ = self._limits
        assert 0 < batch.n_tokens <= limits_.max_tokens
        assert len(batch.reads) <= limits_.max_reads
        assert len(batch.tables) <= limits_.table_words
        assert len(batch.masks) <= limits_.mask_words
        assert batch.results_words <= limits_.results_words
        assert all(0 <= page < limits_.pages for page in batch.tables)
        slots = batch.rows[3::8]
        assert len(set(slots)) == len(slots), "two rows of one step write the same slot"

    def _execute(self, batch: StepBatch) -> bytes:
        packed = pack_step(batch)
        step = array("I", bytes(packed.data))
        self._shifts(step)
        self._gates(step)
        n_tokens, n_reads, _, token_off, read_off = step[:5]
        rows = [step[token_off + 8 * i : token_off + 8 * i + 8] for i in range(n_tokens)]
        for word, src, pos, slot, pages, _, _, mask in rows:
            if slot == NONE:  # behind a gate that is shut
                continue
            token = self.arena[src] if src != NONE else word
            place = step[mask + 1] - 1 if mask else pos
            assert step[pages + place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS == slot, "two statements of a slot"
            self.kv[slot] = (token, pos) if token < self._limits.vocab else None
        readouts: list[int | None] = []
        for r in range(n_reads):
            _, _, pos, _, pages, window, sinks, mask = rows[step[read_off + r]]
            first, count = step[mask : mask + 2] if mask else (pos + 1, pos + 1)
            visible = [p for p in range(first) if not window or p > pos - window or p < sinks]
            visible += [p for p in range(first, count) if step[mask + 2 + (p - first) // 32] >> (p - first) % 32 & 1]
            seen = [self.kv.get(step[pages + p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS) for p in visible]
            readouts.append(None if None in seen else answer([cell for cell in seen if cell is not None]))
        results = array("I", [0xDEADBEEF]) * batch.results_words
        for group in packed.groups:
            layout = lane_layout(group.program)
            base = group.lane_offset // 4
            assert group.lane_offset % 256 == 0
            for k in range(group.lanes):
                lane = step[base + k * layout.words : base + (k + 1) * layout.words]
                if lane[0] == NONE:
                    continue
                self._lane(group.program, lane, readouts, results)
        return results.tobytes()

    def _shifts(self, step: array[int]) -> None:
        """What the template "shift" does."""
        at, count = step[11:13]
        for k in range(count):
            total, fresh, cell, limit, known, first, early, rows = step[at + 8 * k : at + 8 * k + 8]
            before = after = 0 if fresh else self.arena[total]
            if cell != NONE:
                kept = self.arena[cell]
                after += limit - (0 if kept >> 31 else min(kept, limit))
            self.arena[total] = after
            self.shifted += 1
            for r in range(rows):
                row = step[3] + 8 * (first + r)
                step[row + 2] -= (before if r < early else after) - known
                if step[row + 3] != NONE:
                    step[row + 3] = step[step[row + 4] + step[row + 2] // PAGE_TOKENS] * PAGE_TOKENS + step[row + 2] % PAGE_TOKENS

    def _gates(self, step: array[int]) -> None:
        """What the template "gate" does."""
        at, count, free = step[8:11]
        live = free > 0 or not count
        for k in range(count):
            word, cell, first, places = step[at + 4 * k : at + 4 * k + 4]
            if cell != NONE and self.arena[cell]:
                self.arena[word] = 1
            if not self.arena[word]:
                live = True
                continue
            for place in step[first : first + places]:
                step[place] = NONE
                self.masked += 1
        if not live:
            step[0] = step[1] = 0
            self.empty_steps += 1

    def _lane(self, program: Program, lane: array[int], readouts: list[int | None], results: array[int]) -> None:
        layout = lane_layout(program)
        row, status = lane[0], lane[1]
        used = readouts[row : row + program.reads]
        assert len(used) == program.reads
        results[status] = int(None in used)
        values: list[Any] = []
        pending: dict[int, Any] = {}
        for node in program.ops:
            args = [values[a] for a in node.args]
            size = math.prod(node.shape)
            chan = node.attrs.get("chan")
            if node.name == "output":
                top = readouts[row + int(node.attrs["index"])]
                value: Any = [float(k == top) for k in range(size)]
            elif node.name == "iota":
                value = list(range(size))
            elif node.name == "param":
                value = lane[layout.param(int(node.attrs["slot"]))]
            elif node.name in ("take", "read"):
                if chan in pending:
                    value = pending[chan]
                else:
                    at = lane[FIXED + CHAN_WORDS * int(chan)]
                    assert at != NONE, "a cell is read that the lane does not give"
                    value = list(self.arena[at : at + size])
                if node.name == "take":
                    pending.pop(chan, None)
            elif node.name == "put":
                pending[chan] = args[0]
                value = None
            elif node.name == "broadcast":
                value = [_first(args[0])] * size  # of a scalar or one element
            else:
                value = _OPS[node.name](*args)
            values.append(value)
        for chan, value in pending.items():
            words = _words(value, program.chans[chan].dtype)
            for where, target in ((layout.put(chan), self.arena), (layout.copy(chan), results)):
                if lane[where] != NONE:
                    target[lane[where] : lane[where] + len(words)] = array("I", words)
        for k, out in enumerate(program.outs):
            words = _words(values[out], program.ops[out].dtype)
            at = lane[layout.out(k)]
            results[at : at + len(words)] = array("I", words)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _each(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 1:
            return [fn(x, y) for x, y in zip(a, b, strict=True)]
        return fn(_first(a), _first(b))

    return apply


_OPS: dict[str, Callable[..., Any]] = {
    "reduce_argmax": lambda a: max(range(len(a)), key=lambda i: (a[i], -i)),
    "add": _each(lambda a, b: (a + b) & 0xFFFFFFFF),
    "mul": _each(lambda a, b: (a * b) & 0xFFFFFFFF),
    "eq": _each(lambda a, b: a == b),
    "ge": _each(lambda a, b: a >= b),
    "cast": lambda a: a,
    "reshape": lambda a: a,
}


def _words(value: Any, dtype: str) -> list[int]:
    items = value if isinstance(value, list) else [value]
    if dtype == "f32":
        return [struct.unpack("<I", struct.pack("<f", v))[0] for v in items]
    return [int(v) for v in items]
