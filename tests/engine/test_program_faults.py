"""Programs beside each other: one that is refused, fails in a step or is heavy, and what the others hear of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie_core import eta
from pie_core.device.protocol import DeviceError, DeviceOutOfMemory, KernelError, LimitError
from pie_core.engine.errors import PassFailed
from pie_core.engine.forward import PassSpec
from pie_core.engine.program_info import ProgramInfos
from pie_core.engine.runner import StepBatch
from pie_core.eta.program import Program
from tests.engine.fake_runner import FakeHandle, FakeRunner, generate, limits, reference
from tests.engine.support import GREEDY, argmax, decode, greedy, running, spec, traced


def different(k: int) -> Any:
    """The greedy token, by a program of its own: one equal number more for each k."""

    def epilogue() -> Any:
        token = argmax()
        for _ in range(k):
            token = token + 0
        return token

    return epilogue


class Refusing(FakeRunner):
    """Refuses every program but the greedy one."""

    def __init__(self, error: DeviceError) -> None:
        super().__init__()
        self.error = error
        self.tried = 0

    def prepare(self, program: Program) -> None:
        if program.hash != GREEDY.program.hash:
            self.tried += 1
            raise self.error
        super().prepare(program)


@pytest.mark.parametrize(
    ("error", "again"),
    [(KernelError("too long"), 1), (LimitError("too large"), 1), (DeviceOutOfMemory("not now"), 3), (DeviceError("?"), 3)],
)
async def test_what_a_program_decides_is_found_out_once(error: DeviceError, again: int) -> None:
    runner = Refusing(error)
    async with running(runner) as engine:
        inst = engine.open_instance("refused")
        program = traced(different(1)).program
        assert not engine.knows(program)
        for _ in range(3):
            with pytest.raises(PassFailed, match=f"does not take the epilogue: {error}") as told:
                inst.submit(inst.pipeline(), spec([1], [inst.working_set()], different(1)))
            assert told.value.__cause__ is error
        assert runner.tried == again
        assert engine.knows(program) == (again == 1)
        assert await decode(inst, [7], 3) == generate([7], 3)
        inst.close()


class Failing(FakeRunner):
    """A step in which the kernel of one program has to be compiled again, and cannot be."""

    bad = ""

    def submit(self, batch: StepBatch) -> FakeHandle:
        handle = super().submit(batch)
        if any(group.program.hash == self.bad for group in batch.epilogues):
            batch.refused[self.bad] = KernelError("no memory left for it")
        return handle


async def test_a_program_that_a_step_cannot_run_fails_alone() -> None:
    runner = Failing()
    runner.bad = traced(different(1)).program.hash
    async with running(runner) as engine:
        inst, other = engine.open_instance("bad"), engine.open_instance("good")
        ws, mine = inst.working_set(), other.working_set()
        pipe = inst.pipeline()
        doomed = inst.submit(pipe, spec([1, 2], [ws], different(1)))[0]
        good = other.submit(other.pipeline(), greedy([3, 4], mine))[0]
        assert await good == reference([3, 4])
        with pytest.raises(PassFailed, match="could not run the epilogue of this pass: KernelError: no memory left for it"):
            await doomed
        assert len(runner.batches) == 1, "one step held both"
        with pytest.raises(PassFailed, match="no memory left for it"):
            await inst.submit(pipe, greedy([5], ws))[0]
        inst.truncate(ws, 0)  # the set is whole again from before the pass
        assert await inst.submit(pipe, greedy([8], ws))[0] == reference([8])
        assert engine.metrics.failed_steps == 0
        inst.close()
        other.close()


async def test_a_channel_of_a_program_that_a_step_cannot_run_is_poisoned() -> None:
    runner = Failing()
    async with running(runner) as engine:
        inst = engine.open_instance("cells")
        channel = inst.channel("i32", host="reader")
        traced_put = traced(lambda: eta.channel.put(channel, argmax()))
        runner.bad = traced_put.program.hash
        inst.submit(inst.pipeline(), PassSpec([1], [inst.working_set()], program=traced_put.program, channels=[channel]))
        taken = inst.take(channel)
        with pytest.raises(PassFailed, match="no memory left for it"):
            await taken
        inst.close()


class Weighed(FakeRunner):
    """Each lane is so much work."""

    def __init__(self, work: int, first: int = 0) -> None:
        super().__init__(limits(step_work=1000))
        self.each = work, first

    def prepare(self, program: Program) -> tuple[int, int, int]:
        super().prepare(program)
        return (1, 0, 1) if program.hash == LIGHT.hash else (*self.each, 1)


LIGHT = traced(different(2)).program


@pytest.mark.parametrize(
    ("work", "first", "lanes"), [(600, 0, [1, 1, 1]), (500, 0, [2, 1]), (9999, 0, [1, 1, 1]), (10, 0, [3]), (10, 5000, [3])]
)
async def test_heavy_lanes_are_spread_over_steps(work: int, first: int, lanes: list[int]) -> None:
    runner = Weighed(work, first)
    async with running(runner) as engine:
        inst = engine.open_instance("heavy")
        outs = [inst.submit(inst.pipeline(), greedy([k], inst.working_set()))[0] for k in range(3)]
        assert await asyncio.gather(*outs) == [reference([k]) for k in range(3)]
        assert [sum(len(group.lanes) for group in batch.epilogues) for batch in runner.batches] == lanes
        inst.close()


async def test_first_runs_are_spread_over_steps() -> None:
    runner = Weighed(10, 5000)
    async with running(runner) as engine:
        inst = engine.open_instance("new")
        sets = [(inst.working_set(), inst.pipeline()) for _ in range(3)]
        for start in (0, 3):
            outs = [inst.submit(pipe, spec([k], [ws], different(3 + k)))[0] for k, (ws, pipe) in enumerate(sets)]
            await asyncio.gather(*outs)
            lanes = [sum(len(group.lanes) for group in batch.epilogues) for batch in runner.batches[start:]]
            assert lanes == ([3] if start else [1, 1, 1])
        inst.close()


async def test_a_light_lane_rides_along_with_each_heavy_one() -> None:
    runner = Weighed(9999)
    async with running(runner) as engine:
        inst, other = engine.open_instance("heavy"), engine.open_instance("light")
        outs = [inst.submit(inst.pipeline(), greedy([k], inst.working_set()))[0] for k in range(4)]
        ws, pipe = other.working_set(), other.pipeline()
        for k in range(3):
            assert await other.submit(pipe, spec([k], [ws], different(2)))[0] == reference(list(range(k + 1)))
            assert len(runner.batches) == k + 1
        await asyncio.gather(*outs)
        assert len(runner.batches) == 4
        inst.close()
        other.close()


def test_infos_are_kept_by_their_ops() -> None:
    infos = ProgramInfos(limits())
    infos._infos.most_ops = 3 * len(traced(different(9)).program.ops)
    programs = [traced(different(k)).program for k in range(5, 10)]
    for program in programs:
        infos.keep(infos.describe(program))
    assert [infos.find(program) is not None for program in programs] == [False, False, True, True, True]
