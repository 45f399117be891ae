"""Times of steps by timestamp queries: where they are, of which step, and what a device without them does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pie_core import eta
from pie_core.codegen import lane_layout
from pie_core.device.protocol import DeviceError, EpilogueSpec, Launch, StepTimer, Times
from pie_core.device.templates import template
from pie_core.device.webgpu import WebGpuDevice
from pie_core.device.webgpu_timing import FEATURE, SLOTS, step_times
from pie_core.eta import Model, trace_epilogue
from pie_server.adapters import wgpu_native
from tests.device.oracles import Step, Token
from tests.support.lavapipe import lavapipe

WIDTH = 4096


@pytest.fixture(scope="module")
def timed() -> Iterator[WebGpuDevice]:
    lavapipe()  # names the driver
    made = asyncio.run(wgpu_native.open_webgpu(allow_software=True, timed=True))
    yield made
    made.close()


@pytest.fixture
def timer(timed: WebGpuDevice) -> StepTimer:
    made = timed.step_timer()
    assert made is not None
    return made


class Work:
    """Bodies of any length over one row, and an argmax of what they leave."""

    def __init__(self, device: WebGpuDevice) -> None:
        self.device = device
        row = {name: device.create_buffer(4 * WIDTH, name) for name in ("step", "x", "weight", "out")}
        device.write(row["step"], 0, Step([Token()]).words().tobytes())
        device.write(row["x"], 0, np.linspace(1, 2, WIDTH, dtype=np.float32).tobytes())
        device.write(row["weight"], 0, np.ones(WIDTH, np.float32).tobytes())
        norm = device.compile(template("rms_norm", width=WIDTH, eps=0.0, rows="tokens", bucket=1))
        self.bodies = {launches: device.compile_plan([Launch(norm, row)] * launches) for launches in (1, 200)}
        traced = trace_epilogue(lambda: eta.reduce_argmax(eta.intrinsics.output(0, "logits")), Model(WIDTH, 16))
        lanes, self.results = device.create_buffer(256, "lanes"), device.create_buffer(64, "results")
        table = lane_layout(traced.program).pack(0, 0, [], [1], list(traced.params))
        device.write(lanes, 0, np.array(table, np.uint32).tobytes())
        buffers = {"logits": row["out"], "lanes": lanes, "results": self.results}
        self.epilogue = device.compile_plan([Launch(device.compile(EpilogueSpec(traced.program)), buffers)])

    def step(self, timer: StepTimer, *launches: int, epilogues: int = 1, gated: bool = False) -> Awaitable[tuple[bytes, Times | None]]:
        """One step: a body plan for each of `launches` (one of a single launch where none is given), then the epilogues."""
        timer.start()
        for count in launches or (1,):
            self.bodies[count].run(gated=gated)
        timer.epilogues()
        for _ in range(epilogues):
            self.epilogue.run(lanes=1)
        return timer.read(self.results, 0, 8)


ANSWER = np.array([0, WIDTH - 1], np.uint32).tobytes()  # status, argmax of a row that rises


async def test_a_step_has_the_times_of_its_parts_and_its_results(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    await work.step(timer)  # the driver compiles here
    for epilogues in (1, 3):
        began = time.perf_counter()
        data, times = await work.step(timer, epilogues=epilogues)
        wall = time.perf_counter() - began
        assert data == ANSWER and times is not None
        device, epilogue = times
        assert 0 < epilogue < device < wall


async def test_indirect_dispatches_are_measured_too(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    assert timed.indirect
    data, times = await work.step(timer, gated=True)
    assert data == ANSWER and times is not None and times[0] > times[1] > 0


async def test_a_step_without_epilogues_spends_nothing_on_them(timed: WebGpuDevice, timer: StepTimer) -> None:
    _, times = await Work(timed).step(timer, epilogues=0)
    assert times is not None and times[0] > 0 and times[1] == 0


async def test_steps_in_flight_keep_their_own_times(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    await work.step(timer)
    sizes = [1, 200, 1, 200, 1]
    began = time.perf_counter()
    reads = [work.step(timer, launches) for launches in sizes]
    answers = await asyncio.gather(*reads)
    wall = time.perf_counter() - began
    found = [times[0] for _, times in answers if times is not None]
    assert len(found) == len(sizes) and sum(found) < wall
    short, long = [t for t, n in zip(found, sizes, strict=True) if n == 1], [t for t, n in zip(found, sizes, strict=True) if n == 200]
    assert sorted(short)[1] < max(long)
    assert [data for data, _ in answers] == [ANSWER] * len(sizes)


async def test_a_part_of_several_passes_lasts_to_the_end_of_its_last(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    await work.step(timer)
    (_, short), (_, both) = await asyncio.gather(work.step(timer, 1, epilogues=0), work.step(timer, 1, 200, epilogues=0))
    assert short is not None and both is not None and short[0] < both[0] / 4


async def test_more_steps_than_slots_one_after_another(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    for _ in range(2 * SLOTS + 1):
        data, times = await work.step(timer)
        assert data == ANSWER and times is not None and times[0] > times[1] > 0


async def test_a_step_that_failed_half_way_leaves_nothing_to_the_next(timed: WebGpuDevice, timer: StepTimer) -> None:
    work = Work(timed)
    timer.start()
    work.bodies[200].run()
    timer.epilogues()
    with pytest.raises(DeviceError, match="lanes >= 1"):
        work.epilogue.run(lanes=0)
    _, times = await work.step(timer, epilogues=0)
    assert times is not None and times[0] > 0 and times[1] == 0
    assert timed.timing is None  # passes outside a step are not measured


async def test_a_step_without_passes_has_no_times(timed: WebGpuDevice, timer: StepTimer) -> None:
    buffer = timed.create_buffer(8)
    timed.write(buffer, 0, bytes(range(8)))
    timer.start()
    assert await timer.read(buffer, 0, 8) == (bytes(range(8)), None)


async def test_times_cost_no_submission_and_no_map(timed: WebGpuDevice, timer: StepTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(timed)
    await work.step(timer)
    submitted: list[int] = []
    flush = timed.flush

    def counted() -> None:
        submitted.append(timed._encoder is not None)
        flush()

    monkeypatch.setattr(timed, "flush", counted)
    before = sum(map(len, timed._reads._free.values()))
    await work.step(timer)
    assert sum(submitted) == 1
    assert sum(map(len, timed._reads._free.values())) == before  # one staging buffer, given back


async def test_nothing_is_asked_for_without_timing() -> None:
    device = lavapipe()
    assert FEATURE not in device.raw.features
    assert device.step_timer() is None
    work = Work(device)
    work.bodies[1].run()
    work.epilogue.run(lanes=1)
    assert await device.read(work.results, 0, 8) == ANSWER


async def test_an_adapter_without_the_feature_opens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        """An adapter that offers no feature."""

        features: frozenset[str] = frozenset()

        def __init__(self, adapter: Any) -> None:
            self._adapter = adapter

        def __getattr__(self, name: str) -> Any:
            return getattr(self._adapter, name)

    choose = wgpu_native.choose
    monkeypatch.setattr(wgpu_native, "choose", lambda adapters, allow: Without(choose(adapters, allow)))
    device = await wgpu_native.open_webgpu(allow_software=True, timed=True)
    assert device.step_timer() is None
    device.close()


async def test_a_back_end_that_tells_no_period_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_native, "timestamp_period", lambda raw: None)
    device = await wgpu_native.open_webgpu(allow_software=True, timed=True)
    assert device.step_timer() is None
    device.close()


def test_a_timer_on_a_device_without_the_feature_is_refused() -> None:
    device = lavapipe()
    wrong = WebGpuDevice(device.gpu, device.raw, replace(device.info), map_read=device.map_read, timestamp_period=1.0)
    with pytest.raises(DeviceError, match=f"create {4 * SLOTS} timestamp queries"):
        wrong.step_timer()


@pytest.mark.parametrize(
    ("ticks", "want"),
    [
        ([100, 300, 320, 400], (600e-9, 160e-9)),
        ([100, 300], (400e-9, 0.0)),
        ([100, 300, 250, 400], (600e-9, 200e-9)),  # the epilogues' begin was noted while the head still ran
        ([0, 300, 320, 400], None),
        ([100, 0, 320, 400], None),
        ([100, 300, 0, 400], None),
        ([100, 300, 320, 0], None),
        ([0, 0], None),
        ([100, 300, 320, 310], None),
        ([100, 300, 320, 20], None),  # wrapped
        ([400, 300], None),
        ([100, 100], None),
    ],
)
def test_ticks_become_seconds_or_none(ticks: list[int], want: Times | None) -> None:
    assert step_times(ticks, 2.0) == (None if want is None else pytest.approx(want, rel=1e-12))
