"""Working sets: forks, buffers, geometry, the checks at submit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core.engine.errors import (
    BudgetExceeded,
    ContextLengthExceeded,
    InvalidPass,
    InvalidState,
    PipelineClosed,
    UnsupportedGeometry,
)
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.values import Cell
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import intrinsics
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import GREEDY, MODEL, argmax, decode, greedy, running, settle, spec, traced


async def length(inst: Instance, ws: WorkingSet) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    inst.length(ws, lambda value, error: future.set_exception(error) if error else future.set_result(value))
    return await future


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32, 40])
async def test_forks_share_and_diverge(prompt: int) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("fork")
        root, pipe = inst.working_set(), inst.pipeline()
        tokens = list(range(prompt))
        inst.submit(pipe, PassSpec(tokens, [root]))
        forks = [inst.fork(root, pipe) for _ in range(3)]
        sides = [root, *forks]
        got = await asyncio.gather(*(decode(inst, [k], 20, ws) for k, ws in enumerate(sides)))
        assert got == [generate([*tokens, k], 20) for k in range(4)]
        partial = int(prompt % 16 != 0)
        assert len(runner.copies) == 3 * partial, "the last to write keeps the page"
        assert len(runner.batches[0].reads) == 0
        full = prompt // 16
        assert engine.pool.used == full + sum(-(-(prompt + 20) // 16) - full for _ in sides)
        inst.close()


async def test_a_fork_is_ordered_after_what_its_pipeline_accepted() -> None:
    async with running(FakeRunner(limits(max_tokens=8))) as engine:
        inst = engine.open_instance("order")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(list(range(30)), [ws]))
        child = inst.fork(ws, pipe)
        later = inst.submit(pipe, greedy([5], ws))[0]
        grandchild = inst.fork(child)
        assert await length(inst, grandchild) == 30
        assert await inst.submit(inst.pipeline(), greedy([6], child))[0] == reference([*range(30), 6])
        assert await later == reference([*range(30), 5])
        assert await length(inst, ws) == 31
        inst.close()


async def test_a_fork_does_not_run_in_the_step_of_its_parent() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("same step")
        ws, pipe = inst.working_set(), inst.pipeline()
        parent = inst.submit(pipe, greedy([1, 2, 3], ws))[0]
        child = inst.fork(ws, pipe)
        forked = inst.submit(pipe, greedy([4], child))[0]
        assert (await parent, await forked) == (reference([1, 2, 3]), reference([1, 2, 3, 4])), "the page is copied after it was written"
        inst.close()


async def test_buffer_commit_and_discard() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("buffer")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(list(range(14)), ws))[0]
        drafts = inst.submit(pipe, greedy([50, 51, 52, 53], ws, geometry=BUFFERED))[0]
        inst.commit(ws, 2)
        inst.discard(ws, 1)
        bare, whole = inst.fork(ws, pipe), inst.fork(ws, buffer=True)
        assert await drafts == reference([*range(14), 50, 51, 52, 53])
        assert await length(inst, ws) == 17
        assert (ws.frozen, ws.length, len(ws.pages)) == (16, 17, 2)
        assert await inst.submit(pipe, greedy([7], bare))[0] == reference([*range(14), 50, 51, 7])
        assert await inst.submit(pipe, greedy([7], whole, geometry=BUFFERED))[0] == reference([*range(14), 50, 51, 52, 7])
        inst.discard(ws, 1)
        await length(inst, ws)
        assert len(ws.pages) == 1
        inst.close()


async def test_folding_over_a_buffer_is_refused() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("mixed")
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, greedy([1], ws, geometry=BUFFERED))
        with pytest.raises(InvalidState, match="1 buffered"):
            await inst.submit(pipe, greedy([2], ws))[0]
        inst.close()


@pytest.mark.parametrize(("op", "n", "words"), [("commit", 3, "holds 2"), ("discard", 3, "holds 2"), ("truncate", 99, "past the end"),
                                                ("truncate", 2, "frozen prefix of 5")])  # fmt: skip
async def test_an_impossible_edit_fails_the_next_use(op: str, n: int, words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("edit")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy([1, 2, 3, 4, 5], ws))[0]
        await inst.submit(pipe, greedy([6, 7], ws, geometry=BUFFERED))[0]
        getattr(inst, op)(ws, n)
        with pytest.raises(InvalidState, match=words):
            await inst.submit(pipe, greedy([8], ws, geometry=BUFFERED))[0]
        inst.close()


@pytest.mark.parametrize("ordered", ["without a pipeline", "in its pipeline", "in another one", "in one with work"])
@pytest.mark.parametrize("stem", [3, 70], ids=["short", "several steps"])
async def test_a_fork_holds_what_was_submitted_before_it_whoever_runs_it(ordered: str, stem: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("fork")
        ws, pipe, other = inst.working_set(), inst.pipeline(), inst.pipeline()
        tokens = list(range(stem))
        inst.submit(pipe, greedy(tokens, ws))
        inst.submit(pipe, greedy([80], ws))
        if ordered == "in one with work":
            inst.submit(other, greedy([1, 2], inst.working_set()))
        where = {"without a pipeline": None, "in its pipeline": pipe}.get(ordered, other)
        child = inst.fork(ws, where)
        later = inst.submit(pipe, greedy([81], ws))[0]
        assert await inst.submit(other, greedy([82], child))[0] == reference([*tokens, 80, 82])
        assert await later == reference([*tokens, 80, 81])
        inst.close()


async def test_a_fork_does_not_hold_what_another_pipeline_submits_behind_it() -> None:
    runner = FakeRunner(limits(max_tokens=8))
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("fork")
        ws, pipe, other = inst.working_set(), inst.pipeline(), inst.pipeline()
        inst.submit(pipe, greedy([1, 2], ws))
        inst.submit(pipe, greedy([3] * 40, inst.working_set()))  # keeps the fork waiting
        child = inst.fork(ws, pipe)
        later = inst.submit(other, greedy([81], ws))[0]
        await settle()
        runner.hold = False
        runner.release()
        assert await inst.submit(other, greedy([82], child))[0] == reference([1, 2, 82])
        assert await later == reference([1, 2, 81])
        inst.close()


async def test_truncate_to_fork_points() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("truncate")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy(list(range(20)), ws))[0]
        child = inst.fork(ws, pipe)
        await decode(inst, [1], 20, ws, pipe)
        inst.truncate(ws, 20)
        assert await decode(inst, [2], 4, ws, pipe) == generate([*range(20), 2], 4)
        assert await decode(inst, [3], 4, child, pipe) == generate([*range(20), 3], 4)
        inst.truncate(child, 0)
        await settle()
        with pytest.raises(
            InvalidState, match=r"truncate\(0\) cuts into the frozen prefix of 24 tokens; allowed: 24, or where it was made or forked: 20; "
        ):
            await inst.submit(pipe, greedy([4], child))[0]
        inst.close()


@pytest.mark.parametrize("made", ["forked", "the parent", "opened"])
async def test_what_was_frozen_when_a_buffer_was_forked_or_saved_can_be_cut_back_to(made: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("buffer")
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy([1, 2, 3, 4, 5, 6], ws))[0]
        await inst.submit(pipe, greedy([7, 8, 9], ws, geometry=BUFFERED))[0]
        if made == "opened":
            inst.save(ws, "set", lambda n, error: None)
            await settle()
            child = inst.open("set", lambda n, error: None)
            await settle()
        else:
            child = inst.fork(ws, pipe, buffer=True)
        cut = ws if made == "the parent" else child
        inst.commit(cut, 2)
        wrong = inst.fork(cut, buffer=True)
        inst.truncate(wrong, 7)
        allowed = r"frozen prefix of 8 tokens; allowed: 8 to 9; go on"
        with pytest.raises(InvalidState, match=allowed):
            await inst.submit(pipe, greedy([1], wrong))[0]
        inst.truncate(cut, 6)
        assert await inst.submit(pipe, greedy([10], cut))[0] == reference([1, 2, 3, 4, 5, 6, 10])
        inst.close()


@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (4, 2), (1, 0), (64, 3)])
async def test_windows_and_sinks(window: int, sinks: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("window")
        ws, pipe = inst.working_set(), inst.pipeline()
        tokens = list(range(25))
        geometry = Geometry("folding", window, sinks)
        assert await inst.submit(pipe, greedy(tokens, ws, geometry=geometry))[0] == reference(tokens, window, sinks)
        inst.close()


async def test_several_sets_and_reads_in_one_pass() -> None:
    async with running(FakeRunner(limits(max_tokens=16))) as engine:
        inst = engine.open_instance("multi")
        a, b, pipe = inst.working_set(), inst.working_set(), inst.pipeline()
        await inst.submit(pipe, greedy([[1, 2, 3], [9, 8]], a, b))[0]
        long, short = list(range(20)), [5, 6, 7]

        def epilogue() -> Any:
            return argmax(0), argmax(1), argmax(2), intrinsics.output(2, "logits")

        outs = inst.submit(pipe, spec([long, short], [a, b], epilogue, reads=[[18, 19], [1]]))
        x, y, z, row = [await f for f in outs]
        want = [reference([1, 2, 3, *long[:19]]), reference([1, 2, 3, *long]), reference([9, 8, 5, 6])]
        assert [x, y, z] == want
        assert isinstance(row, Cell) and row.shape == (VOCAB,) and row.tolist().index(1.0) == want[2]
        inst.close()


async def test_a_pass_without_epilogue_just_extends() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("prefill")
        ws, pipe = inst.working_set(), inst.pipeline()
        assert await inst.submit(pipe, PassSpec([1, 2], [ws]))[0] is True
        assert not runner.batches[0].reads and not runner.batches[0].epilogues
        inst.close()


async def test_dropped_sets_live_until_their_passes_end() -> None:
    async with running(FakeRunner(limits(max_tokens=8), delay=0.001)) as engine:
        inst = engine.open_instance("drop")
        ws, pipe = inst.working_set(), inst.pipeline()
        out = inst.submit(pipe, greedy(list(range(30)), ws))[0]
        child = inst.fork(ws, pipe)
        inst.drop(ws)
        with pytest.raises(InvalidState, match="dropped"):
            inst.submit(pipe, greedy([1], ws))
        assert await out == reference(list(range(30)))
        assert await inst.submit(pipe, greedy([1], child))[0] == reference([*range(30), 1])
        inst.drop(child)
        await settle()
        assert engine.pool.used == 0
        inst.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, "empty"),
    ({"tokens": "abc"}, "list of ids"),
    ({"tokens": [1, "2"]}, r"tokens\[1\] = '2'"),
    ({"tokens": [True]}, "True"),
    ({"tokens": [VOCAB]}, f"0 .. {VOCAB - 1}"),
    ({"tokens": [-1]}, "-1"),
    ({"tokens": [[1], [2]]}, "2 lists"),
    ({"reads": [[3]]}, "0 .. 2"),
    ({"reads": [[0], [0]]}, "1 working sets"),
    ({"reads": [[]]}, "looks at read-out|read-outs"),
    ({"tokens": [1] * 40, "reads": [[0]]}, "40 tokens"),
    ({"tokens": [1] * 30, "reads": [list(range(30))]}, "30 read-outs"),
    ({"params": [1]}, "0 parameters"),
    ({"state": []}, "at least one"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
async def test_bad_passes_are_refused_at_submit(fields: dict[str, Any], words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("bad")
        good = {"tokens": [1, 2, 3], "state": [inst.working_set()], "program": GREEDY.program}
        with pytest.raises(InvalidPass, match=words):
            inst.submit(inst.pipeline(), PassSpec(**(good | fields)))
        assert inst.outstanding == 0
        inst.close()


async def test_wrong_handles_are_refused() -> None:
    async with running(FakeRunner()) as engine:
        one, two = engine.open_instance("one"), engine.open_instance("two", limits=InstanceLimits(outstanding=1, handles=3))
        ws, pipe = one.working_set(), one.pipeline()
        with pytest.raises(InvalidState, match="another instance"):
            two.submit(two.pipeline(), greedy([1], ws))
        with pytest.raises(InvalidPass, match="once"):
            one.submit(pipe, greedy([[1], [2]], ws, ws))
        one.close_pipeline(pipe)
        with pytest.raises(PipelineClosed):
            one.submit(pipe, greedy([1], ws))
        mine, own = two.working_set(), two.pipeline()
        with pytest.raises(BudgetExceeded, match="3 handles"):
            two.working_set()
        two.submit(own, greedy([1], mine))
        with pytest.raises(BudgetExceeded, match="1 passes"):
            two.submit(own, greedy([1], mine))
        one.close()
        two.close()


@pytest.mark.parametrize("fields", [{"mode": "tree"}, {"mode": "folding", "graph": 1}, {"mode": "folding", "tree": [1]}])
def test_unsupported_geometry(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedGeometry):
        Geometry.check(**fields)


@pytest.mark.parametrize("fields", [{"window": -1}, {"window": 1.5}, {"sinks": 2}, {"window": True}, {"mask": 1}])
def test_bad_geometry(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidPass):
        Geometry.check("folding", **fields)


async def test_the_context_is_checked_when_a_pass_is_scheduled() -> None:
    async with running(FakeRunner(limits(context=20))) as engine:
        inst = engine.open_instance("long")
        ws, pipe = inst.working_set(), inst.pipeline()
        first = inst.submit(pipe, greedy(list(range(18)), ws))[0]
        fits, over = inst.submit(pipe, greedy([1, 2], ws))[0], inst.submit(pipe, greedy([3], ws))[0]
        ahead = inst.submit(pipe, greedy([4], ws))[0]
        with pytest.raises(ContextLengthExceeded, match=r"holds 20 tokens and the pass adds 1.*context of 20") as caught:
            await over
        assert caught.value.fields == {"length": 20, "tokens": 1, "context": 20}
        with pytest.raises(ContextLengthExceeded):
            await ahead  # it counted on the tokens of the one before
        assert await first == reference(list(range(18)))
        assert await fits == reference([*range(18), 1, 2])
        inst.truncate(ws, 0)
        assert await inst.submit(pipe, greedy([4], ws))[0] == reference([4]), "later passes may use the set again"
        inst.close()


async def test_programs_must_fit_the_model() -> None:
    from pie_core.eta import Model, reduce_argmax, trace_epilogue

    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("program")
        other = trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(VOCAB + 1, 4)).program
        ws, pipe = inst.working_set(), inst.pipeline()
        with pytest.raises(InvalidPass, match=f"{VOCAB + 1} elements"):
            inst.submit(pipe, PassSpec([1], [ws], program=other))
        rows = trace_epilogue(lambda: reduce_argmax(intrinsics.outputs("logits")), MODEL, rows=2).program
        for reads in ([[0]], [[0, 1, 2]]):
            with pytest.raises(InvalidPass, match="read-out"):
                inst.submit(pipe, PassSpec([1, 2, 3], [ws], reads=reads, program=rows))
        big = traced(lambda: tuple(intrinsics.output(k, "logits") for k in range(16))).program
        small = FakeRunner(limits(results_words=100))
        async with running(small) as tight:
            second = tight.open_instance("tight")
            with pytest.raises(InvalidPass, match="one step has 100"):
                second.submit(second.pipeline(), PassSpec([1], [second.working_set()], program=big))
            second.close()
        inst.close()


async def test_a_program_that_does_not_compile_rejects_only_its_passes() -> None:
    runner = FakeRunner()
    bad = traced(lambda: argmax() + 1)
    runner.bad_programs.add(bad.program.hash)
    async with running(runner) as engine:
        inst = engine.open_instance("compile")
        ws, pipe = inst.working_set(), inst.pipeline()
        with pytest.raises(Exception, match="shader compiler") as caught:
            inst.submit(pipe, PassSpec([1], [ws], program=bad.program, params=bad.params))
        assert type(caught.value).__name__ == "PassFailed"
        assert await decode(inst, [1], 2, ws, pipe) == generate([1], 2)
        assert runner.prepared == [GREEDY.program.hash]
        inst.close()
