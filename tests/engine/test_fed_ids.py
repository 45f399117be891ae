"""Ids outside the vocabulary that a pass takes from a channel: it fails, whether or not an epilogue looks at them."""

from __future__ import annotations

from typing import Any

import pytest

from pie_core.engine.errors import EngineError, PassFailed
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.channel import put
from tests.engine.fake_runner import VOCAB, FakeRunner, answer, reference
from tests.engine.recurrent_runner import RecurrentRunner
from tests.engine.support import argmax, greedy, running, spec
from tests.engine.test_reuse_control import Heard

PROMPT = [1, 2, 3, 4, 5, 6]


async def begun(inst: Instance) -> tuple[Pipeline, WorkingSet]:
    """A set that holds the prompt, frozen."""
    ws, pipe = inst.working_set(), inst.pipeline()
    assert await inst.submit(pipe, greedy(PROMPT, ws))[0] == reference(PROMPT)
    return pipe, ws


async def told(out: Any) -> str:
    with pytest.raises(PassFailed) as caught:
        await out
    return caught.value.message


def blocked(k: int) -> Geometry:
    """The token sees the prompt and itself, not the one in between."""
    return Geometry.check("folding", mask=[[True] * len(PROMPT) + [False] * k + [True]])


@pytest.mark.parametrize(
    ("dtype", "word", "value"), [("u32", VOCAB, VOCAB), ("i32", VOCAB, VOCAB), ("i32", 0xFFFFFFFF, -1), ("u32", 0xFFFFFFFF, 4294967295)]
)
@pytest.mark.parametrize("host", [None, "writer"], ids=["seeded", "put"])
async def test_a_pass_without_an_epilogue_fails_by_its_ids(host: Any, dtype: str, word: int, value: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("ids")
        pipe, ws = await begun(inst)
        cell = inst.channel(dtype, (2,), seed=None if host else [7, word], host=host)
        if host:
            inst.put(cell, [7, word])
        bad = inst.submit(pipe, PassSpec(cell, [ws]))[0]
        length, saved = Heard(), Heard()
        inst.length(ws, length)
        inst.save(ws, "bad", saved)
        late = inst.fork(ws)
        says = f"token 1 of the pass, read from a channel, is {value}, which is outside the vocabulary: ids are 0 .. {VOCAB - 1}"
        assert await told(bad) == says
        for out in (inst.submit(pipe, greedy([9], ws))[0], inst.submit(pipe, greedy([9], ws, geometry=blocked(2)))[0]):
            assert await told(out) == (
                f"an earlier pass on this working set failed: {says}; "
                "go on from a fork made before it, or truncate(6) to go back to before it"
            )
        assert says in await told(inst.submit(pipe, greedy([9], late))[0])
        for heard in (length, saved):
            assert heard.got and isinstance(heard.got[0], PassFailed) and says in heard.got[0].message
        inst.truncate(ws, 6)
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*PROMPT, 9])
        inst.close()


@pytest.mark.parametrize("geometry", [FOLDING, Geometry("folding", 2, 0), BUFFERED], ids=["full", "window", "buffered"])
async def test_passes_in_flight_behind_it_are_told_the_true_cause(geometry: Geometry) -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("flying")
        pipe, ws = await begun(inst)
        runner.hold = True
        bad = inst.submit(pipe, PassSpec(inst.channel("u32", (1,), seed=[VOCAB]), [ws], geometry))[0]
        behind = [inst.submit(p, greedy([k], ws, geometry=geometry))[0] for k, p in enumerate((pipe, inst.pipeline(), pipe))]
        runner.hold = False
        runner.release()
        says = await told(bad)
        for out in behind:
            assert says in await told(out)
        inst.close()


async def test_an_id_that_no_read_out_sees_fails_its_pass_too() -> None:
    """An epilogue that looks at a token before it finds nothing wrong."""
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("hidden")
        pipe, ws = await begun(inst)
        bad = inst.submit(pipe, greedy(inst.channel("u32", (2,), seed=[7, VOCAB]), ws, reads=[[0]]))[0]
        assert (await told(bad)).startswith("token 1 of the pass, read from a channel, is 89")
        assert ws.recipe.known == 6, "it has no recipe"
        inst.close()


