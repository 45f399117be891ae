"""Every kernel template on lavapipe against NumPy, in the variants for software adapters and for GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels_wgsl import shapes
from pie_core.device.protocol import Launch, ParamValue
from pie_core.device.templates import template
from pie_core.device.webgpu import WebGpuDevice
from pie_core.device.webgpu_buffer import WebGpuBuffer
from tests.device import oracles
from tests.device.oracles import Step, Token
from tests.support.lavapipe import as_gpu, lavapipe

Array = NDArray[Any]
FORMATS = ("f32", "f16", "q4_1", "q8_0")
NAN = np.float32(np.nan)


@pytest.fixture(params=["software", "gpu"])
def device(request: pytest.FixtureRequest) -> WebGpuDevice:
    return lavapipe() if request.param == "software" else as_gpu()


def put(device: WebGpuDevice, array: Array) -> WebGpuBuffer:
    """A buffer with this content."""
    buffer = device.create_buffer(array.nbytes, "test")
    device.write(buffer, 0, np.ascontiguousarray(array).tobytes())
    return buffer


async def get(device: WebGpuDevice, buffer: WebGpuBuffer, shape: tuple[int, ...]) -> oracles.F32:
    """The content as f32."""
    return np.frombuffer(await device.read(buffer, 0, buffer.size), np.float32).reshape(shape)


def launch(device: WebGpuDevice, name: str, params: Mapping[str, ParamValue], bindings: Mapping[str, WebGpuBuffer]) -> None:
    device.compile_plan([Launch(device.compile(template(name, **params)), bindings)]).run()


def rows_step(count: int, reads: tuple[int, ...] = ()) -> Step:
    """`count` tokens of no interest."""
    return Step([Token(pos=i % 16) for i in range(count)], reads)


def padded(array: Array, rows: int) -> Array:
    """`array` with NaN rows below: padding must never be read."""
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), NAN, array.dtype)])


async def linear(
    device: WebGpuDevice, raw: oracles.Raw, x: oracles.F32, bucket: int, *, add: oracles.F32 | None = None, rows: str = "tokens"
) -> oracles.F32:
    """`linear` over the rows of x in a bucket; checks that padding rows stay as they were."""
    m, k = raw.matrix.shape
    weight = device.upload(raw.fmt, m, k, [memoryview(raw.data)], "w")
    before = padded(np.full((len(x), m), NAN) if add is None else add, bucket).astype(np.float32)
    step = rows_step(len(x)) if rows == "tokens" else rows_step(1, tuple([0] * len(x)))
    out = put(device, before)
    bindings = {"step": put(device, step.words()), "x": put(device, padded(x, bucket)), "quants": weight.quants, "out": out}
    bindings["scales"] = weight.scales or weight.quants  # type: ignore[assignment]
    params: dict[str, ParamValue] = {"fmt": raw.fmt, "m": m, "k": k, "add": add is not None, "rows": rows, "bucket": bucket}
    launch(device, "linear", params, bindings)
    got = await get(device, out, (bucket, m))
    assert np.isnan(got[len(x) :]).all(), "a padding row was written"
    return got[: len(x)]


def close(got: Array, want: Array, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the largest value."""
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize("bucket", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("fmt", FORMATS)
async def test_linear(device: WebGpuDevice, fmt: str, bucket: int) -> None:
    rng = np.random.default_rng(bucket)
    raw = oracles.raw_weight(rng, fmt, 37, 608)  # neither 37 rows nor 19 blocks divide any tile
    for count in sorted({1, bucket - 1 or 1, bucket}):
        x = rng.standard_normal((count, 608)).astype(np.float32)
        close(await linear(device, raw, x, bucket), x @ raw.matrix.T)


@pytest.mark.parametrize(("m", "k"), [(1, 32), (64, 64), (65, 1536)])
async def test_linear_shapes(device: WebGpuDevice, m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    raw = oracles.raw_weight(rng, "q4_1", m, k)
    for bucket in (1, 8):
        x = rng.standard_normal((bucket, k)).astype(np.float32)
        close(await linear(device, raw, x, bucket), x @ raw.matrix.T)


@pytest.mark.parametrize("bucket", [1, 4, 16])
async def test_linear_adds_and_counts_reads(device: WebGpuDevice, bucket: int) -> None:
    rng = np.random.default_rng(7)
    raw = oracles.raw_weight(rng, "q8_0", 50, 64)
    x, before = rng.standard_normal((bucket, 64)).astype(np.float32), rng.standard_normal((bucket, 50)).astype(np.float32)
    close(await linear(device, raw, x, bucket, add=before), x @ raw.matrix.T + before)
    close(await linear(device, raw, x, bucket, rows="reads"), x @ raw.matrix.T)


@pytest.mark.parametrize("bucket", [2, 4, 8, 16])
async def test_linear_row_does_not_depend_on_its_neighbours(device: WebGpuDevice, bucket: int) -> None:
    rng = np.random.default_rng(3)
    raw = oracles.raw_weight(rng, "q4_1", 40, 96)
    x = rng.standard_normal((bucket, 96)).astype(np.float32)
    together = await linear(device, raw, x, bucket)
    assert (await linear(device, raw, x[::-1].copy(), bucket) == together[::-1]).all()
    assert (await linear(device, raw, np.repeat(x[:1], bucket, 0), bucket) == together[0]).all()
    for t in {0, bucket - 1}:
        assert (await linear(device, raw, x[t : t + 1], bucket) == together[t]).all(), "alone and in a batch differ"
        close(await linear(device, raw, x[t : t + 1], 1), together[t : t + 1])


@pytest.mark.parametrize("fmt", FORMATS)
async def test_embed(device: WebGpuDevice, fmt: str) -> None:
    rng = np.random.default_rng(1)
    width = 96 if fmt in ("q4_1", "q8_0") else 97  # an f16 row of odd width starts inside a word
    raw = oracles.raw_weight(rng, fmt, 11, width)
    weight = device.upload(fmt, 11, width, [memoryview(raw.data)], "table")
    arena = put(device, np.array([7, 3, 11], np.uint32))
    tokens = [Token(10), Token(99, src=1), Token(11), Token(0), Token(0, src=2)]
    out = put(device, np.full((8, width), 5, np.float32))
    bindings = {"step": put(device, Step(tokens).words()), "arena": arena, "quants": weight.quants, "out": out}
    bindings["scales"] = weight.scales or weight.quants
    launch(device, "embed", {"fmt": fmt, "vocab": 11, "width": width, "bucket": 8}, bindings)
    got = await get(device, out, (8, width))
    np.testing.assert_array_equal(got[[0, 1, 3]], raw.matrix[[10, 3, 0]].astype(np.float32))
    assert np.isnan(got[[2, 4]]).all(), "an id outside the vocabulary must give a NaN row"
    assert (got[5:] == 5).all()


@pytest.mark.parametrize("width", [7, 64, 576, 1030])
async def test_rms_norm(device: WebGpuDevice, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((3, width)).astype(np.float32) * 3, rng.standard_normal(width).astype(np.float32)
    step = put(device, rows_step(3, (2, 2, 0, 1)).words())
    for rows, chosen in (("tokens", [0, 1, 2]), ("reads", [2, 2, 0, 1])):
        out = put(device, np.full((8, width), NAN))
        bindings = {"step": step, "x": put(device, padded(x, 8)), "weight": put(device, weight), "out": out}
        launch(device, "rms_norm", {"width": width, "eps": 1e-5, "rows": rows, "bucket": 8}, bindings)
        got = await get(device, out, (8, width))
        close(got[: len(chosen)], oracles.rms_norm(x, weight, 1e-5)[chosen])
        assert np.isnan(got[len(chosen) :]).all()


ROPE = {"heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("style", ["interleaved", "half"])
async def test_rope_append(device: WebGpuDevice, style: str) -> None:
    rng = np.random.default_rng(4)
    step = Step([Token(pos=15), Token(pos=16), Token(pos=0, seq=1)], tables=[(5, 2), (0,)])
    qkv = rng.standard_normal((3, 8, 16)).astype(np.float32)
    freqs = (10_000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    q = put(device, np.full((4, 4, 16), NAN))
    caches = [put(device, np.full((96, 2, 16), NAN)) for _ in range(2)]
    bindings = {"step": put(device, step.words()), "qkv": put(device, padded(qkv, 4)), "freqs": put(device, freqs), "q": q}
    launch(device, "rope_append", {**ROPE, "style": style, "bucket": 4}, {**bindings, "k_cache": caches[0], "v_cache": caches[1]})
    turned = oracles.rotate(qkv[:, :6], np.array([t.pos for t in step.tokens]), freqs, style)
    got_q, got_k, got_v = (
        await get(device, q, (4, 4, 16)),
        await get(device, caches[0], (96, 2, 16)),
        await get(device, caches[1], (96, 2, 16)),
    )
    close(got_q[:3], turned[:, :4])
    slots = [step.slot(t) for t in step.tokens]
    assert slots == [95, 32, 0]
    close(got_k[slots], turned[:, 4:])
    np.testing.assert_array_equal(got_v[slots], qkv[:, 6:])
    others = np.setdiff1d(np.arange(96), slots)
    assert np.isnan(got_q[3:]).all() and np.isnan(got_k[others]).all() and np.isnan(got_v[others]).all()


@pytest.mark.parametrize("slot", [96, 1 << 27, 0xFFFFFFFF])  # behind the cache; where slot * row wraps around; the largest
async def test_a_slot_outside_the_cache_stores_nothing(device: WebGpuDevice, slot: int) -> None:
    step = Step([Token(pos=3), Token(pos=4)], tables=[(5,)])
    words = step.words()
    words[16 + 3] = slot
    caches = [put(device, np.full((96, 2, 16), NAN)) for _ in range(2)]
    rows = put(device, np.ones((2, 8, 16), np.float32))
    bindings = {
        "step": put(device, words),
        "qkv": rows,
        "freqs": put(device, np.ones(8, np.float32)),
        "q": put(device, np.zeros((2, 4, 16), np.float32)),
    }
    launch(device, "rope_append", {**ROPE, "style": "half", "bucket": 2}, {**bindings, "k_cache": caches[0], "v_cache": caches[1]})
    for cache in caches:
        got = await get(device, cache, (96, 2, 16))
        assert np.isfinite(got[84]).all() and np.isnan(np.delete(got, 84, 0)).all()


async def test_rope_is_accurate_at_every_position_to_8191(device: WebGpuDevice) -> None:
    """cos and sin of pos * freq within 1e-5 of float64 (f32 rounding of the angle alone would be 5e-4 off)."""
    freqs = np.array([1.0, 0.9999, 0.37, 10_000 ** (-1 / 3), 1e-2, 1e-4, 2.0**-20, 1e-30], np.float32)
    qkv = np.zeros((64, 3, 16), np.float32)
    qkv[:, 0, 0::2] = 1  # rotating (1, 0) gives (cos, sin)
    table = put(device, freqs)
    q, caches = put(device, np.zeros((64, 16), np.float32)), [put(device, np.zeros((8192, 16), np.float32)) for _ in range(2)]
    pages = tuple(range(512))
    worst = 0.0
    params: dict[str, ParamValue] = {"heads": 1, "kv_heads": 1, "head_dim": 16, "style": "interleaved", "bucket": 64}
    kernel = device.compile(template("rope_append", **params))
    step_buffer = device.create_buffer((16 + 64 * 8 + 512) * 4, "step")
    bindings = {"step": step_buffer, "qkv": put(device, qkv), "freqs": table, "q": q, "k_cache": caches[0], "v_cache": caches[1]}
    plan = device.compile_plan([Launch(kernel, bindings)])
    for start in range(0, 8192, 64):
        step = Step([Token(pos=start + i) for i in range(64)], tables=[pages])
        device.write(step_buffer, 0, step.words().tobytes())
        plan.run()
        got = await get(device, q, (64, 8, 2))
        angle = (start + np.arange(64))[:, None] * freqs.astype(np.float64)
        worst = max(worst, float(np.abs(got - np.stack([np.cos(angle), np.sin(angle)], -1)).max()))
    assert worst < 1e-5


def attention_case(
    rng: np.random.Generator, lengths: list[int], head_dim: int, pages: int, **geometry: int
) -> tuple[Step, Array, Array, Array]:
    """One token at the end of each sequence, pages scattered; every unseen slot of the cache is NaN."""
    free = list(rng.permutation(pages))
    tables = [tuple(int(free.pop()) for _ in range(-(-n // 16))) for n in lengths]
    step = Step([Token(pos=n - 1, seq=i, **geometry) for i, n in enumerate(lengths)], tables=tables)
    q = rng.standard_normal((len(lengths), 6, head_dim)).astype(np.float32)
    k, v = np.full((2, pages * 16, 2, head_dim), NAN, np.float32)
    for token in step.tokens:
        seen = np.array(step.slots(token.seq))[oracles.visible(token)]
        k[seen] = rng.standard_normal((len(seen), 2, head_dim))
        v[seen] = rng.standard_normal((len(seen), 2, head_dim))
    return step, q, k, v


async def attend(device: WebGpuDevice, step: Step, q: Array, kv: tuple[Array, Array], bucket: int) -> oracles.F32:
    """`attention` over the step; checks that padding rows stay as they were."""
    (_, heads, head_dim), (k, v) = q.shape, kv
    out = put(device, np.full((bucket, heads, head_dim), NAN))
    bindings = {
        "step": put(device, step.words()),
        "q": put(device, padded(q, bucket)),
        "k_cache": put(device, k),
        "v_cache": put(device, v),
    }
    params: dict[str, ParamValue] = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "scale": 0.3, "bucket": bucket}
    launch(device, "attention", params, {**bindings, "out": out})
    got = await get(device, out, (bucket, heads, head_dim))
    assert np.isnan(got[len(q) :]).all()
    return got[: len(q)]


GEOMETRIES = [{}, {"window": 5}, {"window": 20, "sinks": 3}, {"window": 1, "sinks": 1}, {"window": 64, "sinks": 40}, {"sinks": 4}]


@pytest.mark.parametrize("geometry", GEOMETRIES)
async def test_attention_geometry(device: WebGpuDevice, geometry: dict[str, int]) -> None:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 16, 17, 63, 64, 65, 130]
    step, q, k, v = attention_case(rng, lengths, 16, 64, **geometry)
    together = await attend(device, step, q, (k, v), 8)
    close(together, oracles.attention(step, q, (k, v), 2, 0.3), 5e-6)
    for t in (0, 3, 7):  # alone in the same variant: bit equal
        alone = Step([step.tokens[t]], tables=step.tables)
        assert (await attend(device, alone, q[t : t + 1], (k, v), 8) == together[t]).all()
    turned = Step(step.tokens[::-1], tables=step.tables)
    assert (await attend(device, turned, q[::-1].copy(), (k, v), 8) == together[::-1]).all()


@pytest.mark.parametrize("head_dim", [4, 20, 64, 80, 128])
async def test_attention_head_sizes(device: WebGpuDevice, head_dim: int) -> None:
    step, q, k, v = attention_case(np.random.default_rng(6), [3, 40], head_dim, 8)
    close(await attend(device, step, q, (k, v), 2), oracles.attention(step, q, (k, v), 2, 0.3), 5e-6)


async def test_attention_holds_8192_positions(device: WebGpuDevice) -> None:
    step, q, k, v = attention_case(np.random.default_rng(8), [8192, 8191], 16, 1024)
    close(await attend(device, step, q, (k, v), 2), oracles.attention(step, q, (k, v), 2, 0.3), 2e-5)


async def test_attention_of_large_scores(device: WebGpuDevice) -> None:
    """Scores far apart and far from zero: the running maximum must hold in every order."""
    step, q, k, v = attention_case(np.random.default_rng(9), [100], 16, 16)
    for order in (1, -1):
        k[np.array(step.slots(0))[:100]] = q[0, 0] * np.linspace(-30, 30, 100)[::order, None, None]
        close(await attend(device, step, q, (k, v), 1), oracles.attention(step, q, (k, v), 2, 0.3), 2e-5)


async def test_attention_over_its_bound_gives_a_nan_row(device: WebGpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with more positions than the kernel may loop over is NaN, never a plausible wrong answer; others are right."""
    real = shapes.attention
    monkeypatch.setattr(shapes, "attention", lambda *args: dataclasses.replace(real(*args), positions=32))
    monkeypatch.setattr(device.kernels, "_kernels", {})
    step, q, k, v = attention_case(np.random.default_rng(10), [32, 33], 8, 16)
    got = await attend(device, step, q, (k, v), 2)
    close(got[:1], oracles.attention(step, q, (k, v), 2, 0.3)[:1], 5e-6)
    assert np.isnan(got[1]).all()
