"""Start-up self-test: every template against answers computed in plain Python, on three tokens across a page boundary.

A wrong kernel gives fluent garbage, not an error; this finds it before the first request (standard library only, any Device).
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import mul, sub

from pie_core.device import selftest_state, selftest_tables
from pie_core.device.mask_block import mask_block
from pie_core.device.move_slots import MAX_MOVES
from pie_core.device.protocol import NONE, PAGE_TOKENS, Buffer, Device, DeviceError, Launch, TemplateSpec, Weight
from pie_core.device.templates import template

TOLERANCE = 1e-3  # of the largest expected value; int16 activations stay below a tenth of it
POSITIONS = (14, 15, 16)  # of the three tokens of one sequence
ROWS = max(len(POSITIONS), len(selftest_tables.POSITIONS))  # of its largest step
PAGES = (2, 0)  # its page table: not in order
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WIDTH = HEADS * HEAD_DIM
VOCAB = 6
FIRST, WINDOW, SINKS = 13, 4, 2  # of the masked run: keys 0 and 1, those of the window, and the bits of
MASKS = ((14,), (13, 15), (13, 14, 16))  # each token, whose place is its position
LOGITS = 49_152
FORMATS = ("f32", "f16", "q4_1", "q8_0")  # of weights in products
PERIOD = 96  # the logits matrix repeats its rows, so few answers check all of it

Matrix = list[list[float]]


class _Values:
    """Reproducible multiples of 1/64 in [-1, 1)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def integers(self, count: int, low: int, high: int) -> list[int]:
        out = []
        for _ in range(count):
            self._state = (self._state * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF
            out.append(low + (self._state >> 16) % (high - low))
        return out

    def floats(self, count: int) -> list[float]:
        return [v / 64 for v in self.integers(count, -64, 64)]

    def matrix(self, rows: int, cols: int) -> Matrix:
        return [self.floats(cols) for _ in range(rows)]


def _packed(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _flat(matrix: Matrix) -> list[float]:
    return [v for row in matrix for v in row]


def q8_0_block(values: _Values, rows: int, cols: int) -> tuple[bytes, Matrix]:
    """Raw GGUF Q8_0 blocks and the matrix that they hold."""
    raw, matrix = bytearray(), []
    for _ in range(rows):
        row: list[float] = []
        for _ in range(cols // 32):
            quants = values.integers(32, -127, 128)
            raw += struct.pack("<e32b", 2**-7, *quants)
            row += [q * 2**-7 for q in quants]
        matrix.append(row)
    return bytes(raw), matrix


def q4_1_block(values: _Values, rows: int, cols: int) -> tuple[bytes, Matrix]:
    """The same in Q4_1."""
    raw, matrix = bytearray(), []
    for _ in range(rows):
        row: list[float] = []
        for _ in range(cols // 32):
            quants = values.integers(32, 0, 16)
            raw += struct.pack("<ee16B", 2**-4, -0.5, *(low | high << 4 for low, high in zip(quants[:16], quants[16:], strict=True)))
            row += [q * 2**-4 - 0.5 for q in quants]
        matrix.append(row)
    return bytes(raw), matrix


def plain_block(fmt: str, values: _Values, rows: int, cols: int) -> tuple[bytes, Matrix]:
    """The same in f32 or f16."""
    matrix = values.matrix(rows, cols)
    return struct.pack(f"<{rows * cols}{'e' if fmt == 'f16' else 'f'}", *_flat(matrix)), matrix


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


def attended(query: Sequence[float], seen: Sequence[int], keys: Matrix, values: Matrix) -> list[float]:
    """The attention of one token, all heads, over the keys `seen`."""
    out: list[float] = []
    for head in range(HEADS):
        at = head // (HEADS // KV_HEADS) * HEAD_DIM
        part, own = slice(at, at + HEAD_DIM), query[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        scores = [0.125 * _dot(own, keys[p][part]) for p in seen]
        top = max(scores)
        shares = [math.exp(s - top) for s in scores]
        total = sum(shares)
        out += [_dot(shares, column) / total for column in zip(*(values[p][part] for p in seen), strict=True)]
    return out


class SelfTest:
    """The run on one device; the sequence's tokens share one step buffer."""

    def __init__(self, device: Device, bucket: int | None = None) -> None:
        if device.token_buckets[-1] < ROWS:
            raise DeviceError(f"the self-test runs {ROWS} tokens a step; the device takes {device.token_buckets[-1]}")
        self.device = device
        self.values = _Values(1)
        self.bucket = bucket or next((b for b in device.token_buckets if b >= len(POSITIONS)), device.token_buckets[-1])
        self.buffers: list[Buffer] = []
        self.weights: list[Weight] = []

    def buffer(self, data: bytes | int, label: str) -> Buffer:
        """A buffer of these bytes, or of that many zeros; freed at the end."""
        made = self.device.create_buffer(data if isinstance(data, int) else len(data), f"self-test {label}")
        self.buffers.append(made)
        if not isinstance(data, int):
            self.device.write(made, 0, data)
        return made

    def rows(self, matrix: Matrix, label: str) -> Buffer:
        """A [bucket, width] buffer that starts with `matrix`."""
        width = len(matrix[0])
        return self.buffer(_packed(_flat(matrix) + [0.0] * (width * (self.bucket - len(matrix)))), label)

    def weight(self, fmt: str, rows: int, cols: int, raw: bytes) -> Weight:
        """An uploaded matrix; freed at the end."""
        made = self.device.upload(fmt, rows, cols, [memoryview(raw)], f"self-test {fmt}")
        self.weights.append(made)
        return made

    def run(self, spec: TemplateSpec, bindings: Mapping[str, Buffer]) -> None:
        """Enqueue one kernel."""
        self.device.compile_plan([Launch(self.device.compile(spec), bindings)]).run()

    async def check(self, name: str, buffer: Buffer, offset: int, expected: Sequence[float]) -> None:
        """Compare f32 values at element `offset`, NaN must meet NaN; or u32 words, exactly, where `expected` is an array of them. Raises
        DeviceError that names the kernel."""
        self.compare(name, await self.device.read(buffer, offset * 4, len(expected) * 4), expected)

    def compare(self, name: str, found: bytes, expected: Sequence[float]) -> None:
        """The comparison of `check`."""
        words = isinstance(expected, array)
        values = array("I" if words else "f", found)
        slack = 0.0 if words else TOLERANCE * max(chain((0.0,), map(abs, expected)))  # NaN is greater than nothing
        if len(values) == len(expected) and all(map(slack.__ge__, map(abs, map(sub, values, expected)))):
            return
        for index, (got, want) in enumerate(zip(values, expected, strict=True)):
            if not (abs(got - want) <= slack or (math.isnan(want) and math.isnan(got))):
                raise DeviceError(
                    f"self-test: kernel {name} is wrong on {self.device.info.kind} device {self.device.info.name!r}: "
                    f"output {index} is {got!r}, expected {want!r} within {slack:.2g}; use another device (--device cpu)"
                )

    def step(self, masked: bool = False) -> Buffer:
        """Three tokens: id 5, an id from arena word 3, an id outside the vocabulary; read-outs of rows 2 and 0."""
        words = [3, 2, 1, 16, 40, 42, *[0] * 10]
        ids = [(5, NONE), (0, 3), (VOCAB + 3, NONE)]
        blocks: list[int] = []
        for (token, source), pos, keys in zip(ids, POSITIONS, MASKS, strict=True):
            geometry = [WINDOW, SINKS, 44 + len(blocks)] if masked else [0, 0, 0]
            words += [token, source, pos, PAGES[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS, 42, *geometry]
            blocks += mask_block(FIRST, pos + 1, keys)
        words += [2, 0, *PAGES, *blocks]
        return self.buffer(struct.pack(f"<{len(words)}I", *words), "step")

    async def embed_and_norm(self, step: Buffer) -> None:
        """`embed` (ids given, fed by the arena, out of range) and `rms_norm` (both row sources)."""
        raw, table = q8_0_block(self.values, VOCAB, 64)
        weight = self.weight("q8_0", VOCAB, 64, raw)
        arena = self.buffer(struct.pack("<4I", 9, 9, 9, 4), "arena")
        out = self.buffer(self.bucket * 64 * 4, "embedded")
        spec = template("embed", fmt="q8_0", vocab=VOCAB, width=64, bucket=self.bucket)
        scales = weight.scales or weight.quants
        self.run(spec, {"step": step, "arena": arena, "quants": weight.quants, "scales": scales, "out": out})
        await self.check("embed", out, 0, table[5] + table[4] + [math.nan] * 64)
        x, gain = self.values.matrix(3, 64), self.values.floats(64)
        for rows, chosen in (("tokens", (0, 1, 2)), ("reads", (2, 0))):
            want: list[float] = []
            for row in chosen:
                factor = 1 / math.sqrt(sum(v * v for v in x[row]) / 64 + 1e-5)
                want += [v * factor * g for v, g in zip(x[row], gain, strict=True)]
            target = self.buffer(self.bucket * 64 * 4, "normed")
            bindings = {"step": step, "x": self.rows(x, "x"), "weight": self.weight("f32", 1, 64, _packed(gain)).quants, "out": target}
            self.run(template("rms_norm", width=64, eps=1e-5, rows=rows, bucket=self.bucket), bindings)
            await self.check(f"rms_norm rows={rows}", target, 0, want)

    async def linear(self, step: Buffer, fmt: str, block: tuple[bytes, Matrix], add: bool, repeat: int = 1) -> None:
        """`linear` of one format; the weights are `repeat` copies of `block` (raw bytes, matrix) below each other."""
        raw, matrix = block
        m, k = len(matrix) * repeat, len(matrix[0])
        rows, count = ("reads", 2) if repeat > 1 else ("tokens", 3)
        count = min(count, self.bucket)
        x, before = self.values.matrix(count, k), self.values.matrix(count, m) if add else []
        weight = self.weight(fmt, m, k, raw * repeat)
        out = self.rows(before, "sums") if add else self.buffer(self.bucket * m * 4, "sums")
        bindings = {"step": step, "x": self.rows(x, "x"), "quants": weight.quants, "scales": weight.scales or weight.quants, "out": out}
        self.run(template("linear", fmt=fmt, m=m, k=k, add=add, rows=rows, bucket=self.bucket), bindings)
        for t in range(count):
            sums = [_dot(row, x[t]) for row in matrix] * repeat
            want = [s + b for s, b in zip(sums, before[t], strict=True)] if add else sums
            await self.check(f"linear fmt={fmt} m={m}", out, t * m, want)

    async def attention(self, step: Buffer) -> None:
        """`rope_append` of positions 14 to 16 and `attention` through the page table: over all keys, then over masked ones."""
        kv_width, half = KV_HEADS * HEAD_DIM, HEAD_DIM // 2
        freqs = [10_000.0 ** (-j / half) for j in range(half)]
        freqs = list(struct.unpack(f"<{half}f", _packed(freqs)))
        qkv = self.values.matrix(3, WIDTH + 2 * kv_width)
        keys, values = self.values.matrix(17, kv_width), self.values.matrix(17, kv_width)
        slots = [PAGES[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(17)]
        k_rows = [[math.nan] * kv_width for _ in range(3 * PAGE_TOKENS)]
        v_rows = [[math.nan] * kv_width for _ in range(3 * PAGE_TOKENS)]
        for p in range(14):
            k_rows[slots[p]], v_rows[slots[p]] = keys[p], values[p]
        k_cache, v_cache = self.buffer(_packed(_flat(k_rows)), "k"), self.buffer(_packed(_flat(v_rows)), "v")
        queries: Matrix = []
        for row, pos in zip(qkv, POSITIONS, strict=True):
            turned: list[float] = []
            for start in range(0, WIDTH + kv_width, HEAD_DIM):
                for j in range(half):
                    a, b = row[start + 2 * j], row[start + 2 * j + 1]
                    c, s = math.cos(pos * freqs[j]), math.sin(pos * freqs[j])
                    turned += [a * c - b * s, b * c + a * s]
            queries.append(turned[:WIDTH])
            keys[pos], values[pos] = turned[WIDTH:], row[WIDTH + kv_width :]
        q, out = self.buffer(self.bucket * WIDTH * 4, "q"), self.buffer(self.bucket * WIDTH * 4, "attended")
        bindings = {"step": step, "qkv": self.rows(qkv, "qkv"), "freqs": self.buffer(_packed(freqs), "freqs")}
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "bucket": self.bucket}
        self.run(template("rope_append", style="interleaved", **sizes), {**bindings, "q": q, "k_cache": k_cache, "v_cache": v_cache})
        await self.check("rope_append (q)", q, 0, _flat(queries))
        await self.check("rope_append (k)", k_cache, slots[16] * kv_width, keys[16])
        await self.check("rope_append (v)", v_cache, slots[15] * kv_width, values[15])
        spec, bound = template("attention", scale=0.125, **sizes), {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
        plain = [list(range(pos + 1)) for pos in POSITIONS]
        masked = [[*(p for p in range(FIRST) if p > pos - WINDOW or p < SINKS), *bits] for pos, bits in zip(POSITIONS, MASKS, strict=True)]
        for name, buffer, seen in (("attention", step, plain), ("attention with masks", self.step(masked=True), masked)):
            self.run(spec, {"step": buffer, **bound})
            want = [v for query, chosen in zip(queries, seen, strict=True) for v in attended(query, chosen, keys, values)]
            await self.check(name, out, 0, want)

    async def tables(self) -> None:
        """`shift` and `gate`, in the largest bucket: the kernels that the engine runs, which finds them compiled."""
        arena = self.buffer(array("I", selftest_tables.ARENA).tobytes(), "arena")
        step = arena
        for name, kernel, before, after, words in selftest_tables.checks():
            step = step if before is None else self.buffer(before.tobytes(), "step with tables")
            self.run(template(kernel, bucket=self.device.token_buckets[-1]), {"step": step, "arena": arena})
            await self.check(name, step, 0, after)
            await self.check(name, arena, 0, words)

    async def recurrence(self) -> None:
        """`recur`, over runs of every kind and malformed ones: the second step goes on from the state of the first."""
        sizes = {"width": selftest_state.WIDTH, "stride": selftest_state.STRIDE, "offset": selftest_state.OFFSET}
        x, state = (
            self.values.matrix(*size) for size in ((selftest_state.BUCKET, sizes["width"]), (selftest_state.SLOTS, sizes["stride"]))
        )
        decay, gain = self.values.floats(sizes["width"]), self.values.floats(sizes["width"])
        bindings = {"arena": self.buffer(array("I", selftest_state.ARENA).tobytes(), "arena"), "x": self.buffer(_packed(_flat(x)), "x")}
        bindings |= {"decay": self.buffer(_packed(decay), "decay"), "gain": self.buffer(_packed(gain), "gain")}
        bindings["state"] = self.buffer(_packed(_flat(state)), "state")
        for step in selftest_state.STEPS:
            bindings["step"] = self.buffer(selftest_state.recurrence_words(step).tobytes(), "step with runs")
            bindings["out"] = self.buffer(selftest_state.BUCKET * sizes["width"] * 4, "recurrence")
            self.run(template("recur", bucket=selftest_state.BUCKET, **sizes), dict(bindings))
            out, state = selftest_state.recurrence(step, x, decay, gain, state)
            await self.check(step.name, bindings["out"], 0, _flat(out))
            await self.check(step.name, bindings["state"], 0, _flat(state))

    async def moves(self) -> None:
        """`move_slots`, of lists as long as the engine's."""
        k, v = (selftest_state.cache(first) for first in (1, 1 + selftest_state.CACHE_SLOTS * selftest_state.CACHE_WIDTH))
        caches = {"k_cache": self.buffer(k.tobytes(), "k"), "v_cache": self.buffer(v.tobytes(), "v")}
        step = self.buffer(selftest_state.moves_words().tobytes(), "slot moves")
        self.run(template("move_slots", width=selftest_state.CACHE_WIDTH, bucket=MAX_MOVES), {"step": step, **caches})
        await self.check("move_slots (k)", caches["k_cache"], 0, selftest_state.moved(k))
        await self.check("move_slots (v)", caches["v_cache"], 0, selftest_state.moved(v))

    async def all(self, formats: Collection[str] = FORMATS) -> None:
        """Every template, products with weights of `formats`, and logits of a full vocabulary (always of q8_0)."""
        step = self.step()
        await self.embed_and_norm(step)
        for fmt, add in (("f32", False), ("f16", True)):
            if fmt in formats:
                await self.linear(step, fmt, plain_block(fmt, self.values, 40, 64), add)
        if "q4_1" in formats:
            await self.linear(step, "q4_1", q4_1_block(self.values, 40, 64), True)
        await self.linear(step, "q8_0", q8_0_block(self.values, PERIOD, 32), False, LOGITS // PERIOD)
        await self.attention(step)
        await self.tables()
        await self.recurrence()
        await self.moves()

    def close(self) -> None:
        """Free every buffer."""
        for weight in self.weights:
            self.buffers += [weight.quants, *([weight.scales] if weight.scales else [])]
        for buffer in self.buffers:
            buffer.destroy()


async def self_test(device: Device) -> None:
    """Run every template on `device`, at small shapes, and logits of a full vocabulary. Raises DeviceError that names a wrong kernel."""
    test = SelfTest(device)
    try:
        await test.all()
    finally:
        test.close()
