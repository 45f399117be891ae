"""NumPy answers in float64 for every kernel template, and a step buffer builder; device independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pie_core.device.protocol import NONE, PAGE_TOKENS

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Mask:
    """Of the keys 0 … count - 1, those from `first` on are seen when they are in `keys`."""

    first: int
    count: int
    keys: Sequence[int] = ()

    def words(self) -> list[int]:
        """The block of docs/architecture.md, section 4."""
        seen = np.zeros(self.count - self.first + -(self.count - self.first) % 32, bool)
        seen[[key - self.first for key in self.keys]] = True
        return [self.first, self.count, *np.packbits(seen, bitorder="little").view("<u4").tolist()]


@dataclass(frozen=True)
class Token:
    """One row of a step. `seq` numbers a page table of the step; `place` is where it is stored, when that is not its position."""

    id: int = 0
    src: int = NONE
    pos: int = 0
    seq: int = 0
    window: int = 0
    sinks: int = 0
    place: int | None = None
    mask: Mask | None = None


@dataclass(frozen=True)
class Step:
    """A step buffer's content. `tables[s]` lists the pages of sequence s."""

    tokens: Sequence[Token]
    reads: Sequence[int] = ()
    tables: Sequence[Sequence[int]] = ((0,),)

    def slot(self, token: Token) -> int:
        """The KV row of `token`."""
        place = token.pos if token.place is None else token.place
        return self.tables[token.seq][place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS

    def slots(self, seq: int) -> list[int]:
        """The KV row of each position of sequence `seq`."""
        return [page * PAGE_TOKENS + i for page in self.tables[seq] for i in range(PAGE_TOKENS)]

    def words(self) -> NDArray[np.uint32]:
        """The u32 words of docs/architecture.md, section 4."""
        read_off = 16 + 8 * len(self.tokens)
        page_off = read_off + len(self.reads)
        starts, tables = [], []
        for table in self.tables:
            starts.append(page_off + len(tables))
            tables += list(table)
        words = [len(self.tokens), len(self.reads), len(self.tables), 16, read_off, page_off, *[0] * 10]
        masks: list[int] = []
        for t in self.tokens:
            block = page_off + len(tables) + len(masks) if t.mask else 0
            words += [t.id, t.src, t.pos, self.slot(t), starts[t.seq], t.window, t.sinks, block]
            masks += t.mask.words() if t.mask else []
        return np.array([*words, *self.reads, *tables, *masks], np.uint32)


@dataclass(frozen=True)
class Raw:
    """A random weight: checkpoint bytes, and the exact matrix that they hold."""

    fmt: str
    data: bytes = field(repr=False)
    matrix: F64 = field(repr=False)


def raw_weight(rng: np.random.Generator, fmt: str, rows: int, cols: int) -> Raw:
    """Random [rows, cols] in checkpoint format `fmt`."""
    if fmt in ("f32", "f16"):
        values = rng.standard_normal((rows, cols)).astype(np.float32 if fmt == "f32" else np.float16)
        return Raw(fmt, values.tobytes(), values.astype(np.float64))
    blocks = rows * cols // 32
    scale = rng.uniform(0.01, 0.03, (blocks, 1)).astype(np.float16)
    if fmt == "q8_0":
        quants = rng.integers(-128, 128, (blocks, 32)).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], 1)
        return Raw(fmt, data.tobytes(), (quants * scale.astype(np.float64)).reshape(rows, cols))
    low = rng.uniform(-0.3, -0.1, (blocks, 1)).astype(np.float16)
    nibbles = rng.integers(0, 16, (blocks, 32)).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), low.view(np.uint8), nibbles[:, :16] | nibbles[:, 16:] << 4], 1)
    return Raw(fmt, data.tobytes(), (nibbles * scale.astype(np.float64) + low).reshape(rows, cols))


def rms_norm(x: F32, weight: F32, eps: float) -> F64:
    """x * rsqrt(mean(x^2) + eps) * weight, by rows."""
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: F32, pos: NDArray[np.int64], freqs: F32, style: str) -> F64:
    """Rotary embedding of [T, heads, head_dim] at positions [T]; the angle is exact (float64)."""
    angle = pos[:, None, None] * freqs.astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    out = np.empty(x.shape, np.float64)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if style == "interleaved" else (slice(0, half), slice(half, None))
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def visible(token: Token) -> list[int]:
    """The keys that `token` sees, ascending."""
    if token.mask:
        first = [p for p in range(token.mask.first) if token.window == 0 or p > token.pos - token.window or p < token.sinks]
        return [*first, *sorted(token.mask.keys)]
    return [p for p in range(token.pos + 1) if token.window == 0 or p > token.pos - token.window or p < token.sinks]


def attention(step: Step, q: F32, caches: tuple[F32, F32], kv_heads: int, scale: float) -> F64:
    """q [T, heads, head_dim]; caches (k, v) [slots, kv_heads, head_dim]. Softmax attention over each token's visible keys."""
    k_cache, v_cache = caches
    out = np.empty(q.shape, np.float64)
    group = q.shape[1] // kv_heads
    for t, token in enumerate(step.tokens):
        slots = np.array(step.slots(token.seq))[visible(token)]
        for head in range(q.shape[1]):
            keys, values = k_cache[slots, head // group].astype(np.float64), v_cache[slots, head // group].astype(np.float64)
            scores = scale * (keys @ q[t, head].astype(np.float64))
            shares = np.exp(scores - scores.max())
            out[t, head] = shares @ values / shares.sum()
    return out
