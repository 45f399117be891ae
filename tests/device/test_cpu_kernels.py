"""Every kernel template on the cpu device against NumPy: alone, in batches, on both sides of each size switch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.protocol import Launch, ParamValue
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import open_cpu_device
from tests.device import oracles
from tests.device.oracles import Step, Token

Array = NDArray[Any]
FORMATS = ("f32", "f16", "q4_1", "q8_0")
NAN = np.float32(np.nan)
# Of the largest value. int16 activations: half a step of 1/32767 of each block's largest value, averaged over k.
TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "q4_1": 5e-5, "q8_0": 5e-5}
SWITCHES = (1, 2, 3, 4, 5, 8, 31, 32, 33, 37)  # tiles of four rows, packs of 32


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


def put(device: CpuDevice, array: Array) -> CpuBuffer:
    """A buffer with this content."""
    buffer = device.create_buffer(array.nbytes, "test")
    device.write(buffer, 0, np.ascontiguousarray(array).tobytes())
    return buffer


async def get(device: CpuDevice, buffer: CpuBuffer, shape: tuple[int, ...]) -> oracles.F32:
    """The content as f32."""
    return np.frombuffer(await device.read(buffer, 0, buffer.size), np.float32).reshape(shape)


def launch(device: CpuDevice, name: str, params: Mapping[str, ParamValue], bindings: Mapping[str, CpuBuffer]) -> None:
    device.compile_plan([Launch(device.compile(template(name, **params)), bindings)]).run()


def rows_step(count: int, reads: tuple[int, ...] = ()) -> Step:
    """`count` tokens of no interest."""
    return Step([Token(pos=i % 16) for i in range(count)], reads)


def padded(array: Array, rows: int) -> Array:
    """`array` with NaN rows below: padding must never be read."""
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), NAN, array.dtype)])


def close(got: Array, want: Array, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the largest value."""
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * float(np.abs(want).max()))


class Linear:
    """One uploaded weight and a kernel over it."""

    def __init__(self, device: CpuDevice, raw: oracles.Raw, bucket: int, *, add: bool = False, rows: str = "tokens") -> None:
        self.device, self.bucket, self.rows = device, bucket, rows
        self.m, k = raw.matrix.shape
        self.weight = device.upload(raw.fmt, self.m, k, [memoryview(raw.data)], "w")
        self.kernel = device.compile(template("linear", fmt=raw.fmt, m=self.m, k=k, add=add, rows=rows, bucket=bucket))

    async def __call__(self, x: oracles.F32, before: oracles.F32 | None = None) -> oracles.F32:
        """The rows of the product; checks that padding rows stay as they were."""
        d, n = self.device, len(x)
        step = rows_step(n) if self.rows == "tokens" else rows_step(1, (0,) * n)
        out = put(d, padded(np.full((n, self.m), NAN) if before is None else before, self.bucket).astype(np.float32))
        bindings = {"step": put(d, step.words()), "x": put(d, padded(x, self.bucket)), "quants": self.weight.quants, "out": out}
        d.compile_plan([Launch(self.kernel, {**bindings, "scales": self.weight.scales or self.weight.quants})]).run()
        got = await get(d, out, (self.bucket, self.m))
        for buffer in (bindings["step"], bindings["x"], out):
            buffer.destroy()  # type: ignore[attr-defined]
        assert np.isnan(got[n:]).all(), "a padding row was written"
        return got[:n]


@pytest.mark.parametrize("fmt", FORMATS)
async def test_linear_on_both_sides_of_each_switch(device: CpuDevice, fmt: str) -> None:
    rng = np.random.default_rng(1)
    raw = oracles.raw_weight(rng, fmt, 37, 608)  # neither 37 rows nor 19 blocks divide anything
    linear = Linear(device, raw, 40)
    x = rng.standard_normal((37, 608)).astype(np.float32)
    want = x @ raw.matrix.T
    alone = np.concatenate([await linear(x[t : t + 1]) for t in range(37)])
    close(alone, want, TOLERANCE[fmt])
    for count in SWITCHES:
        np.testing.assert_array_equal(await linear(x[:count]), alone[:count], f"a row alone and among {count} differ")
    np.testing.assert_array_equal(await linear(x[::-1].copy()), alone[::-1], "the order of rows matters")
    np.testing.assert_array_equal(await linear(np.repeat(x[:1], 6, 0)), np.repeat(alone[:1], 6, 0), "copies of a row differ")


