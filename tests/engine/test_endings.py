"""Nothing waits for ever: whatever ends, and whatever goes wrong on the way, whoever awaits something of the engine is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError, DeviceLost
from pie_core.engine.errors import EngineError, EngineLost, EngineStopped, InstanceClosed, PassFailed
from pie_core.engine.forward import Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.order import Ordered
from pie_core.engine.runner import StepBatch
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeHandle, FakeRunner, reference
from tests.engine.support import greedy, running, settle

ENDS: list[tuple[str, type[EngineError]]] = [("close", InstanceClosed), ("lost", EngineLost), ("stop", EngineStopped)]


async def end(how: str, engine: Engine, inst: Instance, runner: FakeRunner) -> None:
    """Close the instance, lose the device or stop the engine."""
    if how == "close":
        inst.close()
    elif how == "stop":
        await engine.stop()
    else:
        runner.fail_submit = lambda batch: DeviceLost("unplugged")
        other = engine.open_instance("other")
        lost = other.submit(other.pipeline(), greedy([1], other.working_set()))[0]
        with pytest.raises(EngineLost):
            await lost


def behind_a_late_commit(inst: Instance) -> WorkingSet:
    """A set with a commit whose value nobody tells."""
    ws = inst.working_set()
    inst.submit(inst.pipeline(), greedy([1, 2], ws, geometry=Geometry.check("buffered")))
    inst.commit_later(ws)
    return ws


def behind_an_unread_cell(inst: Instance) -> WorkingSet:
    """A set with a pass that waits for a cell that nobody puts."""
    ws = inst.working_set()
    inst.submit(inst.pipeline(), PassSpec(inst.channel("i32", (2,)), [ws]))
    return ws


def not_born(inst: Instance) -> WorkingSet:
    """A fork that its pipeline has not come to."""
    pipe, ws = inst.pipeline(), inst.working_set()
    inst.submit(pipe, PassSpec(inst.channel("i32", (2,)), [ws]))
    return inst.fork(ws, pipe)


@pytest.mark.parametrize(("how", "kind"), ENDS)
@pytest.mark.parametrize("waiting", [behind_a_late_commit, behind_an_unread_cell, not_born])
async def test_who_waits_behind_something_is_told_of_the_end(how: str, kind: type[EngineError], waiting: Callable[..., WorkingSet]) -> None:
    runner, heard = FakeRunner(), list[Any]()
    async with running(runner) as engine:
        inst = engine.open_instance("a")
        ws = waiting(inst)
        for _ in range(2):
            inst.save(ws, "x", lambda n, error: heard.append(error or n))
            inst.length(ws, lambda n, error: heard.append(error or n))
        inst.truncate(ws, 0)
        child = inst.fork(ws)
        inst.length(child, lambda n, error: heard.append(error or n))
        inst.drop(ws)
        await settle()
        assert not heard
        await end(how, engine, inst, runner)
        await settle()
        assert [type(error) for error in heard] == [kind] * 5
        assert inst.outstanding == 0


@pytest.mark.parametrize(("how", "kind"), ENDS)
async def test_a_pass_in_flight_holds_nobody_back_at_the_end(how: str, kind: type[EngineError]) -> None:
    runner, heard = FakeRunner(), list[Any]()
    runner.hold = True
    async with running(runner) as engine:
        inst = engine.open_instance("a")
        ws = inst.working_set()
        out = inst.submit(inst.pipeline(), greedy([1, 2], ws))[0]
        await settle()
        assert len(runner.handles) == 1
        inst.save(ws, "x", lambda n, error: heard.append(error or n))
        inst.length(ws, lambda n, error: heard.append(error or n))
        if how == "stop":  # steps in flight are read first; a save that begins then is cut short
            asyncio.get_running_loop().call_later(0.01, runner.release)
            await engine.stop()
            assert await out == reference([1, 2]) and heard[0] == 2
        else:
            if how == "lost":
                runner.handles[0]._error = DeviceLost("unplugged")
                runner.release()
                await settle()
            else:
                inst.close()
            assert isinstance(out.exception(), kind) and isinstance(heard[0], kind)
        assert len(heard) == 2 and isinstance(heard[1], kind)


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_stop_tells_saves_and_opens_under_way(turns: int) -> None:
    runner, heard = FakeRunner(), list[Any]()
    async with running(runner) as engine:
        inst = engine.open_instance("a")
        ws = inst.working_set()
        await inst.submit(inst.pipeline(), greedy([1, 2], ws))[0]
        runner.delay = 10.0
        inst.save(ws, "x", lambda n, error: heard.append(error or n))
        await settle(turns)
        if not turns:
            inst.open("y", lambda n, error: heard.append(error or n))
        await asyncio.wait_for(engine.stop(), 5)
        assert len(heard) == 1 + (not turns) and any(isinstance(error, EngineStopped) for error in heard)
        assert inst.busy == 0


@pytest.mark.parametrize("verb", ["move_slots", "copy_page"])
async def test_a_device_error_in_an_edit_fails_its_set_only(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise DeviceError("the queue hiccuped")

    runner = FakeRunner()
    async with running(runner) as engine:
        inst = engine.open_instance("a")
        pipe, ws, other = inst.pipeline(), inst.working_set(), inst.working_set()
        tree = Geometry.check("buffered", tree=[-1, -1, 1])
        done = inst.submit(pipe, greedy([1, 2, 3], ws, geometry=tree))[0]
        child = inst.fork(ws, pipe, buffer=True)  # the page is shared, so it is copied before rows move
        monkeypatch.setattr(runner, verb, fail)
        beside = inst.submit(inst.pipeline(), greedy([5], other))[0]
        inst.commit(ws, [1, 2])
        await done
        assert await beside == reference([5])
        with pytest.raises(PassFailed, match=r"an earlier edit of this working set failed: .*DeviceError: the queue hiccuped"):
            await inst.submit(pipe, greedy([4], ws))[0]
        assert child.error is None and engine.lost is None
        inst.drop(child)
        inst.drop(ws)
        inst.drop(other)
        assert engine.pool.used == 0
        inst.close()


async def test_a_device_error_at_the_call_reaches_who_saves_or_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise DeviceError("no room to stage")

    runner, heard = FakeRunner(), list[Any]()
    async with running(runner) as engine:
        inst = engine.open_instance("a")
        ws = inst.working_set()
        done = inst.submit(inst.pipeline(), greedy([1, 2], ws))[0]
        inst.save(ws, "x", lambda n, error: heard.append(error or n))
        await done
        await settle()
        monkeypatch.setattr(runner, "read_pages", fail)
        monkeypatch.setattr(runner, "write_pages", fail)
        inst.save(ws, "y", lambda n, error: heard.append(error or n))
        again = inst.open("x", lambda n, error: heard.append(error or n))
        use = inst.submit(inst.pipeline(), greedy([3], again))[0]
        with pytest.raises(PassFailed, match="no room to stage"):
            await use
        assert heard[0] == 2 and [type(error) for error in heard[1:]] == [PassFailed, PassFailed]
        inst.drop(again)
        inst.drop(ws)
        assert engine.pool.used == 0 and inst.busy == 0
        inst.close()


async def test_a_fault_in_the_middle_of_settling_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Short(FakeRunner):
        """Loses what comes behind the status word."""

        def submit(self, batch: StepBatch) -> FakeHandle:
            handle = super().submit(batch)
            handle._data = handle._data[:4]
            return handle

    async with running(Short()) as engine:
        inst = engine.open_instance("a")
        pipe, ws = inst.pipeline(), inst.working_set()
        outs = [inst.submit(pipe, greedy([k], ws))[0] for k in range(3)]  # each in a step of its own
        await settle()
        for out in outs:
            with pytest.raises(EngineLost, match="the engine failed"):
                await asyncio.wait_for(out, 5)
    assert "the step loop failed" in caplog.text


def test_an_order_that_ends_runs_what_waits_and_forgets_who_entered() -> None:
    order, ran = Ordered(), list[int]()
    first = order.enter()
    order.run(lambda: ran.append(1))
    second = order.enter()
    order.run(lambda: ran.append(2))
    order.end()
    assert ran == [1, 2] and order.idle and order.outstanding == 0
    order.leave(second)
    order.leave(first)
    assert ran == [1, 2] and order.idle
    order.run(lambda: ran.append(3))
    third = order.enter()
    assert ran == [1, 2, 3] and order.may_run(third)
    order.leave(third)
    assert order.idle
