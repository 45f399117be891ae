"""Working sets on which a pass or an edit has failed: every later use says what failed first, and `truncate` goes back to before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import ContextLengthExceeded, EngineError, InvalidState, OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put, take
from tests.engine.fake_runner import VOCAB, FakeRunner, limits, reference
from tests.engine.recurrent_runner import RecurrentRunner
from tests.engine.support import GREEDY, argmax, greedy, running, settle, spec
from tests.engine.test_reuse_control import Heard

PROMPT = [1, 2, 3, 4, 5, 6]
LATER: dict[str, Callable[[Instance, Pipeline, WorkingSet], Any]] = {
    "a pass": lambda inst, pipe, ws: inst.submit(pipe, greedy([9], ws))[0],
    "a pass without outputs": lambda inst, pipe, ws: inst.submit(pipe, PassSpec([9], [ws]))[0],
    "a fork": lambda inst, pipe, ws: inst.submit(pipe, greedy([9], inst.fork(ws)))[0],
    "a fork in a pipeline": lambda inst, pipe, ws: inst.submit(pipe, greedy([9], inst.fork(ws, pipe, buffer=True)))[0],
    "an edit": lambda inst, pipe, ws: (inst.commit(ws, 0), inst.submit(pipe, greedy([9], ws))[0])[1],
}


async def begun(engine: Engine, **more: Any) -> tuple[Instance, Pipeline, WorkingSet]:
    """A set that holds the prompt, frozen."""
    inst = engine.open_instance("failed", **more)
    ws, pipe = inst.working_set(), inst.pipeline()
    assert await inst.submit(pipe, greedy(PROMPT, ws))[0] == reference(PROMPT)
    return inst, pipe, ws


def outside(inst: Instance) -> Any:
    """A channel with an id that the device finds to be outside the vocabulary."""
    return inst.channel("u32", (1,), seed=[VOCAB])


async def fails(out: Any, kind: type[EngineError], words: str) -> str:
    with pytest.raises(kind, match=words) as caught:
        await out
    assert type(caught.value) is kind
    return caught.value.message


@pytest.mark.parametrize("settled", [True, False], ids=["at a time", "at once"])
@pytest.mark.parametrize("later", LATER)
async def test_what_comes_behind_a_pass_that_never_ran_fails_too(later: str, settled: bool) -> None:
    """It counts on tokens that are not there, whether the engine sees it before the first has failed or after."""
    async with running(FakeRunner(limits(context=40))) as engine:
        inst, pipe, ws = await begun(engine)
        long = inst.submit(pipe, greedy([7] * 40, ws))[0]
        if settled:
            await settle()
            assert long.done()
        behind = LATER[later](inst, pipe, ws)
        first = await fails(long, ContextLengthExceeded, "holds 6 tokens and the pass adds 40")
        told = await fails(behind, ContextLengthExceeded, "pass")
        assert first in told and told.count("failed:") == 1 and "fork" in told
        heard = Heard()
        inst.length(ws, heard)
        assert isinstance(heard.got[0], ContextLengthExceeded)
        inst.close()


async def test_what_was_accepted_before_goes_on() -> None:
    runner = FakeRunner(limits(context=40))
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("before")
        ws, pipe = inst.working_set(), inst.pipeline()
        first = inst.submit(pipe, greedy(PROMPT, ws))[0]
        early = inst.fork(ws, pipe)
        second = inst.submit(pipe, greedy([7] * 40, ws))[0]
        late = inst.fork(ws, pipe)
        await settle()
        await fails(second, ContextLengthExceeded, "adds 40")
        runner.hold = False
        runner.release()
        assert await first == reference(PROMPT)
        assert await inst.submit(pipe, greedy([1], early))[0] == reference([*PROMPT, 1])
        await fails(inst.submit(pipe, greedy([1], late))[0], ContextLengthExceeded, "forked from one on which a pass or an edit had failed")
        inst.close()


async def test_of_two_failures_the_first_pass_counts() -> None:
    """Though the second was told first: what it counted on was not there."""
    runner = FakeRunner(limits(context=40))
    async with running(runner) as engine:
        inst, pipe, ws = await begun(engine)
        runner.hold = True
        ids = outside(inst)
        first = inst.submit(pipe, greedy(ids, ws))[0]
        second = inst.submit(pipe, greedy([7] * 40, ws))[0]
        await settle()
        await fails(second, ContextLengthExceeded, "adds 40")
        runner.hold = False
        runner.release()
        await fails(first, PassFailed, "outside the vocabulary")
        told = await fails(inst.submit(pipe, greedy([1], ws))[0], PassFailed, "an earlier pass on this working set failed: .*vocabulary")
        assert told.endswith("truncate(6) to go back to before it")
        inst.close()


@pytest.mark.parametrize("flying", [0, 1, 3], ids=["alone", "one behind it", "several behind it"])
async def test_length_has_one_answer_behind_a_failed_pass(flying: int) -> None:
    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        bad = inst.submit(pipe, greedy(outside(inst), ws))[0]
        behind = [inst.submit(pipe, greedy([k], ws))[0] for k in range(flying)]
        if not flying:
            await fails(bad, PassFailed, "vocabulary")
        heard = Heard()
        inst.length(ws, heard)
        for out in (bad, *behind):
            await fails(out, PassFailed, "outside the vocabulary")
        await settle()
        assert isinstance(heard.got[0], PassFailed) and "an earlier pass on this working set failed" in heard.got[0].message
        inst.close()


async def long(inst: Instance, pipe: Pipeline, ws: WorkingSet, geometry: Geometry) -> Any:
    return inst.submit(pipe, greedy([7] * 600, ws, geometry=geometry))[0]


async def token(inst: Instance, pipe: Pipeline, ws: WorkingSet, geometry: Geometry) -> Any:
    return inst.submit(pipe, greedy(outside(inst), ws, geometry=geometry))[0]


async def both(inst: Instance, pipe: Pipeline, ws: WorkingSet, geometry: Geometry) -> Any:
    """A good one in between: its tokens go too."""
    bad = inst.submit(pipe, greedy(outside(inst), ws, geometry=geometry))[0]
    inst.submit(pipe, greedy([8] * 20, ws, geometry=geometry))
    return bad


@pytest.mark.parametrize("geometry", [Geometry(), BUFFERED], ids=["folding", "buffered"])
@pytest.mark.parametrize("failing", [long, token, both])
@pytest.mark.parametrize("heard", [True, False], ids=["told", "not told"])
async def test_truncate_goes_back_to_before_the_failure(failing: Any, geometry: Geometry, heard: bool) -> None:
    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        await inst.submit(pipe, greedy([11, 12], ws, geometry=geometry))[0]
        out = await failing(inst, pipe, ws, geometry)
        if heard:
            with pytest.raises(EngineError):
                await out
        inst.truncate(ws, 8)
        length = Heard()
        inst.length(ws, length)
        again = inst.submit(pipe, greedy([13], ws, geometry=geometry))[0]
        assert await again == reference([*PROMPT, 11, 12, 13])
        assert length.got == [8]
        with pytest.raises(EngineError):
            await out
        inst.close()


@pytest.mark.parametrize("n", [9, 7, 5])
async def test_truncate_does_not_go_back_to_what_was_not_there_or_is_frozen(n: int) -> None:
    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        await inst.submit(pipe, greedy([11, 12], ws))[0]
        await fails(inst.submit(pipe, greedy([7] * 600, ws))[0], ContextLengthExceeded, "adds 600")
        inst.truncate(ws, n)
        await fails(inst.submit(pipe, greedy([13], ws))[0], ContextLengthExceeded, "earlier pass .* failed: .*truncate.8. to go back")
        inst.truncate(ws, 0)  # where it was made
        assert await inst.submit(pipe, greedy([13], ws))[0] == reference([13])
        inst.close()


async def test_a_failed_step_cannot_be_gone_back_behind() -> None:
    """Copies of pages went with it."""
    runner = FakeRunner()
    async with running(runner) as engine:
        inst, pipe, ws = await begun(engine)
        runner.fail_results = lambda batch: DeviceError("hiccup")
        await fails(inst.submit(pipe, greedy([1], ws))[0], PassFailed, "hiccup")
        runner.fail_results = lambda batch: None
        inst.truncate(ws, 6)
        told = await fails(inst.submit(pipe, greedy([1], ws))[0], PassFailed, "an earlier pass on this working set failed: .*hiccup")
        assert "truncate" not in told and told.endswith("or start a new working set")
        inst.close()


async def test_a_failed_pass_on_two_sets_fails_both() -> None:
    async with running(FakeRunner(), predict=False) as engine:
        inst, pipe, ws = await begun(engine)
        other = inst.working_set()
        assert await inst.submit(pipe, greedy([1], other))[0] == reference([1])
        await fails(inst.submit(pipe, greedy([[7] * 600, [2]], ws, other))[0], ContextLengthExceeded, "adds 600")
        told = await fails(inst.submit(pipe, greedy([2], other))[0], ContextLengthExceeded, "adds 600")
        assert told.endswith("truncate(1) to go back to before it")
        third = inst.working_set()
        both_ = PassSpec([[2], [2]], [other, third], program=GREEDY.program, params=GREEDY.params)
        assert (await fails(inst.submit(pipe, both_)[0], ContextLengthExceeded, "adds 600")).count("failed:") == 1
        assert (await fails(inst.submit(pipe, greedy([2], third))[0], ContextLengthExceeded, "adds 600")).count("failed:") == 1
        inst.close()


async def test_a_budget_of_pages_is_gone_back_behind_too() -> None:
    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine, limits=InstanceLimits(pages=2))
        await fails(inst.submit(pipe, greedy([7] * 30, ws))[0], OutOfPages, "3 KV pages")
        inst.truncate(ws, 6)
        assert await inst.submit(pipe, greedy([7] * 20, ws))[0] == reference([*PROMPT, *[7] * 20])
        inst.close()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda inst, ws: inst.truncate(ws, 60), r"truncate\(60\) is past the end: the working set has 9 tokens"),
        (lambda inst, ws: inst.truncate(ws, 2), r"truncate\(2\) cuts into the frozen prefix of 6"),
        (lambda inst, ws: inst.commit(ws, [0, 2]), r"path\[1\] = 2 does not follow token 0"),
        (lambda inst, ws: inst.commit(ws, 4), r"commit\(4\): the buffer of the working set holds 3"),
        (lambda inst, ws: inst.discard(ws, 4), r"discard\(4\): the buffer of the working set holds 3"),
        (lambda inst, ws: inst.commit_later(ws)(5, None), r"commit\(5\): the buffer of the working set holds 3"),
        (lambda inst, ws: inst.commit_later(ws)(1.5, None), "commit: the value 1.5 says neither"),
    ],
)
async def test_behind_a_bad_edit_every_use_says_so_and_what_to_do(edit: Any, words: str) -> None:
    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        await inst.submit(pipe, greedy([7, 8, 9], ws, geometry=BUFFERED))[0]
        before = inst.fork(ws, buffer=True)
        edit(inst, ws)
        for _ in range(2):
            told = await fails(inst.submit(pipe, greedy([1], ws, geometry=BUFFERED))[0], InvalidState, words)
            assert told.startswith("an earlier edit of this working set failed: ")
            assert told.endswith("; go on from a fork made before it, or truncate(9) to go back to before it")
        inst.truncate(ws, 9)
        for same in (ws, before):
            assert await inst.submit(pipe, greedy([1], same, geometry=BUFFERED))[0] == reference([*PROMPT, 7, 8, 9, 1])
        inst.close()


async def test_a_poisoned_channel_says_so_and_what_to_do() -> None:
    """To passes on other sets too; who waits for the value of the failed pass itself gets its cause."""

    def draw() -> Any:
        state = take(shared)
        put(shared, state)
        put(seen, state)
        return argmax()

    async with running(FakeRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        shared, seen = inst.channel("u32", [2], seed=[1, 2]), inst.channel("u32", [2], 4, host="reader")
        bad = inst.submit(pipe, spec(outside(inst), [ws], draw))[0]
        first = inst.take(seen)
        await fails(bad, PassFailed, "^token 0 of the pass, read from a channel, is 89")
        await fails(first, PassFailed, "^token 0 of the pass")
        for _ in range(2):
            told = await fails(inst.submit(inst.pipeline(), spec([1], [inst.working_set()], draw))[0], PassFailed, "token 0 of")
            assert told.startswith("an earlier value of the u32[2] channel failed: ") and told.endswith("; make a new channel")
            assert told.count("failed:") == 1
        inst.close()


@pytest.mark.parametrize("failing", [long, token])
@pytest.mark.parametrize("known", [True, False], ids=["ids known", "behind a window"])
async def test_recurrent_state_goes_back_where_it_can_be_computed_again(failing: Any, known: bool) -> None:
    """What was folded of the failed pass is no place to go on from, and folding cannot be undone."""
    async with running(RecurrentRunner()) as engine:
        inst, pipe, ws = await begun(engine)
        last = Geometry() if known else Geometry("folding", 4, 0)
        await inst.submit(pipe, greedy([11, 12], ws, geometry=last))[0]
        out = await failing(inst, pipe, ws, Geometry())
        with pytest.raises(EngineError):
            await out
        inst.truncate(ws, 8)
        again = inst.submit(pipe, greedy([13], ws))[0]
        if known or failing is long:  # which has folded nothing
            assert await again == reference([*PROMPT, 11, 12, 13])
        else:
            assert "an earlier pass on this working set failed" in await fails(again, PassFailed, "vocabulary")
        inst.close()
