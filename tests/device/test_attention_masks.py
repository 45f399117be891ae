"""Attention with mask blocks on the cpu device and on both webgpu variants: against NumPy, against no mask, and malformed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels_wgsl import shapes
from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import Buffer, Device, Launch, ParamValue
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import open_cpu_device
from tests.device import oracles
from tests.device.oracles import Mask, Step, Token
from tests.support.lavapipe import as_gpu, lavapipe

Array = NDArray[Any]
NAN = np.float32(np.nan)
HEADS, KV_HEADS, SCALE = 6, 2, 0.3
# Across a word of bits, a page, a round of 64 keys, and the 256 keys that a software adapter looks up at a time.
LENGTHS = (1, 2, 16, 17, 31, 32, 33, 64, 65, 130, 257, 300)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu software", "webgpu gpu"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return {"cpu": lambda: cpu, "webgpu software": lavapipe, "webgpu gpu": as_gpu}[request.param]()


class Launcher:
    """Runs kernels over NumPy arrays and frees their buffers."""

    def __init__(self, device: Device) -> None:
        self.device = device

    async def __call__(
        self, name: str, arrays: Mapping[str, Array], results: Sequence[str], params: Mapping[str, ParamValue]
    ) -> list[oracles.F32]:
        """The content of `results` after template `name` over `arrays`."""
        buffers: dict[str, Buffer] = {}
        for key, array in arrays.items():
            buffers[key] = self.device.create_buffer(array.nbytes, key)
            self.device.write(buffers[key], 0, np.ascontiguousarray(array).tobytes())
        self.device.compile_plan([Launch(self.device.compile(template(name, **params)), buffers)]).run()
        read = [np.frombuffer(await self.device.read(buffers[r], 0, arrays[r].nbytes), np.float32) for r in results]
        for buffer in buffers.values():
            buffer.destroy()
        return [values.reshape(arrays[r].shape) for values, r in zip(read, results, strict=True)]


async def attend(device: Device, step: Step | Array, q: Array, kv: Sequence[Array]) -> oracles.F32:
    """`attention` over the step, with one row of padding that must stay as it was."""
    rows, heads, head_dim = q.shape
    pad = np.full((1, heads, head_dim), NAN)
    words = step.words() if isinstance(step, Step) else step
    words = np.concatenate([words, np.zeros(-len(words) % 4, np.uint32)])  # what webgpu rounds buffers up to
    arrays = {
        "step": words,
        "q": np.concatenate([q, pad]),
        "k_cache": kv[0],
        "v_cache": kv[1],
        "out": np.full((rows + 1, heads, head_dim), NAN),
    }
    params: dict[str, ParamValue] = {"heads": heads, "kv_heads": KV_HEADS, "head_dim": head_dim, "scale": SCALE, "bucket": rows + 1}
    (got,) = await Launcher(device)("attention", arrays, ["out"], params)
    assert np.isnan(got[rows]).all(), "a padding row was written"
    return got[:rows]


@dataclasses.dataclass
class Case:
    """Sequences of `lengths` stored tokens over scattered pages, one query at the end of each."""

    rng: np.random.Generator
    lengths: Sequence[int]
    head_dim: int = 16

    def __post_init__(self) -> None:
        pages = [-(-n // 16) for n in self.lengths]
        free = iter(self.rng.permutation(sum(pages) + 3).tolist())
        self.tables = [tuple(next(free) for _ in range(n)) for n in pages]
        self.q = self.rng.standard_normal((len(self.lengths), HEADS, self.head_dim)).astype(np.float32)
        self.kv = self.rng.standard_normal((2, (sum(pages) + 3) * 16, KV_HEADS, self.head_dim)).astype(np.float32)

    def step(self, tokens: Sequence[Token]) -> Step:
        return Step(tokens, tables=self.tables)

    def seen_only(self, step: Step) -> Array:
        """The caches with NaN in every slot that no token sees."""
        seen = np.concatenate([np.array(step.slots(t.seq))[oracles.visible(t)] for t in step.tokens])
        kv = np.full_like(self.kv, NAN)
        kv[:, seen] = self.kv[:, seen]
        return kv


GEOMETRIES: list[dict[str, int]] = [{}, {"window": 5}, {"window": 20, "sinks": 3}, {"window": 64, "sinks": 40}, {"window": 1 << 30}]
FIRSTS = {"all bits": lambda n: 0, "half": lambda n: n // 2, "one bit": lambda n: n - 1, "no bits": lambda n: n}


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
async def test_a_mask_that_states_the_geometry_changes_no_bit(device: Device, geometry: dict[str, int], first: str) -> None:
    """Every key of the plain rule set, from a key on: the same bits as without a mask, the full mask included."""
    case = Case(np.random.default_rng(1), LENGTHS)
    plain = [Token(pos=n - 1, seq=i, **geometry) for i, n in enumerate(LENGTHS)]
    starts = [FIRSTS[first](n) for n in LENGTHS]
    masked = [
        dataclasses.replace(t, mask=Mask(start, t.pos + 1, [p for p in oracles.visible(t) if p >= start]))
        for t, start in zip(plain, starts, strict=True)
    ]
    want = await attend(device, case.step(plain), case.q, case.kv)
    np.testing.assert_array_equal(await attend(device, case.step(masked), case.q, case.kv), want)


def random_tokens(rng: np.random.Generator, lengths: Sequence[int], share: float, geometry: Mapping[str, int]) -> list[Token]:
    """One masked token a sequence: a random first key, `share` of the others seen, its own always."""
    tokens = []
    for i, n in enumerate(lengths):
        first = int(rng.integers(0, n))
        keys = [k for k in range(first, n - 1) if rng.random() < share]
        tokens.append(Token(pos=int(rng.integers(first, n)), place=n - 1, seq=i, mask=Mask(first, n, [*keys, n - 1]), **geometry))
    return tokens


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("geometry", GEOMETRIES[:3])
async def test_random_masks(device: Device, geometry: dict[str, int], share: float) -> None:
    rng = np.random.default_rng(int(share * 100))
    case = Case(rng, LENGTHS)
    step = case.step(random_tokens(rng, LENGTHS, share, geometry))
    kv = case.seen_only(step)
    want = oracles.attention(step, case.q, (kv[0], kv[1]), KV_HEADS, SCALE)
    np.testing.assert_allclose(await attend(device, step, case.q, kv), want, rtol=0, atol=5e-6 * float(np.abs(want).max()))


@pytest.mark.parametrize("head_dim", [4, 20, 64, 80, 128, 256])
async def test_head_sizes(device: Device, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    case = Case(rng, (40, 90), head_dim)
    step = case.step(random_tokens(rng, case.lengths, 0.4, {"window": 9}))
    kv = case.seen_only(step)
    want = oracles.attention(step, case.q, (kv[0], kv[1]), KV_HEADS, SCALE)
    np.testing.assert_allclose(await attend(device, step, case.q, kv), want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


FAR = {"the ends of 70 words": (0, 2240, [0, 2239]), "behind 600 keys": (600, 1700, [1699, 650]), "a last bit alone": (1, 1025, [1024])}


@pytest.mark.parametrize("far", FAR)
async def test_bits_far_apart(device: Device, far: str) -> None:
    first, count, keys = FAR[far]
    case = Case(np.random.default_rng(7), (count,))
    step = case.step([Token(pos=count - 1, mask=Mask(first, count, keys))])
    kv = case.seen_only(step)
    want = oracles.attention(step, case.q, (kv[0], kv[1]), KV_HEADS, SCALE)
    np.testing.assert_allclose(await attend(device, step, case.q, kv), want, rtol=0, atol=5e-6 * float(np.abs(want).max()))


async def test_a_row_does_not_depend_on_its_batch(device: Device) -> None:
    """Masked and plain tokens mixed: each alone, all turned around, and copies of one agree bit for bit."""
    rng = np.random.default_rng(3)
    case = Case(rng, LENGTHS)
    tokens = random_tokens(rng, LENGTHS, 0.5, {"window": 20, "sinks": 3})
    tokens = [t if i % 2 else Token(pos=LENGTHS[i] - 1, seq=i) for i, t in enumerate(tokens)]
    together = await attend(device, case.step(tokens), case.q, case.kv)
    for i, token in enumerate(tokens):
        alone = await attend(device, case.step([token]), case.q[i : i + 1], case.kv)
        np.testing.assert_array_equal(alone[0], together[i], f"token {i} alone")
    turned = await attend(device, case.step(tokens[::-1]), case.q[::-1].copy(), case.kv)
    np.testing.assert_array_equal(turned, together[::-1])
    for i in (8, 9):
        copies = await attend(device, case.step([tokens[i]] * 5), np.repeat(case.q[i : i + 1], 5, 0), case.kv)
        np.testing.assert_array_equal(copies, np.repeat(together[i : i + 1], 5, 0))


TREES = {  # tokens in front of the tree, parents of its nodes (-1: the last of those tokens)
    "one node": (5, [-1]),
    "three branches": (14, [-1, -1, -1, 0, 1, 1, 2, 3, 7]),
    "two roots, nothing in front": (0, [-1, 0, -1, 2, 2, 1]),
    "binary, 63 nodes": (30, [-1, *[(i - 1) // 2 for i in range(1, 63)]]),
    "a chain": (60, [-1, *range(20)]),
    "wide": (250, [-1] * 12),
}


def chain(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from a root to `node`."""
    up = [node]
    while parents[up[-1]] >= 0:
        up.append(parents[up[-1]])
    return up[::-1]


