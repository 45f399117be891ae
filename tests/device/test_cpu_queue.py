"""The server's queue in front of the cpu module: plans that follow each other are one call, and nothing else changes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.protocol import DeviceError, Launch
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import OPEN_WORK, PLAN_CALLS, WasmtimeCpuModule
from pie_server.build.cpu_module import cpu_module
from tests.device.cpu_support import NORM, norm
from tests.device.oracles import Step, Token

N = 32


class Counted(WasmtimeCpuModule):
    """Counts how often the thread is given work, and how much at once."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        super().__init__(cpu_module().read_bytes())

    def _hand_over(self) -> None:
        if self._open:
            self.turns.append(len(self._open))
        super()._hand_over()


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice(Counted())
    yield opened
    opened.close()


def turns(device: CpuDevice) -> list[int]:
    module = device._module
    assert isinstance(module, Counted)
    return module.turns


def doubling(device: CpuDevice) -> tuple[Any, CpuBuffer]:
    """(a plan that adds x to itself, x of N elements): it shows how often it ran, and behind which writes."""
    eye = array("f", [float(i == j) for i in range(N) for j in range(N)])
    weight = device.upload("f32", N, N, [memoryview(eye).cast("B")], "w")
    step, x = device.create_buffer(512, "step"), device.create_buffer(4 * N, "x")
    device.write(step, 0, Step([Token()]).words().tobytes())
    kernel = device.compile(template("linear", fmt="f32", m=N, k=N, add=True, rows="tokens", bucket=1))
    return device.compile_plan([Launch(kernel, {"step": step, "quants": weight.quants, "scales": weight.quants, "x": x, "out": x})]), x


@pytest.mark.parametrize("runs", [0, 1, 2, PLAN_CALLS - 1, PLAN_CALLS, PLAN_CALLS + 1, 3 * PLAN_CALLS + 1])
async def test_every_plan_runs_once_and_in_order(device: CpuDevice, runs: int) -> None:
    plan, x = doubling(device)
    device.write(x, 0, struct.pack(f"<{N}f", *range(N)))
    for _ in range(runs):
        plan.run()
    assert struct.unpack(f"<{N}f", await device.read(x, 0, 4 * N)) == pytest.approx([k * 2.0**runs for k in range(N)], rel=0.01)


async def test_writes_between_plans_keep_their_place(device: CpuDevice) -> None:
    plan, x = doubling(device)
    for value in (1.0, 3.0, 5.0):
        device.write(x, 0, struct.pack(f"<{N}f", *[value] * N))
        plan.run()
        plan.run()
    assert struct.unpack("<f", await device.read(x, 0, 4))[0] == pytest.approx(20, rel=0.01)


async def test_a_step_is_one_turn_of_the_thread(device: CpuDevice) -> None:
    plan, x = doubling(device)
    await device.read(x, 0, 4)
    turns(device).clear()
    device.write(x, 0, bytes(4 * N))
    for _ in range(3):
        plan.run()
    await device.read(x, 0, 4)
    assert turns(device) == [3]  # the write, the plans, the read


async def test_work_that_nobody_reads_does_not_pile_up(device: CpuDevice) -> None:
    plan, x = doubling(device)
    await device.read(x, 0, 4)
    turns(device).clear()
    for _ in range(OPEN_WORK):
        device.write(x, 0, bytes(4))
        plan.run()
    assert turns(device) == [OPEN_WORK, OPEN_WORK]


@pytest.mark.parametrize("before", [0, 3, PLAN_CALLS - 1, PLAN_CALLS])
async def test_a_fault_among_plans_names_its_record_and_stops_the_rest(device: CpuDevice, before: int) -> None:
    plan, x = doubling(device)
    device.write(x, 0, struct.pack(f"<{N}f", *[1.0] * N))
    bad = norm(device)
    device.write(bad["step"], 0, b"\xff" * 64)
    good = norm(device)
    norms = device.compile(template("rms_norm", **NORM))
    failing = device.compile_plan([Launch(norms, good), Launch(norms, bad)])
    for _ in range(before):
        plan.run()
    failing.run()
    plan.run()
    with pytest.raises(DeviceError, match="record 1 of a plan: the step buffer's counts or offsets"):
        await device.read(x, 0, 4)