@pytest.mark.parametrize(("m", "k"), [(1, 32), (2, 64), (4, 32), (64, 64), (65, 1536)])
@pytest.mark.parametrize("fmt", FORMATS)
async def test_linear_shapes(device: CpuDevice, fmt: str, m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    raw = oracles.raw_weight(rng, fmt, m, k)
    x = rng.standard_normal((5, k)).astype(np.float32)
    scale = float(np.abs(x @ raw.matrix.T).max()) + np.sqrt(k) * float(np.abs(raw.matrix).max())  # one row may cancel
    got = await Linear(device, raw, 8)(x)
    np.testing.assert_allclose(got, x @ raw.matrix.T, rtol=0, atol=TOLERANCE[fmt] * scale)


@pytest.mark.parametrize("fmt", FORMATS)
async def test_linear_adds_and_counts_reads(device: CpuDevice, fmt: str) -> None:
    rng = np.random.default_rng(7)
    raw = oracles.raw_weight(rng, fmt, 50, 64)
    x, before = rng.standard_normal((6, 64)).astype(np.float32), rng.standard_normal((6, 50)).astype(np.float32)
    close(await Linear(device, raw, 8, add=True)(x, before), x @ raw.matrix.T + before, TOLERANCE[fmt])
    close(await Linear(device, raw, 8, rows="reads")(x), x @ raw.matrix.T, TOLERANCE[fmt])


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
async def test_linear_holds_the_largest_products(device: CpuDevice, fmt: str) -> None:
    """All weights and activations at full scale: 32 products of 32767 * 128 must not overflow i32."""
    code = np.full((4, 32), -128 if fmt == "q8_0" else 15)
    scale, low = np.float16(1), np.float16(0)
    parts = [scale.tobytes(), low.tobytes(), b"\xff" * 16] if fmt == "q4_1" else [scale.tobytes(), b"\x80" * 32]
    raw = oracles.Raw(fmt, b"".join(parts) * 4, code.astype(np.float64))
    for sign in (1, -1):
        x = np.full((5, 32), sign * 3.0, np.float32)
        close(await Linear(device, raw, 8)(x), x @ raw.matrix.T, 1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_linear_keeps_a_bad_row_to_itself(device: CpuDevice, fmt: str, bad: float) -> None:
    rng = np.random.default_rng(5)
    raw = oracles.raw_weight(rng, fmt, 12, 64)
    linear = Linear(device, raw, 8)
    x = rng.standard_normal((6, 64)).astype(np.float32)
    want = await linear(x)
    x[3, 40] = bad
    got = await linear(x)
    assert not np.isfinite(got[3]).any()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


async def test_linear_of_zero_and_tiny_rows(device: CpuDevice) -> None:
    raw = oracles.raw_weight(np.random.default_rng(2), "q4_1", 8, 64)
    got = await Linear(device, raw, 4)(np.stack([np.zeros(64), np.full(64, 1e-38), np.full(64, 1e-44)]).astype(np.float32))
    assert (got[0] == 0).all() and (np.abs(got) < 1e-35).all()


@pytest.mark.parametrize("fmt", FORMATS)
async def test_embed(device: CpuDevice, fmt: str) -> None:
    width = 96 if fmt in ("q4_1", "q8_0") else 97
    raw = oracles.raw_weight(np.random.default_rng(1), fmt, 11, width)
    weight = device.upload(fmt, 11, width, [memoryview(raw.data)], "table")
    arena = put(device, np.array([7, 3, 11], np.uint32))
    tokens = [Token(10), Token(99, src=1), Token(11), Token(0), Token(0, src=2), Token(0, src=3)]
    out = put(device, np.full((8, width), 5, np.float32))
    bindings = {"step": put(device, Step(tokens).words()), "arena": arena, "quants": weight.quants, "out": out}
    launch(device, "embed", {"fmt": fmt, "vocab": 11, "width": width, "bucket": 8}, {**bindings, "scales": weight.scales or weight.quants})
    got = await get(device, out, (8, width))
    np.testing.assert_array_equal(got[[0, 1, 3]], raw.matrix[[10, 3, 0]].astype(np.float32))
    assert np.isnan(got[[2, 4, 5]]).all(), "an id outside the vocabulary or a source outside the arena gives a NaN row"
    assert (got[6:] == 5).all()


async def test_f16_weights_are_exact(device: CpuDevice) -> None:
    """All 2^16 halves: denormals, infinities and NaN included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    weight = device.upload("f16", 64, 1024, [memoryview(halves.tobytes())], "halves")
    out = device.create_buffer(4 << 16, "out")
    step = put(device, Step([Token(i) for i in range(64)]).words())
    bindings = {"step": step, "arena": device.create_buffer(4), "quants": weight.quants, "scales": weight.quants, "out": out}
    launch(device, "embed", {"fmt": "f16", "vocab": 64, "width": 1024, "bucket": 64}, bindings)
    np.testing.assert_array_equal(await get(device, out, (1 << 16,)), halves.astype(np.float32))


@pytest.mark.parametrize("width", [7, 64, 576, 1030])
async def test_rms_norm(device: CpuDevice, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((3, width)).astype(np.float32) * 3, rng.standard_normal(width).astype(np.float32)
    step = put(device, rows_step(3, (2, 2, 0, 1, 8)).words())
    for rows, chosen in (("tokens", [0, 1, 2]), ("reads", [2, 2, 0, 1])):
        out = put(device, np.full((8, width), NAN))
        bindings = {"step": step, "x": put(device, padded(x, 8)), "weight": put(device, weight), "out": out}
        launch(device, "rms_norm", {"width": width, "eps": 1e-5, "rows": rows, "bucket": 8}, bindings)
        got = await get(device, out, (8, width))
        close(got[: len(chosen)], oracles.rms_norm(x, weight, 1e-5)[chosen])
        assert np.isnan(got[len(chosen) :]).all(), "padding, or a read-out of a row that does not exist"


@pytest.mark.parametrize("head_dim", [4, 16, 20, 64])
@pytest.mark.parametrize("style", ["interleaved", "half"])
async def test_rope_append(device: CpuDevice, style: str, head_dim: int) -> None:
    rng = np.random.default_rng(4)
    step = Step([Token(pos=15), Token(pos=16), Token(pos=0, seq=1), Token(pos=3, seq=2)], tables=[(5, 2), (0,), (6,)])
    qkv = rng.standard_normal((4, 8, head_dim)).astype(np.float32)
    freqs = (10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    q = put(device, np.full((5, 4, head_dim), NAN))
    caches = [put(device, np.full((96, 2, head_dim), NAN)) for _ in range(2)]
    behind = put(device, np.full(1024, 7, np.float32))
    bindings = {"step": put(device, step.words()), "qkv": put(device, padded(qkv, 5)), "freqs": put(device, freqs), "q": q}
    params: dict[str, ParamValue] = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "style": style, "bucket": 5}
    launch(device, "rope_append", params, {**bindings, "k_cache": caches[0], "v_cache": caches[1]})
    turned = oracles.rotate(qkv[:, :6], np.array([t.pos for t in step.tokens]), freqs, style)
    got_q = await get(device, q, (5, 4, head_dim))
    got_k, got_v = [await get(device, cache, (96, 2, head_dim)) for cache in caches]
    close(got_q[:4], turned[:, :4])
    slots = [95, 32, 0]
    assert slots == [step.slot(t) for t in step.tokens[:3]]
    close(got_k[slots], turned[:3, 4:])
    np.testing.assert_array_equal(got_v[slots], qkv[:3, 6:])
    others = np.setdiff1d(np.arange(96), slots)
    assert np.isnan(got_q[4:]).all() and np.isnan(got_k[others]).all() and np.isnan(got_v[others]).all()
    assert (await get(device, behind, (1024,)) == 7).all(), "a slot outside the cache was written"


async def test_rope_is_accurate_at_every_position_to_8191(device: CpuDevice) -> None:
    """cos and sin of pos * freq within 1e-6 of float64 (f32 rounding of the angle alone would be 5e-4 off)."""
    freqs = np.array([1.0, 0.9999, 0.37, 10_000 ** (-1 / 3), 1e-2, 1e-4, 2.0**-20, 1e-30], np.float32)
    qkv = np.zeros((128, 3, 16), np.float32)
    qkv[:, 0, 0::2] = 1  # rotating (1, 0) gives (cos, sin)
    q, caches = put(device, np.zeros((128, 16), np.float32)), [device.create_buffer(16 * 64) for _ in range(2)]
    step = device.create_buffer((16 + 128 * 8 + 512) * 4, "step")
    bindings = {"step": step, "qkv": put(device, qkv), "freqs": put(device, freqs), "q": q, "k_cache": caches[0], "v_cache": caches[1]}
    params: dict[str, ParamValue] = {"heads": 1, "kv_heads": 1, "head_dim": 16, "style": "interleaved", "bucket": 128}
    plan = device.compile_plan([Launch(device.compile(template("rope_append", **params)), bindings)])
    worst = 0.0
    for start in range(0, 8192, 128):
        tokens = [Token(pos=start + i) for i in range(128)]
        device.write(step, 0, Step(tokens, tables=[tuple(range(512))]).words().tobytes())
        plan.run()
        angle = (start + np.arange(128))[:, None] * freqs.astype(np.float64)
        worst = max(worst, float(np.abs(await get(device, q, (128, 8, 2)) - np.stack([np.cos(angle), np.sin(angle)], -1)).max()))
    assert worst < 1e-6


def attention_case(
    rng: np.random.Generator, lengths: list[int], head_dim: int, pages: int, *, heads: int = 6, **geometry: int
) -> tuple[Step, Array, Array, Array]:
    """One token at the end of each sequence, pages scattered; every unseen slot of the cache is NaN."""
    free = list(rng.permutation(pages))
    tables = [tuple(int(free.pop()) for _ in range(-(-n // 16))) for n in lengths]
    step = Step([Token(pos=n - 1, seq=i, **geometry) for i, n in enumerate(lengths)], tables=tables)
    q = rng.standard_normal((len(lengths), heads, head_dim)).astype(np.float32)
    k, v = np.full((2, pages * 16, 2, head_dim), NAN, np.float32)
    for token in step.tokens:
        seen = np.array(step.slots(token.seq))[oracles.visible(token)]
        k[seen] = rng.standard_normal((len(seen), 2, head_dim))
        v[seen] = rng.standard_normal((len(seen), 2, head_dim))
    return step, q, k, v


async def attend(device: CpuDevice, words: Array, q: Array, kv: tuple[Array, Array], bucket: int) -> oracles.F32:
    """`attention` over the step; checks that padding rows stay as they were."""
    (_, heads, head_dim), (k, v) = q.shape, kv
    out = put(device, np.full((bucket, heads, head_dim), NAN))
    bindings = {"step": put(device, words), "q": put(device, padded(q, bucket)), "k_cache": put(device, k), "v_cache": put(device, v)}
    params: dict[str, ParamValue] = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "scale": 0.3, "bucket": bucket}
    launch(device, "attention", params, {**bindings, "out": out})
    got = await get(device, out, (bucket, heads, head_dim))
    for buffer in (*bindings.values(), out):
        buffer.destroy()
    assert np.isnan(got[len(q) :]).all()
    return got[: len(q)]


GEOMETRIES = [
    {}, {"window": 5}, {"window": 20, "sinks": 3}, {"window": 1, "sinks": 1}, {"window": 64, "sinks": 40}, {"sinks": 4},
    {"window": 4, "sinks": 200}, {"window": 1 << 30},
]  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES)
async def test_attention_geometry(device: CpuDevice, geometry: dict[str, int]) -> None:
    lengths = [1, 2, 16, 17, 63, 64, 65, 130]
    step, q, k, v = attention_case(np.random.default_rng(5), lengths, 16, 64, **geometry)
    together = await attend(device, step.words(), q, (k, v), 9)
    close(together, oracles.attention(step, q, (k, v), 2, 0.3), 5e-6)
    for t in range(len(lengths)):
        alone = Step([step.tokens[t]], tables=step.tables)
        np.testing.assert_array_equal((await attend(device, alone.words(), q[t : t + 1], (k, v), 1))[0], together[t])
    turned = Step(step.tokens[::-1], tables=step.tables)
    np.testing.assert_array_equal(await attend(device, turned.words(), q[::-1].copy(), (k, v), 8), together[::-1])


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 4), (4, 20), (6, 64), (8, 80), (10, 128), (14, 16)])
async def test_attention_head_counts_and_sizes(device: CpuDevice, heads: int, head_dim: int) -> None:
    step, q, k, v = attention_case(np.random.default_rng(6), [3, 40], head_dim, 8, heads=heads)
    close(await attend(device, step.words(), q, (k, v), 2), oracles.attention(step, q, (k, v), 2, 0.3), 5e-6)


async def test_attention_holds_8192_positions(device: CpuDevice) -> None:
    step, q, k, v = attention_case(np.random.default_rng(8), [8192, 8191], 16, 1024)
    close(await attend(device, step.words(), q, (k, v), 2), oracles.attention(step, q, (k, v), 2, 0.3), 2e-5)


async def test_attention_of_large_scores(device: CpuDevice) -> None:
    """Scores far apart and far from zero, in both orders."""
    step, q, k, v = attention_case(np.random.default_rng(9), [100], 16, 16)
    for order in (1, -1):
        k[np.array(step.slots(0))[:100]] = q[0, 0] * np.linspace(-30, 30, 100)[::order, None, None]
        close(await attend(device, step.words(), q, (k, v), 1), oracles.attention(step, q, (k, v), 2, 0.3), 2e-5)


PAGES_WORD, POS_WORD = 4, 2


OUTSIDE = [("page table", PAGES_WORD, 1 << 31), ("position", POS_WORD, 1 << 20), ("page", None, 99)]


@pytest.mark.parametrize(("what", "word", "value"), OUTSIDE)
async def test_attention_makes_a_row_outside_the_cache_nan(device: CpuDevice, what: str, word: int | None, value: int) -> None:
    step, q, k, v = attention_case(np.random.default_rng(3), [20, 5], 16, 8)
    want = await attend(device, step.words(), q, (k, v), 2)
    words = step.words()
    if word is None:
        words[words[16 + PAGES_WORD]] = value  # the first page of the first sequence
    else:
        words[16 + word] = value
    got = await attend(device, words, q, (k, v), 2)
    assert np.isnan(got[0]).all(), what
    np.testing.assert_array_equal(got[1], want[1])