@pytest.mark.parametrize("geometry", [{}, {"window": 4, "sinks": 1}, {"window": 17}])
@pytest.mark.parametrize("tree", TREES)
async def test_a_tree_equals_each_of_its_paths_alone(device: Device, tree: str, geometry: dict[str, int]) -> None:
    """rope_append and attention over all nodes at once give each node the bits of its path in a sequence of its own."""
    before, parents = TREES[tree]
    rng, dim = np.random.default_rng(before), 16
    freqs = (100.0 ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32)
    sizes: dict[str, ParamValue] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": dim}
    width = HEADS + 2 * KV_HEADS
    pages = -(-(before + len(parents)) // 16)
    table = tuple(rng.permutation(pages + 2).tolist()[:pages])
    stored = np.full((2, (pages + 2) * 16, KV_HEADS, dim), NAN, np.float32)
    stored[:, Step([], tables=[table]).slots(0)[:before]] = rng.standard_normal((2, before, KV_HEADS, dim))
    qkv = rng.standard_normal((len(parents), width, dim)).astype(np.float32)

    async def run(tokens: Sequence[Token], rows: Array) -> oracles.F32:
        step = Step(tokens, tables=[table])
        words = step.words()
        words = np.concatenate([words, np.zeros(-len(words) % 4, np.uint32)])
        arrays = {"step": words, "qkv": rows, "freqs": freqs, "q": np.zeros((len(rows), HEADS, dim), np.float32)}
        turned = await Launcher(device)(
            "rope_append",
            {**arrays, "k_cache": stored[0], "v_cache": stored[1]},
            ["q", "k_cache", "v_cache"],
            {**sizes, "style": "half", "bucket": len(rows)},
        )
        return await attend(device, step, turned[0], turned[1:])

    nodes = []
    for node in range(len(parents)):
        path = chain(parents, node)
        pos = before + len(path) - 1
        # In the tree a window is the author's to state: a node's position is its depth.
        seen = [before + n for depth, n in enumerate(path) if before + depth in oracles.visible(Token(pos=pos, **geometry))]
        nodes.append(Token(pos=pos, place=before + node, mask=Mask(before, before + node + 1, seen), **geometry))
    got = await run(nodes, qkv)
    leaves = sorted(set(range(len(parents))) - set(parents))
    for leaf in leaves if len(leaves) < 8 else leaves[::7]:
        path = chain(parents, leaf)
        alone = await run([Token(pos=before + depth, **geometry) for depth in range(len(path))], qkv[path])
        np.testing.assert_array_equal(got[path], alone, f"path {path}")


POS_WORD, PAGES_WORD, WINDOW_WORD, SINKS_WORD, MASK_WORD = 2, 4, 5, 6, 7
HUGE = 0xFFFFFFFF
HEADER_BLOCK = 8  # an otherwise sound block lies there
UNSEEN = {WINDOW_WORD: 4, SINKS_WORD: 0}  # no key in front of the mask
# Row 1 has the mask [first 20, count 40, one word of bits]; each change is (what, words of row 1 by index, words of its block by index).
MALFORMED: list[tuple[str, dict[int, int], dict[int, int]]] = [
    ("block behind the buffer", {MASK_WORD: 1 << 20}, {}),
    ("block at the largest offset", {MASK_WORD: HUGE}, {}),
    ("block in the header", {MASK_WORD: HEADER_BLOCK}, {}),
    ("first behind count", {}, {0: 41}),
    ("largest first", {}, {0: HUGE}),
    ("no key", {}, {0: 0, 1: 0}),
    ("no visible key", UNSEEN, {2: 0}),
    ("bits set behind count only", UNSEEN, {2: 0xFFF00000}),
    ("more keys than the cache has slots", {}, {1: 129}),
    ("largest count", {}, {1: HUGE}),
    ("largest first and count", {}, {0: HUGE, 1: HUGE}),
    ("page table behind the buffer", {PAGES_WORD: 1 << 20}, {}),
    ("page table at the largest offset", {PAGES_WORD: HUGE}, {}),
]


def malformed_case() -> tuple[Case, list[Token]]:
    """Three rows, 8 pages; row 1 sees keys 20, 33 and 39 of 40, and of those in front only the sink and a window."""
    case = Case(np.random.default_rng(11), (17, 40))
    middle = Token(pos=25, place=39, seq=1, window=10, sinks=1, mask=Mask(20, 40, [20, 33, 39]))
    case.q = np.concatenate([case.q, case.q[:1]])
    return case, [Token(pos=16, mask=Mask(3, 17, [4, 16])), middle, Token(pos=16)]


async def expect_nan_in_row_1_only(device: Device, case: Case, words: Array, what: str) -> None:
    kv = case.kv
    good = await attend(device, case.step(malformed_case()[1]), case.q, kv)
    got = await attend(device, words, case.q, kv)
    assert np.isfinite(good).all()
    assert np.isnan(got[1]).all(), what
    np.testing.assert_array_equal(got[[0, 2]], good[[0, 2]], what)


@pytest.mark.parametrize(("what", "row", "block"), MALFORMED, ids=[m[0] for m in MALFORMED])
async def test_a_malformed_mask_is_a_nan_row(device: Device, what: str, row: dict[int, int], block: dict[int, int]) -> None:
    case, tokens = malformed_case()
    words = case.step(tokens).words()
    start = int(words[16 + 8 + MASK_WORD])
    for index, value in block.items():
        words[start + index] = value
    for index, value in row.items():
        words[16 + 8 + index] = value
    words[HEADER_BLOCK : HEADER_BLOCK + 3] = [0, 5, 31]
    words = np.concatenate([words, np.zeros(64, np.uint32)])  # room for the bits of more keys
    assert len(case.kv[0]) == 128
    await expect_nan_in_row_1_only(device, case, words, what)


async def test_bits_behind_the_buffer_are_a_nan_row(device: Device) -> None:
    """The block's two sizes are the last words of the buffer; its four words of bits would lie behind it."""
    case, tokens = malformed_case()
    words = case.step(tokens).words()
    words = np.concatenate([words, np.zeros((2 - len(words)) % 4, np.uint32), np.array([20, 128], np.uint32)])
    assert len(words) % 4 == 0
    words[16 + 8 + MASK_WORD] = len(words) - 2
    await expect_nan_in_row_1_only(device, case, words, "bits")


async def test_a_page_table_that_ends_early_is_a_nan_row(device: Device) -> None:
    """Keys 0 to 127 need eight pages; the buffer ends behind the seventh."""
    case, tokens = malformed_case()
    words = case.step(tokens).words()
    block, pages = [0, 128, HUGE, HUGE, HUGE, HUGE], [1] * 7
    words = np.concatenate([words, np.zeros((3 - len(words)) % 4, np.uint32), np.array([*block, *pages], np.uint32)])
    assert len(words) % 4 == 0
    words[16 + 8 + MASK_WORD], words[16 + 8 + PAGES_WORD] = len(words) - 13, len(words) - 7
    await expect_nan_in_row_1_only(device, case, words, "page table")


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("value", [8, 1 << 28, HUGE])
async def test_a_visible_page_outside_the_cache_is_a_nan_row(device: Device, page: int, value: int) -> None:
    case, tokens = malformed_case()
    words = case.step(tokens).words()
    words[words[16 + 8 + PAGES_WORD] + page] = value
    await expect_nan_in_row_1_only(device, case, words, f"page {page}")


async def test_an_unseen_page_outside_the_cache_does_no_harm(device: Device) -> None:
    """Pages that a window or a mask has left behind may be gone."""
    case = Case(np.random.default_rng(12), (80,))
    token = Token(pos=70, place=79, window=8, mask=Mask(48, 80, [66, 79]))
    words = case.step([token]).words()
    want = await attend(device, case.step([token]), case.q, case.kv)
    table = words[16 + PAGES_WORD]
    words[[table, table + 1, table + 2, table + 3]] = HUGE
    token_sees = oracles.visible(token)
    assert min(token_sees) == 66, "the window is over in front of key 48"
    np.testing.assert_array_equal(await attend(device, words, case.q, case.kv), want)


PLAIN = [("page table", {PAGES_WORD: 1 << 30}), ("position", {POS_WORD: 1 << 20}), ("largest position", {POS_WORD: HUGE})]


@pytest.mark.parametrize(("what", "row"), PLAIN)
async def test_a_malformed_row_without_mask_is_nan(device: Device, what: str, row: dict[int, int]) -> None:
    case, tokens = malformed_case()
    words = case.step(tokens).words()
    words[16 + 8 + MASK_WORD] = 0
    for index, value in row.items():
        words[16 + 8 + index] = value
    await expect_nan_in_row_1_only(device, case, words, what)


async def test_a_position_beyond_the_keys_is_only_an_angle(device: Device) -> None:
    """With a mask, position and place part: keys in front of `first` need not be behind the position, nor near it."""
    case = Case(np.random.default_rng(13), (40, 40, 40))
    tokens = [
        Token(pos=5000, seq=0, place=39, mask=Mask(20, 40, [30, 39])),
        Token(pos=3, seq=1, place=39, mask=Mask(20, 40, [30, 39])),
        Token(pos=5000, seq=2, place=39, window=6, sinks=2, mask=Mask(20, 40, [39])),
    ]
    assert [len(oracles.visible(t)) for t in tokens] == [22, 22, 3]
    want = oracles.attention(case.step(tokens), case.q, (case.kv[0], case.kv[1]), KV_HEADS, SCALE)
    got = await attend(device, case.step(tokens), case.q, case.kv)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * float(np.abs(want).max()))


