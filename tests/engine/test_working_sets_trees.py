"""Masks and trees: what each token sees, what is refused, and commits by path, by count and by what the device says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pie_core.engine.errors import ChannelEmpty, ChannelError, InvalidPass, InvalidState, OutOfPages, PassFailed, UnsupportedGeometry
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.geometry import Mask, check_mask
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.values import Cell, committed
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import channel, iota, reshape
from tests.engine.fake_runner import FakeRunner, answer, limits, reference
from tests.engine.support import GREEDY, argmax, decode, greedy, running, settle, spec, traced

PREFIX = [7, 8, 9, 10, 11]
DRAFTS = [20, 21, 22, 23, 24, 25]
TREE = [-1, 0, 0, 2, 2, -1]  # two roots, branches at 0 and 2
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5]]


def tree(*parents: int, **more: Any) -> Geometry:
    return Geometry.check("buffered", tree=parents, **more)


async def length(inst: Instance, ws: WorkingSet) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    inst.length(ws, lambda value, error: future.set_exception(error) if error else future.set_result(value))
    return await future


def every(ws: WorkingSet, tokens: Sequence[int], geometry: Geometry) -> PassSpec:
    """A pass that returns the greedy token of each of its tokens."""
    t = traced(lambda: tuple(argmax(k) for k in range(len(tokens))))
    return PassSpec(tokens, [ws], geometry, [list(range(len(tokens)))], t.program, t.params)


async def verify(inst: Instance, ws: WorkingSet, tokens: Sequence[int], geometry: Geometry) -> list[Any]:
    pipe = inst.pipeline()
    outs = [await out for out in inst.submit(pipe, every(ws, tokens, geometry))]
    inst.close_pipeline(pipe)
    return outs


@pytest.mark.parametrize("prefix", [0, 5, 14, 16, 40])
async def test_a_tree_sees_what_its_branches_alone_see(prefix: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        stem = [(3 * p) % 50 for p in range(prefix)]
        if prefix:
            await inst.submit(pipe, PassSpec(stem, [ws]))[0]
        got = await verify(inst, ws, DRAFTS, tree(*TREE))
        paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5]]
        assert got == [reference([*stem, *(DRAFTS[k] for k in path)]) for path in paths]
        inst.close()


@pytest.mark.parametrize("prefix", [5, 14, 16, 31])
@pytest.mark.parametrize("path", PATHS)
async def test_a_committed_path_lies_behind_the_prefix(prefix: int, path: list[int]) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        stem = [(3 * p) % 50 for p in range(prefix)]
        inst.submit(pipe, PassSpec(stem, [ws]))
        inst.submit(pipe, PassSpec(DRAFTS, [ws], tree(*TREE)))
        inst.commit(ws, path)
        kept = [*stem, *(DRAFTS[k] for k in path)]
        assert await length(inst, ws) == len(kept) == ws.frozen
        assert ws.parents is None and len(ws.pages) == -(-len(kept) // 16)
        assert len(runner.moves) == sum(at != k for k, at in enumerate(path))
        assert await decode(inst, [30], 20, ws) == await decode(inst, [*kept, 30], 20)
        inst.close()


async def test_trees_grow_over_several_passes_and_follow_plain_drafts() -> None:
    """Indices count the buffer, not the pass; a long pass runs in chunks."""
    async with running(FakeRunner(limits(max_tokens=8))) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, PassSpec(PREFIX, [ws]))[0]
        await inst.submit(pipe, PassSpec([20, 21], [ws], BUFFERED))[0]
        got = await verify(inst, ws, [22, 23], tree(0, -1))
        assert got == [reference([*PREFIX, 20, 22]), reference([*PREFIX, 23])]
        chain = list(range(60, 80))
        parents = [2, *range(4, 23)]
        out = await inst.submit(pipe, greedy(chain, ws, geometry=tree(*parents)))[0]
        assert out == reference([*PREFIX, 20, 22, *chain])
        fork = inst.fork(ws, buffer=True)
        assert await verify(inst, fork, [5], tree(3)) == [reference([*PREFIX, 23, 5])]
        inst.discard(ws, 21)  # the chain but for nothing, and the token before it
        inst.commit(ws, [0, 1])
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*PREFIX, 20, 21, 9])
        inst.commit(fork, [0, 2, 4])
        assert await inst.submit(pipe, greedy([9], fork))[0] == reference([*PREFIX, 20, 22, 60, 9])
        inst.close()


@pytest.mark.parametrize(("given", "dropped"), [([-1, 0], 0), ([-1, -1], 1), ([-1, 0, 0], 1), ([-1, 0, -1, 2], 2)])
async def test_a_tree_without_branches_is_a_plain_buffer_again(given: list[int], dropped: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(PREFIX, ws))[0]
        await inst.submit(pipe, PassSpec(DRAFTS[: len(given)], [ws], tree(*given)))[0]
        if dropped:
            inst.discard(ws, dropped)
        chain = DRAFTS[: len(given) - dropped]
        assert await inst.submit(pipe, greedy([30], ws, geometry=BUFFERED))[0] == reference([*PREFIX, *chain, 30])
        inst.commit(ws, len(chain))
        assert await inst.submit(pipe, greedy([31], ws, geometry=BUFFERED))[0] == reference([*PREFIX, *chain, 30, 31])
        inst.close()


async def test_a_path_over_shared_pages_disturbs_no_fork() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        stem = list(range(14))
        inst.submit(pipe, PassSpec(stem, [ws]))
        await inst.submit(pipe, PassSpec(DRAFTS, [ws], tree(*TREE)))[0]
        forks = [inst.fork(ws, buffer=True) for _ in PATHS]
        for fork, path in zip(forks, PATHS, strict=True):
            inst.commit(fork, path)
        for fork, path in zip(forks, PATHS, strict=True):
            assert await decode(inst, [40], 3, fork) == await decode(inst, [*stem, *(DRAFTS[k] for k in path), 40], 3)
        inst.commit(ws, [])
        assert await decode(inst, [40], 3, ws) == await decode(inst, [*stem, 40], 3)
        inst.close()


async def test_a_path_that_needs_copies_over_the_limit_of_its_instance_fails_with_numbers() -> None:
    async with running(FakeRunner(limits(pages=4))) as engine:
        inst = engine.open_instance("t", limits=InstanceLimits(pages=2))
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(list(range(14)), [ws]))
        await inst.submit(pipe, PassSpec(DRAFTS, [ws], tree(*TREE)))[0]
        fork = inst.fork(ws, buffer=True)
        inst.commit(fork, [5])
        with pytest.raises(OutOfPages, match=r"1 pages of the path are shared.*holds 2 KV pages, its limit is 2"):
            await inst.submit(pipe, greedy([1], fork))[0]
        inst.close()


# --- masks


def shown(ids: Sequence[int], rows: Sequence[Sequence[bool]], k: int) -> int:
    """The greedy token of token `k`, which sees what its row shows."""
    return answer([(token, p) for p, token in enumerate(ids) if p < len(rows[k]) and rows[k][p]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["folding", "buffered"])
@pytest.mark.parametrize("stem", [0, 3, 30, 64])
async def test_masks_hide_tokens(stem: int, mode: str, packed: bool) -> None:
    async with running(FakeRunner(limits(max_tokens=8))) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        ids, new = [p % 80 for p in range(stem)], [50, 51, 52, 53, 54]
        if stem:
            await inst.submit(pipe, PassSpec(ids, [ws]))[0]
        total = stem + len(new)
        rows = [[p == stem + k or (p <= stem + k and (5 * p + k) % 3 > 0) for p in range(total)] for k in range(len(new))]
        given: Any = rows
        if packed:
            given = [
                [sum(1 << b for b in range(32) if 32 * w + b < total and row[32 * w + b]) for w in range(-(-total // 32))] for row in rows
            ]
        got = await verify(inst, ws, new, Geometry.check(mode, mask=given))
        assert got == [shown([*ids, *new], rows, k) for k in range(len(new))]
        assert ws.recipe.known == stem, "what was made under a mask has no recipe"
        inst.close()


async def test_a_mask_with_window_sinks_and_a_tree() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        stem = list(range(40))
        await inst.submit(pipe, PassSpec(stem, [ws]))[0]
        fork = inst.fork(ws, pipe)
        rows = [[p == 40 + k or (p < 40 and p % 7 > 0) for p in range(42)] for k in range(2)]
        got = await verify(inst, ws, [50, 51], Geometry.check("folding", 9, 3, mask=rows))
        window = [[p for p in range(41 + k) if rows[k][p] and (p > 31 + k or p < 3)] for k in range(2)]
        assert got == [answer([([*stem, 50, 51][p], p) for p in seen]) for seen in window]
        got = await verify(inst, fork, [60, 61, 62], tree(-1, 0, 0, window=2, sinks=4))
        assert got[2] == answer([*((t, t) for t in range(4)), (60, 40), (62, 41)])
        got = await verify(inst, fork, [63], tree(2, window=2, sinks=4, mask=[[p > 1 for p in range(44)]]))
        assert got == [answer([(2, 2), (3, 3), (62, 41), (63, 42)])]
        inst.close()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"mask": [[True, True]]}, InvalidPass, "1 entries for the 2 tokens"),
        ({"mask": [[True] * 6] * 2}, InvalidPass, "6 entries, but the set holds 5 tokens and the pass adds 2: 7 entries, or 1 words"),
        ({"mask": [[1, 0], [1, 0]]}, InvalidPass, "2 words, but the set holds 5"),
        ({"mask": [[True] * 7, [True] * 7]}, InvalidPass, r"mask\[0\] shows token 6, which comes after the token's own place 5"),
        ({"mask": [[True] * 5 + [False] * 2] * 2}, InvalidPass, r"mask\[0\] hides the token's own place 5"),
        ({"mask": [[True] * 7, [True]]}, InvalidPass, r"mask\[1\] has 1 entries and mask\[0\] has 7"),
        ({"mask": [[True, 2], [True, True]]}, InvalidPass, r"mask\[0\] must hold bools"),
        ({"mask": [[1 << 32], [0]]}, InvalidPass, r"mask\[0\] must hold whole numbers"),
        ({"mask": []}, InvalidPass, "must be a list of rows"),
        ({"mask": [[1], [1]], "width": 40}, InvalidPass, "width=40 does not fit rows of 1 words: 1 .. 32 tokens do"),
        ({"mask": [[1 << 5], [1 << 6]], "width": 9}, InvalidPass, "9 entries"),
        ({"tree": [-1]}, InvalidPass, "tree has 1 entries for the 2 tokens"),
        ({"tree": [-1, 1]}, InvalidPass, r"tree\[1\] = 1 is not in the buffer yet: it holds 0 tokens before the pass.*-1 .. 0"),
        ({"tree": [-1, -2]}, InvalidPass, r"tree\[1\] = -2 must be an index"),
        ({"tree": 3}, InvalidPass, "must list the parent"),
        ({"tree": [-1, -1], "mode": "folding"}, UnsupportedGeometry, r"branches.*use buffered\(tree=…\)"),
    ],
)
async def test_what_does_not_fit_is_refused_with_sizes(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(PREFIX, [ws]))
        with pytest.raises(error, match=words):
            await inst.submit(pipe, greedy([1, 2], ws, geometry=Geometry.check(**({"mode": "buffered"} | fields))))[0]
        inst.close()


async def test_a_folding_chain_is_plain() -> None:
    geometry = Geometry.check("folding", tree=[-1, 0, 1])
    assert geometry == Geometry()


async def test_shaped_passes_extend_one_set_and_continue_trees_explicitly() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        a, b, pipe = inst.working_set(), inst.working_set(), inst.pipeline()
        with pytest.raises(InvalidPass, match="extends one working set, this one has 2"):
            inst.submit(pipe, PassSpec([[1], [2]], [a, b], tree(-1)))
        await inst.submit(pipe, PassSpec([1, 2], [a], tree(-1, -1)))[0]
        with pytest.raises(InvalidState, match="buffer of 2 tokens is a tree"):
            await inst.submit(pipe, greedy([3], a, geometry=BUFFERED))[0]
        inst.close()


async def test_masks_that_no_step_can_hold_are_refused_and_large_ones_take_several() -> None:
    runner = FakeRunner(limits(max_tokens=32, mask_words=64, context=512))
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        n = 20
        rows = [[p == k or (p <= k and p % 2 == 1) for p in range(n)] for k in range(n)]
        out = await inst.submit(pipe, greedy(list(range(n)), ws, geometry=Geometry.check(mask=rows)))[0]
        assert out == shown(list(range(n)), rows, n - 1)
        assert len(runner.batches) == 1
        wide = [[p == 20 + k or (p % 2 == 1 and p < 20) for p in range(60)] for k in range(40)]
        out = await inst.submit(pipe, greedy(list(range(40)), ws, geometry=Geometry.check(mask=wide)))[0]
        assert out == shown([*range(20), *range(40)], wide, 39)
        assert len(runner.batches) > 3
        t = traced(argmax)
        with pytest.raises(InvalidPass, match=r"masks of 30 tokens.*take 150 words, a step has 64"):
            hidden = [[p == 60 + k for p in range(90)] for k in range(30)]
            await inst.submit(pipe, PassSpec(list(range(30)), [ws], Geometry.check(mask=hidden), [[0]], t.program, t.params))[0]
        inst.close()


async def test_tokens_of_a_channel_under_a_tree_run_in_one_step_or_not_at_all() -> None:
    async with running(FakeRunner(limits(mask_words=30))) as engine:
        inst = engine.open_instance("t")
        pipe = inst.pipeline()
        cells = [inst.channel("u32", (n,), 1, seed=range(20, 20 + n)) for n in (4, 20)]
        assert await inst.submit(pipe, greedy(cells[0], inst.working_set(), geometry=tree(-1, 0, 0, 2)))[0] == reference([20, 22, 23])
        with pytest.raises(InvalidPass, match="masks of 20 tokens that must run in one step take 60 words, a step has 30"):
            await inst.submit(pipe, greedy(cells[1], inst.working_set(), geometry=tree(*range(-1, 19))))[0]
        inst.close()


# --- commits


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ([0, 3], r"path\[1\] = 3 does not follow token 0: its parent is 2"),
        ([1], r"path\[0\] = 1 does not follow the frozen prefix: its parent is 0"),
        ([0, 2, 9], r"path\[2\] = 9 is not in the buffer of 6 tokens"),
        ([0, -1], r"path\[1\] = -1 is not in the buffer"),
        (3, r"token 2 does not continue the 2 before it \(its parent is 0\)"),
        (2, r"token 2 does not continue the 2 before it"),
        (7, "holds 6 tokens"),
    ],
)
async def test_an_impossible_commit_fails_the_next_use(what: Any, words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(PREFIX, [ws]))
        await inst.submit(pipe, PassSpec(DRAFTS, [ws], tree(*TREE)))[0]
        inst.commit(ws, what)
        with pytest.raises(InvalidState, match=words):
            await inst.submit(pipe, greedy([1], ws))[0]
        inst.close()


async def test_a_count_commits_the_stem_of_a_tree() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(PREFIX, [ws]))
        await inst.submit(pipe, PassSpec([20, 21, 22, 23], [ws], tree(-1, 0, 1, 1)))[0]
        inst.commit(ws, 2)
        assert await verify(inst, ws, [24], tree(1)) == [reference([*PREFIX, 20, 21, 23, 24])]
        inst.commit(ws, [1, 2])
        assert await inst.submit(pipe, greedy([30], ws))[0] == reference([*PREFIX, 20, 21, 23, 24, 30])
        inst.close()


async def test_truncate_forgets_fork_points_behind_it() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(PREFIX, [ws]))
        await inst.submit(pipe, PassSpec([20, 21], [ws], BUFFERED))[0]
        inst.drop(inst.fork(ws, buffer=True))  # at 7
        inst.discard(ws)
        await inst.submit(pipe, PassSpec([30, 31, 32], [ws]))[0]
        inst.truncate(ws, 7)
        with pytest.raises(InvalidState, match=r"frozen prefix of 8 tokens; allowed: 8, or where it was made or forked: 0, 5;"):
            await inst.submit(pipe, greedy([1], ws))[0]
        inst.close()


# --- commits by what the device says


def counts(ws: WorkingSet, tokens: Sequence[int], ch: Any, value: Any, geometry: Geometry = BUFFERED) -> PassSpec:
    """A buffered pass that puts `value()` into `ch`."""

    def fn() -> Any:
        channel.put(ch, value())
        return argmax()

    return spec(tokens, [ws], fn, geometry)


async def test_a_count_on_the_device_holds_up_only_what_depends_on_it() -> None:
    """Draft, commit what the device accepts, drop the rest and go on: all submitted at once."""
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws, other, pipe = inst.working_set(), inst.working_set(), inst.pipeline()
        ch = inst.channel("u32", (), 1, host="reader")
        await inst.submit(pipe, PassSpec(PREFIX, [ws]))[0]
        runner.hold = True
        inst.submit(pipe, counts(ws, [20, 21, 22], ch, lambda: reshape(iota(1) + 2, ())))
        inst.commit(ws, ch)
        inst.discard(ws)
        after = inst.submit(pipe, greedy([9], ws))[0]
        await settle()
        free = inst.submit(inst.pipeline(), greedy([1], other))[0]
        await settle()
        assert [batch.n_tokens for batch in runner.batches] == [5, 3, 1], "others go on, behind the step that counts"
        runner.hold = False
        runner.release()
        assert await free == reference([1])
        assert await after == reference([*PREFIX, 20, 21, 9])
        assert await length(inst, ws) == 8
        inst.close()


async def test_a_path_on_the_device_ends_before_its_first_negative() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        ch = inst.channel("u32", (2,), 1, host="reader")
        inst.submit(pipe, PassSpec(PREFIX, [ws]))
        inst.submit(pipe, counts(ws, [20, 21, 22], ch, lambda: iota(2) + iota(2), tree(-1, -1, 0)))
        inst.commit(ws, ch)  # [0, 2]
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*PREFIX, 20, 22, 9])
        inst.close()


@pytest.mark.parametrize(
    ("value", "want"),
    [(3, 3), (Cell("i32", (3,), b"\0\0\0\0\2\0\0\0\xff\xff\xff\xff"), [0, 2]), (Cell("u32", (1,), b"\1\0\0\0"), [1]),
     (Cell("i32", (1,), b"\xff\xff\xff\xff"), [])],
)  # fmt: skip
def test_values_that_commit(value: Any, want: Any) -> None:
    assert committed(value) == want


@pytest.mark.parametrize("value", [True, 1.5, None, Cell("f32", (2,), bytes(8)), Cell("i32", (1, 2), bytes(8))])
def test_values_that_do_not(value: Any) -> None:
    with pytest.raises(InvalidState, match="neither how many tokens nor which"):
        committed(value)


async def test_a_count_that_never_comes_or_cannot_be_fails_the_set() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        pipe = inst.pipeline()
        ws, ch = inst.working_set(), inst.channel("u32", (), 1, host="reader")
        inst.commit(ws, ch)
        with pytest.raises(ChannelEmpty):
            await inst.submit(pipe, greedy([1], ws))[0]
        ws = inst.working_set()
        inst.submit(pipe, counts(ws, [20], ch, lambda: reshape(iota(1) + 2, ())))
        inst.commit(ws, ch)
        with pytest.raises(InvalidState, match=r"commit\(2\): the buffer of the working set holds 1"):
            await inst.submit(pipe, greedy([1], ws))[0]
        ws, plain = inst.working_set(), inst.channel("u32")
        with pytest.raises(ChannelError, match="device-only"):
            inst.commit(ws, plain)
        with pytest.raises(ChannelError, match="device-only"):
            await inst.submit(pipe, greedy([1], ws))[0]
        inst.close()


async def test_a_failed_pass_fails_the_commit_that_waits_for_it() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        pipe, producer = inst.pipeline(), inst.pipeline()
        ws, other, ch = inst.working_set(), inst.working_set(), inst.channel("u32", (), 1, host="reader")
        await inst.submit(pipe, PassSpec([20, 21], [ws], BUFFERED))[0]
        runner.fail_results = lambda batch: RuntimeError("injected")
        inst.submit(producer, counts(other, [1], ch, lambda: reshape(iota(1) + 1, ())))
        inst.commit(ws, ch)
        with pytest.raises(PassFailed, match="injected"):
            await inst.submit(pipe, greedy([3], ws))[0]
        inst.close()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_closing_while_a_commit_waits(moment: str) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t", limits=InstanceLimits())
        ws, pipe, ch = inst.working_set(), inst.pipeline(), inst.channel("u32", (), 1, host="reader")
        runner.hold = True
        inst.submit(pipe, counts(ws, [20], ch, lambda: reshape(iota(1) + 1, ())))
        inst.commit(ws, ch)
        if moment == "after":
            inst.drop(ws)
        await settle()
        inst.close()
        assert engine.pool.used == 0


async def test_committed_paths_are_not_shared_under_the_ids_of_other_drafts() -> None:
    """The buffer's plain drafts have a recipe; a path that skips one of them must not keep it."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        drafts = list(range(30, 46))
        await inst.submit(pipe, PassSpec(drafts, [ws], BUFFERED))[0]
        await inst.submit(pipe, PassSpec([50], [ws], tree(14)))[0]
        inst.commit(ws, [*range(15), 16])
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*drafts[:15], 50, 9])
        assert ws.recipe.known == 15
        assert await decode(inst, [*drafts, 9], 1) == [reference([*drafts, 9])]
        inst.close()


def test_a_mask_is_kept_as_it_is() -> None:
    mask = Mask((1,), 1, 1)
    assert check_mask(mask) is mask and check_mask(None) is None
    assert GREEDY.single