async def test_a_pass_on_several_sets_says_which_token_of_the_cell() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("several")
        (pipe, one), two = await begun(inst), inst.working_set()
        cell = inst.channel("u32", (4,), seed=[1, 2, 3, VOCAB])
        assert "token 3 of the pass" in await told(inst.submit(pipe, PassSpec(cell, [one, two]))[0])
        assert "truncate(6)" in await told(inst.submit(pipe, greedy([1], one))[0])
        assert "truncate(0)" in await told(inst.submit(pipe, greedy([1], two))[0])
        inst.close()


async def test_recurrent_state_too() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("recurrent")
        pipe, ws = await begun(inst)
        assert "is 89, which" in await told(inst.submit(pipe, PassSpec(inst.channel("u32", (1,), seed=[VOCAB]), [ws]))[0])
        inst.truncate(ws, 6)
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*PROMPT, 9])
        inst.close()


# --- cells that were put before the host knew that they would feed a pass: they are not read back


async def unread(inst: Instance, pipe: Pipeline, ws: WorkingSet, word: int) -> None:
    """A pass without an epilogue has taken `word` as its token, and nobody on the host has seen it."""
    cell = inst.channel("i32", ())

    def gives() -> Any:
        out = argmax()
        put(cell, (out.cast("u32") * 0 + word).cast("i32"))
        return out

    await inst.submit(inst.pipeline(), spec([3], [inst.working_set()], gives))[0]
    await inst.submit(pipe, PassSpec(cell, [ws]))[0]


async def test_an_id_that_nobody_has_seen_is_blamed_at_the_next_read_out() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("unread")
        pipe, ws = await begun(inst)
        await unread(inst, pipe, ws, VOCAB)
        fork = inst.fork(ws)
        await inst.submit(pipe, PassSpec([8], [ws]))[0]
        for same in (ws, fork):
            message = await told(inst.submit(pipe, greedy([9], same))[0])
            assert message.startswith("an earlier pass on this working set took tokens from a channel that no read-out has seen since")
            assert (
                "holds NaN" in message and "outside the vocabulary" in message and message.endswith("truncate(6) to go back to before it")
            )
            saved = Heard()
            inst.save(same, "bad", saved)
            assert isinstance(saved.got[0], EngineError)
            inst.truncate(same, 6)
            assert await inst.submit(pipe, greedy([9], same))[0] == reference([*PROMPT, 9])
        inst.close()


@pytest.mark.parametrize("how", ["seen", "truncated"])
async def test_what_was_seen_or_cut_is_not_blamed(how: str) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("cleared")
        pipe, ws = await begun(inst)
        inst.fork(ws)  # a place to cut back to
        await unread(inst, pipe, ws, 7 if how == "seen" else VOCAB)
        if how == "seen":
            assert await inst.submit(pipe, greedy([8], ws, geometry=blocked(1)))[0] == reference_of(8)
            assert ws.unseen is not None, "it has not looked at the token"
            assert await inst.submit(pipe, greedy([8], ws))[0] == reference([*PROMPT, 7, 8, 8])
        else:
            inst.truncate(ws, 6)
            await inst.submit(pipe, PassSpec([7, 8, 8], [ws]))[0]
        assert ws.unseen is None
        message = await told(inst.submit(pipe, greedy(inst.channel("u32", (1,), seed=[VOCAB]), ws))[0])
        assert message.startswith("token 0 of the pass")
        assert "truncate(9)" in await told(inst.submit(pipe, greedy([9], ws))[0])
        inst.close()


def reference_of(token: int) -> int:
    """The answer at `token` behind the prompt and one token that it does not see."""
    return answer([*((t, p) for p, t in enumerate(PROMPT)), (token, len(PROMPT) + 1)])