OVER = {"keys": Mask(10, 43, list(range(20, 43))), "bits": Mask(0, 96, [1, 95])}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("opened", [lavapipe, as_gpu])
async def test_more_than_a_webgpu_kernel_may_loop_over_is_a_nan_row(opened: Any, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, device = shapes.attention, opened()
    monkeypatch.setattr(shapes, "attention", lambda *args: dataclasses.replace(real(*args), positions=32))
    monkeypatch.setattr(device.kernels, "_kernels", {})
    case = Case(np.random.default_rng(10), (40, 96))
    fits = Token(pos=39, mask=Mask(10, 40, list(range(20, 40))))
    step = case.step([fits, Token(pos=60, seq=1, place=OVER[over].count - 1, mask=OVER[over])])
    got = await attend(device, step, case.q, case.kv)
    want = oracles.attention(step, case.q, (case.kv[0], case.kv[1]), KV_HEADS, SCALE)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=5e-6 * float(np.abs(want).max()))
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize(("opened", "most"), [(lavapipe, 131_072), (as_gpu, 49_152)])
async def test_the_most_keys_within_the_loop_bound_of_a_software_adapter(opened: Any, most: int) -> None:
    """Every bit of the longest mask gives what no mask gives; nothing is cut off. Then its ends alone."""
    rng = np.random.default_rng(2)
    case = Case(rng, (most,), head_dim=4)
    case.q = np.concatenate([case.q, case.q])
    tokens = [Token(pos=most - 1), Token(pos=most - 1, mask=Mask(0, most, range(most)))]
    plain, masked = await attend(opened(), case.step(tokens), case.q, case.kv)
    np.testing.assert_array_equal(masked, plain)
    assert np.abs(plain - oracles.attention(case.step(tokens[:1]), case.q[:1], (case.kv[0], case.kv[1]), KV_HEADS, SCALE)[0]).max() < 1e-5
    step = case.step([Token(pos=most - 1, mask=Mask(0, most, [0, most - 1]))])
    want = oracles.attention(step, case.q[:1], (case.kv[0], case.kv[1]), KV_HEADS, SCALE)
    assert np.abs(await attend(opened(), step, case.q[:1], case.kv) - want).max() < 1e-5
