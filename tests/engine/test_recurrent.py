"""Recurrent state on the host's side: slots that run short, cancelled passes, pausing, cuts, saved sets, and what is refused."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.device.protocol import NONE, DeviceError
from pie_core.engine.errors import InvalidState, OutOfSlots, PassFailed, PassSkipped, UnsupportedGeometry
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.pausing import PATIENCE
from pie_core.engine.recurrent import RecurrentState, StatePool
from pie_core.engine.runner import StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import channel
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.recurrent_runner import RecurrentRunner, recurrent_limits
from tests.engine.support import argmax, decode, greedy, running, settle, spec, traced

PROMPT = [3 * k % 50 for k in range(20)]


async def step(inst: Instance, ws: WorkingSet, tokens: list[int], **more: Any) -> Any:
    pipe = inst.pipeline()
    out = inst.submit(pipe, greedy(tokens, ws, **more))[0]
    inst.close_pipeline(pipe)
    return await out


# --- the pool and the state of one set


def test_slots_are_counted() -> None:
    pool = StatePool(2)
    a, b = pool.allocate(), pool.allocate()
    assert (pool.free, pool.used, {a, b}) == (0, 2, {0, 1})
    pool.share(a)
    pool.release(a)
    assert pool.refs(a) == 1 and pool.free == 0
    pool.release(a)
    assert pool.free == 1
    with pytest.raises(RuntimeError, match=f"state slot {a} was released more often than it was shared"):
        pool.release(a)


def test_a_fold_writes_another_slot_where_others_hold_the_old_one() -> None:
    state = RecurrentState(StatePool(3))
    assert state.extend((), 4, 4) == (NONE, 0, 4)
    before = state.copy()
    assert state.extend((), 2, 2) == (0, 1, 2)
    assert state.extend((), 2, 2) == (1, 1, 2)  # the rest of the same pass
    assert (state.at, before.at, before.slot) == (8, 4, 0)
    before.clear()
    before.clear()
    assert state.pool.used == 1


def test_what_is_behind_the_folded_prefix_is_replayed() -> None:
    state = RecurrentState(StatePool(3))
    tokens = [(k, 0, 0) for k in range(5)]
    state.extend((), 4, 4)
    assert state.extend(tokens[:3], 3, 0) == (0, NONE, 0)
    fork = state.copy(6)
    assert fork.replay == tokens[:2]
    state.cut(6)
    assert state.extend(tokens[3:], 2, 1) == (0, 1, 1)
    assert (state.at, state.replay) == (5, [tokens[1], *tokens[3:]])
    assert fork.slot == 0 and not fork.cut(3) and (fork.slot, fork.at) == (None, 0)
    assert state.cut(0) and state.pool.used == 0


def test_the_recurrence_table_is_behind_everything_else_and_absent_without_recurrence() -> None:
    batch = StepBatch(rows=[5, NONE, 0, 0, 0, 0, 0, 0] * 2, tables=[4], n_seqs=1, reads=[1])
    plain = array("I", bytes(pack_step(batch).data))
    batch.runs = [2, NONE, 3, 2, NONE]
    words = array("I", bytes(pack_step(batch).data))
    at = len(plain)
    assert plain[6:8].tolist() == [0, 0] and words[6:8].tolist() == [at, 1]
    assert words[at:].tolist() == batch.runs
    assert words[:6] == plain[:6] and words[8:at] == plain[8:]


async def test_models_without_recurrence_have_no_table() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        assert engine.states is None and inst.working_set().state is None
        await decode(inst, PROMPT, 3)
        inst.close()
    assert not any(batch.runs for batch in runner.batches)
    assert "state_slots_used" not in engine.status()


# --- passes


async def test_decoding_holds_one_slot_and_two_while_a_pass_runs() -> None:
    runner = RecurrentRunner(recurrent_limits(slots=2))
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        assert await decode(inst, PROMPT, 20) == generate(PROMPT, 20)
        assert engine.status()["state_slots_used"] == 1 and engine.status()["state_slots_free"] == 1
        assert engine.metrics.predicted == 0
        inst.close()
        assert engine.states is not None and engine.states.used == 0


async def test_prompts_are_not_shared_by_their_ids() -> None:
    """Pages of a prefix without its state would be of no use."""
    async with running(RecurrentRunner()) as engine:
        one, two = (engine.open_instance("t") for _ in range(2))
        assert await engine.prewarm(PROMPT * 2) == 0
        assert await decode(one, PROMPT * 2, 2) == await decode(two, PROMPT * 2, 2) == generate(PROMPT * 2, 2)
        assert engine.metrics.reused_tokens == 0 and engine.pool.idle == 0
        one.close()
        two.close()


async def test_verify_and_commit_are_one_step() -> None:
    """Eight rounds of four drafts, of which two are accepted: eight steps."""
    runner = RecurrentRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, PROMPT)
        tokens, before = list(PROMPT), engine.metrics.steps
        for k in range(8):
            drafts = [k, k + 20, k + 40, k + 60]
            assert await step(inst, ws, drafts, geometry=BUFFERED) == reference([*tokens, *drafts])
            inst.commit(ws, 2)
            inst.discard(ws)
            tokens += drafts[:2]
        assert engine.metrics.steps - before == 8
        assert runner.replayed == 2 * 7  # what was accepted, and nothing else
        assert await step(inst, ws, [7]) == reference([*tokens, 7])
        inst.close()


async def test_a_commit_by_what_a_pass_says() -> None:
    """The count comes from the epilogue of the verifying pass; the next pass waits for it, replays and folds."""
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        said = inst.channel("i32", host="reader")
        inst.submit(pipe, greedy(PROMPT, ws))
        inst.submit(pipe, spec([1, 2, 3], [ws], lambda: channel.put(said, argmax() * 0 + 2), BUFFERED))
        inst.commit(ws, said)
        inst.discard(ws)
        assert await inst.submit(pipe, greedy([9], ws))[0] == reference([*PROMPT, 1, 2, 9])
        inst.close()


async def test_passes_of_several_sets_replay_each_its_own() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        sets = [inst.working_set() for _ in range(3)]
        for k, ws in enumerate(sets):
            await step(inst, ws, PROMPT[: 3 + k])
            if k:
                await step(inst, ws, [30 + k, 40 + k], geometry=BUFFERED)
                inst.commit(ws, k)
                inst.discard(ws)
        t = traced(lambda: tuple(argmax(k) for k in range(3)))
        outs = inst.submit(inst.pipeline(), PassSpec([[60], [61, 62], [63]], sets, program=t.program, params=t.params))
        want = [[*PROMPT[:3], 60], [*PROMPT[:4], 31, 61, 62], [*PROMPT[:5], 32, 42, 63]]
        assert [await out for out in outs] == [reference(tokens) for tokens in want]
        inst.close()


async def test_cancelled_passes_give_their_states_back() -> None:
    """A pipeline that stops with passes scheduled ahead: the set is what it was before them."""
    runner = RecurrentRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws, pipe = inst.working_set(), inst.pipeline()
        done, fed = inst.channel("bool", capacity=4), inst.channel("i32", (1,), 2)

        def body() -> Any:
            token = argmax()
            channel.put(fed, token)
            channel.put(done, token >= 0)
            return token

        pipe.stop_when(done)
        t = traced(body)
        first = inst.submit(pipe, PassSpec(PROMPT, [ws], program=t.program, params=t.params, channels=t.channels))[0]
        rest = [inst.submit(pipe, PassSpec(fed, [ws], program=t.program, params=t.params, channels=t.channels))[0] for _ in range(3)]
        assert await first == reference(PROMPT)
        for out in rest:
            with pytest.raises(PassSkipped):
                await out
        assert len(runner.batches) > 1  # one of them had run
        assert await step(inst, ws, [8]) == reference([*PROMPT, 8])
        assert engine.states is not None and engine.states.used == 1 and engine.metrics.revived == 0
        inst.close()


async def test_a_failed_step_frees_its_slots() -> None:
    runner = RecurrentRunner()
    runner.fail_results = lambda batch: DeviceError("injected")
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        with pytest.raises(PassFailed, match="injected"):
            await step(inst, ws, PROMPT)
        inst.drop(ws)
        assert engine.states is not None and engine.states.used == 0
        inst.close()


async def test_closing_in_flight_frees_every_slot() -> None:
    runner = RecurrentRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, PROMPT)
        runner.hold = True
        out = inst.submit(inst.pipeline(), greedy(PROMPT * 3, ws))[0]
        await settle()
        assert engine.states is not None and engine.states.used == 2
        inst.close()
        assert engine.states.used == 0 and out.exception() is not None


# --- slots run short


async def test_a_pass_that_needs_more_slots_than_there_are_fails_with_numbers() -> None:
    async with running(RecurrentRunner(recurrent_limits(slots=3))) as engine:
        inst = engine.open_instance("t")
        t = traced(lambda: tuple(argmax(k) for k in range(4)))
        sets = [inst.working_set() for _ in range(4)]
        out = inst.submit(inst.pipeline(), PassSpec([[1], [2], [3], [4]], sets, program=t.program, params=t.params))[0]
        with pytest.raises(OutOfSlots, match="needs 4 slots of recurrent state at once, the pool has 3") as caught:
            await out
        assert caught.value.fields == {"needed": 4, "total": 3}
        inst.close()


async def test_slots_that_nobody_can_give_back_fail_the_youngest_with_numbers() -> None:
    """Sets with a buffer cannot be paused."""
    async with running(RecurrentRunner(recurrent_limits(slots=3))) as engine:
        inst = engine.open_instance("t")
        for k in range(3):
            ws = inst.working_set()
            await step(inst, ws, [k] * 5)
            await step(inst, ws, [50 + k], geometry=BUFFERED)
        with pytest.raises(OutOfSlots, match="needs 1 slots of recurrent state, 0 of 3 are free") as caught:
            await step(inst, inst.working_set(), [9])
        assert caught.value.fields == {"needed": 1, "free": 0, "total": 3}
        inst.close()


async def test_scarcity_that_clears_kills_nobody() -> None:
    """Eight loops in slots for two: all end right, as each that ends makes room."""
    async with running(RecurrentRunner(recurrent_limits(slots=4))) as engine:
        insts = [engine.open_instance(str(k)) for k in range(8)]

        async def request(inst: Instance, k: int) -> list[int]:
            said = await decode(inst, [k] * 20, 12)
            inst.close()
            return said

        assert await asyncio.gather(*(request(i, k) for k, i in enumerate(insts))) == [generate([k] * 20, 12) for k in range(8)]
        assert engine.metrics.failed_passes == 0


async def test_an_unused_set_gives_its_slot_and_comes_back() -> None:
    async with running(RecurrentRunner(recurrent_limits(slots=2))) as engine:
        first, second = engine.open_instance("first"), engine.open_instance("second")
        ws = first.working_set()
        await step(first, ws, PROMPT)
        other = second.working_set()
        await step(second, other, [1, 2])
        assert await asyncio.wait_for(step(second, other, [3]), 20 * PATIENCE) == reference([1, 2, 3])
        assert ws.paused and ws.state is not None and ws.state.slot is None
        second.close()
        assert await step(first, ws, [7]) == reference([*PROMPT, 7])
        assert engine.metrics.revived == 1
        first.close()


# --- cuts and saved sets


async def test_a_cut_into_the_folded_prefix_is_computed_again() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, PROMPT)
        child = inst.fork(ws)
        await step(inst, ws, [5, 6])
        inst.truncate(ws, 20)
        assert await step(inst, ws, [7]) == reference([*PROMPT, 7])
        assert engine.metrics.revived == 1
        assert await step(inst, child, [8]) == reference([*PROMPT, 8])
        assert engine.metrics.revived == 1  # the fork had its own
        other = inst.working_set()
        await step(inst, other, PROMPT)
        inst.truncate(other, 0)
        assert await step(inst, other, [7]) == reference([7])
        inst.close()


async def test_a_cut_where_ids_are_not_known_is_refused() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        pipe = inst.pipeline()
        inst.submit(pipe, PassSpec(PROMPT, [ws], Geometry("folding", window=4)))
        inst.fork(ws, pipe)
        await inst.submit(pipe, PassSpec([1, 2], [ws], Geometry("folding", window=4)))[0]
        inst.truncate(ws, 20)
        with pytest.raises(InvalidState, match=r"truncate\(20\): the recurrent state is folded to 22 tokens, .* first 0 are known"):
            await step(inst, ws, [7])
        inst.close()


async def test_saved_sets_are_computed_again() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, PROMPT)
        assert await told(lambda sink: inst.save(ws, "x", sink)) == 20
        again: list[WorkingSet] = []
        assert await told(lambda sink: again.append(inst.open("x", sink))) == 20
        assert await step(inst, again[0], [7]) == reference([*PROMPT, 7])
        assert engine.metrics.revived == 1
        await step(inst, ws, [5], geometry=BUFFERED)
        with pytest.raises(InvalidState, match="of the 21 tokens 1 are buffered and 21 known by their ids"):
            await told(lambda sink: inst.save(ws, "x", sink))
        inst.close()


async def told(ask: Callable[[Callable[[int | None, Any], None]], None]) -> int | None:
    future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    ask(lambda n, error: future.set_exception(error) if error else future.set_result(n))
    return await future


# --- what is refused


REFUSED: list[tuple[Any, str]] = [
    ({"tree": (-1, 0), "mode": "buffered"}, "follows one sequence: fork the set"),
    ({"mask": [[True], [True, True]][1:], "mode": "buffered"}, "masks are not kept: use window and sinks"),
]


@pytest.mark.parametrize(("geometry", "message"), REFUSED)
async def test_geometry_that_a_state_cannot_follow(geometry: Any, message: str) -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        with pytest.raises(UnsupportedGeometry, match=message):
            inst.submit(inst.pipeline(), greedy([1, 2], inst.working_set(), geometry=Geometry.check(**geometry)))
        inst.close()


async def test_buffered_tokens_of_the_device_are_refused() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        cell = inst.channel("i32", (1,), 1, seed=[4])
        with pytest.raises(UnsupportedGeometry, match="tokens of a buffered pass come from a channel"):
            inst.submit(inst.pipeline(), greedy(cell, inst.working_set(), geometry=BUFFERED))
        inst.close()


async def test_a_buffer_that_does_not_fit_a_step_is_refused_with_numbers() -> None:
    async with running(RecurrentRunner(recurrent_limits(max_tokens=16))) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, [1] * 10, geometry=BUFFERED)
        with pytest.raises(InvalidState, match=r"adds 7 tokens to a buffer of 10; .* of at most 16 tokens") as caught:
            await step(inst, ws, [2] * 7, geometry=BUFFERED)
        assert caught.value.fields == {"buffered": 10, "tokens": 7, "most": 16}
        inst.close()


async def test_what_was_committed_is_folded_first_where_the_next_pass_leaves_no_room() -> None:
    runner = RecurrentRunner(recurrent_limits(max_tokens=16, max_reads=16))
    async with running(runner) as engine:
        inst = engine.open_instance("t")
        ws, busy = inst.working_set(), asyncio.create_task(decode(inst, [9], 12))
        await step(inst, ws, [1] * 16, geometry=BUFFERED)
        inst.commit(ws, 13)
        child = inst.fork(ws, buffer=True)
        assert await step(inst, ws, [2] * 12, geometry=BUFFERED) == reference([1] * 16 + [2] * 12)
        assert await step(inst, child, [3], geometry=BUFFERED) == reference([1] * 16 + [3])
        assert await busy == generate([9], 12)
        inst.close()


async def test_folding_in_front_of_a_pass_does_not_wait_for_ever_behind_others() -> None:
    """Passes that come first in every step leave no room for the sixteen rows; then those go first once."""
    async with running(RecurrentRunner(recurrent_limits(slots=64, max_tokens=16, max_reads=16))) as engine:
        early, inst = engine.open_instance("early"), engine.open_instance("late")
        ws, other, pipe = inst.working_set(), early.working_set(), early.pipeline()
        await step(inst, ws, [1] * 16, geometry=BUFFERED)
        inst.commit(ws, 16)
        queued = [early.submit(pipe, greedy([k], other))[0] for k in range(40)]
        assert await step(inst, ws, [2], geometry=BUFFERED) == reference([1] * 16 + [2])
        assert not queued[30].done()
        assert await queued[-1] == reference(list(range(40)))
        early.close()
        inst.close()


async def test_a_chain_is_committed_by_its_indices_too() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws = inst.working_set()
        await step(inst, ws, PROMPT)
        await step(inst, ws, [1, 2, 3], geometry=BUFFERED)
        inst.commit(ws, [0, 1])
        assert await step(inst, ws, [9]) == reference([*PROMPT, 1, 2, 9])
        inst.close()


async def test_a_fork_of_what_a_step_folds_runs_in_a_later_one() -> None:
    async with running(RecurrentRunner(recurrent_limits(max_tokens=32))) as engine:
        inst = engine.open_instance("t")
        ws, one, two = inst.working_set(), inst.pipeline(), inst.pipeline()
        await step(inst, ws, [1] * 20, geometry=BUFFERED)
        inst.commit(ws, 20)
        parent = inst.submit(one, greedy([2] * 13, ws, geometry=BUFFERED))[0]
        inst.submit(two, greedy([9], inst.working_set()))  # so that the fork happens while the step is filled
        child = inst.fork(ws, two)
        assert await inst.submit(two, greedy([3], child))[0] == reference([1] * 20 + [3])
        assert await parent == reference([1] * 20 + [2] * 13)
        inst.close()


async def test_a_set_that_was_cut_while_it_was_computed_again_is_asked_for_once_more() -> None:
    async with running(RecurrentRunner()) as engine:
        inst = engine.open_instance("t")
        ws, longer = inst.working_set(), inst.working_set()
        await step(inst, ws, PROMPT)
        await step(inst, longer, [*PROMPT, 1])
        ws.pause()
        ws.resume(longer)
        assert ws.paused and longer.length == 21 and longer.pages
        assert await step(inst, ws, [7]) == reference([*PROMPT, 7])
        inst.close()


def test_the_limit_is_off_by_default() -> None:
    assert limits().state_slots == 0
