"""A commit of a path that has to copy shared pages waits for them as passes do, and fails only where it would wait for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import OutOfPages, PassFailed
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.waiting_edit import WaitingEdit
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import greedy, settle
from tests.engine.test_wakeups import SOON, WINDOW, ask, fill, watched
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

STEM = list(range(1, 15))
DRAFTS = [31, 32, 33, 34]  # two branches of two
BRANCHES = Geometry.check("buffered", tree=[-1, 0, -1, 2])
PICKED = [*STEM, 33, 34]  # of the path [2, 3], whose rows move over those of the other branch


async def branches(inst: Instance) -> tuple[WorkingSet, WorkingSet, Pipeline]:
    """(a set with two branches in its buffer, a fork of it that holds the same two pages, a pipeline)."""
    ws, pipe = inst.working_set(), inst.pipeline()
    inst.submit(pipe, PassSpec(STEM, [ws]))
    await inst.submit(pipe, PassSpec(DRAFTS, [ws], BRANCHES))[0]
    return ws, inst.fork(ws, buffer=True), pipe


async def full(engine: Engine, pages: int, **more: Any) -> tuple[Instance, WorkingSet]:
    """Somebody who holds `pages` pages."""
    other = engine.open_instance("other")
    return other, await fill(other, [9] * (16 * pages), **more)


async def test_it_waits_for_a_silent_holder_and_what_is_behind_it_waits_too() -> None:
    async with watched(FakeRunner(limits(pages=6))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 4, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        out, ordered = inst.submit(pipe, greedy([40], fork))[0], inst.fork(fork)
        told: list[Any] = []
        inst.length(fork, lambda n, error: told.append((n, error)))
        await settle(100)
        assert not out.done() and not told and not ordered.born and not inst.stuck()
        other.close()
        assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 40])
        assert told == [(17, None)] and (ordered.length, ordered.frozen) == (17, 17)
        assert await asyncio.wait_for(ask(inst, [41], ordered), SOON) == reference([*PICKED, 40, 41])
        inst.close()


async def test_others_are_paused_for_it() -> None:
    async with watched(FakeRunner(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, idle = await full(engine, 2)
        inst.commit(fork, [2, 3])
        assert await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON) == reference([*PICKED, 40])
        assert idle.paused
        other.close()
        inst.close()


@pytest.mark.parametrize("how", ["drop the fork", "drop the set", "close"])
async def test_who_holds_the_page_goes(how: str) -> None:
    """Then nothing needs to be copied; and an edit of a set that was dropped is not made at all."""
    runner = FakeRunner(limits(pages=4))
    async with watched(runner) as engine:
        inst = engine.open_instance("inst")
        ws, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        copies = len(runner.copies)
        inst.commit(fork, [2, 3])
        await settle(20)
        if how == "close":
            inst.close()
            await settle(20)
            assert engine.pool.used == other.pages == 2 and not engine.scheduler.instances
        elif how == "drop the set":
            inst.drop(fork)
            await settle(20)
            assert fork.dropped and engine.pool.used == 4 and not engine.scheduler.instances
            inst.close()
        else:
            inst.drop(ws)
            out = inst.submit(pipe, greedy([40], fork))[0]
            assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 40])
            inst.close()
        assert len(runner.copies) == copies
        other.close()


async def test_what_would_wait_for_ever_fails_with_numbers() -> None:
    async with watched(FakeRunner(limits(pages=2))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        inst.commit(fork, [2, 3])
        with pytest.raises(
            OutOfPages, match="the edit needs 1 more KV pages, 0 of 2 are free, and the instance's own working sets hold the other 2"
        ):
            await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON)
        inst.close()


async def test_a_limit_of_the_instance_is_no_reason_to_wait() -> None:
    async with watched(FakeRunner(limits(pages=8))) as engine:
        inst = engine.open_instance("inst", limits=InstanceLimits(pages=2))
        _, fork, pipe = await branches(inst)
        inst.commit(fork, [2, 3])
        with pytest.raises(OutOfPages, match="1 pages of the path are shared with a fork and must be copied; the instance holds 2"):
            await asyncio.wait_for(inst.submit(pipe, greedy([40], fork))[0], SOON)
        inst.close()


async def test_a_device_fault_of_an_edit_that_waited() -> None:
    class Broken(FakeRunner):
        def copy_page(self, src: int, dst: int) -> None:
            raise DeviceError("it broke")

    async with watched(Broken(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        out = inst.submit(pipe, greedy([40], fork, geometry=BUFFERED))[0]
        await settle(20)
        other.close()
        with pytest.raises(PassFailed, match="it broke"):
            await asyncio.wait_for(out, SOON)
        inst.close()


async def test_edits_behind_it_keep_their_order() -> None:
    async with watched(FakeRunner(limits(pages=4))) as engine:
        inst = engine.open_instance("inst")
        _, fork, pipe = await branches(inst)
        other, _ = await full(engine, 2, geometry=WINDOW)
        inst.commit(fork, [2, 3])
        inst.submit(pipe, PassSpec([50, 51], [fork], BUFFERED))
        inst.commit(fork, 1)
        inst.discard(fork)
        out = inst.submit(pipe, greedy([40], fork))[0]
        await settle(20)
        assert (fork.length, fork.frozen) == (18, 14)
        other.close()
        assert await asyncio.wait_for(out, SOON) == reference([*PICKED, 50, 40])
        inst.close()


# --- any order of it


class Branches:
    """A set whose buffer is a tree, and what it should hold: the stem, and (token, parent) of the buffer."""

    def __init__(self, ws: WorkingSet, stem: list[int], buffer: list[tuple[int, int]]) -> None:
        self.ws, self.stem, self.buffer = ws, stem, buffer

    def path(self, node: int) -> list[int]:
        """Root to node."""
        return [] if node < 0 else [*self.path(self.buffer[node][1]), node]


WAITED: Counter[str] = Counter()  # of all examples
OPS = ["draft", "draft", "fork", "fork", "path", "path", "drop", "hold", "hold", "free"]


async def any_order(ops: list[tuple[str, int, int]]) -> None:
    engine = Watched(FakeRunner(limits(pages=8)))
    engine.start()
    inst, holders, outs = engine.open_instance("inst"), [], []
    pipe = inst.pipeline()
    first = inst.working_set()
    inst.submit(pipe, PassSpec(STEM, [first]))
    known = [Branches(first, STEM, [])]
    for verb, which, luck in ops:
        it = known[which % len(known)]
        if verb == "draft" and len(it.stem) + len(it.buffer) < 30:
            tokens, held = [(luck + 3 * k) % 80 for k in range(1 + luck % 3)], len(it.buffer)
            parents = [(luck >> k) % (held + k + 1) - 1 for k in range(len(tokens))]
            inst.submit(pipe, PassSpec(tokens, [it.ws], Geometry.check("buffered", tree=parents)))
            it.buffer += zip(tokens, parents, strict=True)
        elif verb == "fork" and len(known) < 5:
            known.append(Branches(inst.fork(it.ws, buffer=True), list(it.stem), list(it.buffer)))
        elif verb == "path" and it.buffer:
            path = it.path(luck % len(it.buffer))
            inst.commit(it.ws, path)
            it.stem, it.buffer = [*it.stem, *(it.buffer[k][0] for k in path)], []
        elif verb == "drop" and len(known) > 1:
            known.remove(it)
            inst.drop(it.ws)
        elif verb == "hold" and len(holders) < 3:
            holders.append(engine.open_instance("holder"))
            ask(holders[-1], [9] * (16 + 16 * (luck % 3)), geometry=WINDOW)
        elif verb == "free" and holders:
            holders.pop(which % len(holders)).close()
        await asyncio.sleep(0.005 if luck % 2 else 0)  # by the loop's own clock: over the linger
        engine.check_asleep()
        WAITED["edits"] += any(isinstance(work, WaitingEdit) for work, _ in engine.scheduler.waiting)
    for holder in holders:
        holder.close()
    for it in known:
        inst.discard(it.ws)
        outs.append((inst.submit(pipe, greedy([7], it.ws))[0], reference([*it.stem, 7])))
    await asyncio.wait([out for out, _ in outs], timeout=SOON)
    for out, expected in outs:
        assert out.done(), "a pass behind an edit never ended"
        error = out.exception()
        assert out.result() == expected if error is None else isinstance(error, OutOfPages)
        WAITED["right" if error is None else "failed"] += 1
    inst.close()
    await engine.stop()
    assert engine.lost is None and engine.pool.used == 0


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 9), st.integers(0, 50)), min_size=10, max_size=50))
def test_any_order_of_drafts_forks_paths_and_holders(ops: list[tuple[str, int, int]]) -> None:
    clock = VirtualLoop()
    clock.run_until_complete(any_order(ops))
    clock.close()


def test_it_was_about_edits_that_wait() -> None:
    if not WAITED:
        test_any_order_of_drafts_forks_paths_and_holders()
    assert WAITED["edits"] > 20 and WAITED["right"] > 10 * WAITED["failed"], WAITED
