"""The cpu device when things go wrong: failed work, traps, several event loops, closing while busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.cpu_module import fault_text
from pie_core.device.protocol import DeviceError, DeviceLost, DeviceOutOfMemory, Launch
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import WasmtimeCpuModule, open_cpu_device
from pie_server.build.cpu_module import cpu_module
from tests.device.cpu_support import NORM, norm
from tests.device.oracles import Step, Token


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.mark.parametrize(("word", "value"), [(0, 2), (0, 1 << 31), (3, 1 << 30), (3, 500)])
async def test_a_malformed_step_fails_the_next_read(device: CpuDevice, word: int, value: int) -> None:
    bindings = norm(device)
    words = Step([Token()]).words()
    words[word] = value
    device.write(bindings["step"], 0, words.tobytes())
    plan = device.compile_plan([Launch(device.compile(template("rms_norm", **NORM)), bindings)])
    plan.run()
    plan.run()
    for _ in range(2):
        with pytest.raises(DeviceError, match="record 0 of a plan: the step buffer's counts or offsets"):
            await device.read(bindings["out"], 0, 4)


async def test_a_read_before_the_failure_still_succeeds(device: CpuDevice) -> None:
    bindings = norm(device)
    before = device.read(bindings["out"], 0, 4)
    device.write(bindings["step"], 0, b"\xff" * 64)
    device.compile_plan([Launch(device.compile(template("rms_norm", **NORM)), bindings)]).run()
    assert await before == bytes(4)
    with pytest.raises(DeviceError):
        await device.read(bindings["out"], 0, 4)


async def test_a_trap_is_a_lost_device() -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    module.call("mem_zero", 1 << 31, 4)  # outside of memory
    with pytest.raises(DeviceLost, match=r"stopped in mem_zero: .*out of bounds"):
        await module.read(0, 4)
    module.write(0, bytes(1 << 20))  # does not wait for ever
    module.close()


async def test_a_read_or_write_outside_of_memory_is_an_error() -> None:
    for act in ("read", "write"):
        module = WasmtimeCpuModule(cpu_module().read_bytes())
        if act == "write":
            module.write(1 << 31, b"abcd")
        with pytest.raises(DeviceError, match=f"a {act}"):
            await module.read(1 << 31, 4)
        module.close()


async def test_thread_time_counts_enqueued_work_only() -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    device = CpuDevice(module)
    plan, _ = slow_plan(device, 0.02)
    first, idle = await module.thread_time(), await module.thread_time()
    plan.run()
    busy = await module.thread_time()
    assert busy - idle > 10 * (idle - first) > 0
    device.close()


async def test_an_unknown_export_is_a_lost_device() -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    module.call("nonsense")
    with pytest.raises(DeviceLost, match="nonsense"):
        await module.read(0, 4)
    module.close()


async def test_memory_that_the_system_refuses() -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    module.grow(1 << 40)
    with pytest.raises(DeviceOutOfMemory, match="refused"):
        await module.read(0, 4)
    module.close()


def test_bytes_that_are_no_module() -> None:
    with pytest.raises(DeviceError, match="cannot run the cpu module"):
        WasmtimeCpuModule(b"\0asm nonsense")


FAULTS = [("run_plan", 0x302, "record 3"), ("repack", 3, "call of repack"), ("repack", 77, "fault 77")]


@pytest.mark.parametrize(("export", "code", "text"), FAULTS)
def test_faults_have_words(export: str, code: int, text: str) -> None:
    assert text in fault_text(export, code)


# Event loops and closing


def slow_plan(device: CpuDevice, seconds: float) -> tuple[Any, CpuBuffer]:
    """A plan that takes about that long, and its output."""
    m = k = 2048
    weight = device.upload("f32", m, k, [memoryview(bytes(4 * m * k))], "w")
    bindings = {name: device.create_buffer(4 * 2048, name) for name in ("x", "out")}
    step = device.create_buffer(512, "step")
    device.write(step, 0, Step([Token()]).words().tobytes())
    kernel = device.compile(template("linear", fmt="f32", m=m, k=k, add=False, rows="tokens", bucket=1))
    launch = Launch(kernel, {"step": step, "quants": weight.quants, "scales": weight.quants, **bindings})
    return device.compile_plan([launch] * int(seconds / 0.001)), bindings["out"]


def test_two_event_loops_share_a_device(device: CpuDevice) -> None:
    errors: list[BaseException] = []

    async def work(value: int) -> None:
        buffer = device.create_buffer(4, "x")
        for i in range(200):
            word = (value + i).to_bytes(4, "little")
            device.write(buffer, 0, word)
            assert await device.read(buffer, 0, 4) == word

    def loop(value: int) -> None:
        try:
            asyncio.run(work(value))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(1000 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


async def test_the_loop_runs_on_while_the_device_works(device: CpuDevice) -> None:
    plan, out = slow_plan(device, 0.3)
    plan.run()
    read = asyncio.ensure_future(device.read(out, 0, 4))
    ticks = 0
    while not read.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 3


async def test_close_while_busy_finishes_what_was_enqueued() -> None:
    others = set(threading.enumerate())
    device = open_cpu_device()
    plan, out = slow_plan(device, 0.05)
    plan.run()
    read = device.read(out, 0, 4)
    device.close()
    device.close()
    assert await read == bytes(4)
    assert set(threading.enumerate()) <= others
    spec = template("rms_norm", **NORM)
    for act in (plan.run, lambda: device.create_buffer(4), lambda: device.read(out, 0, 4), lambda: device.compile(spec)):
        with pytest.raises(DeviceLost, match="closed"):
            act()
    out.destroy()  # giving back is fine


async def test_a_cancelled_read_harms_nobody(device: CpuDevice) -> None:
    plan, out = slow_plan(device, 0.02)
    plan.run()
    first = asyncio.ensure_future(device.read(out, 0, 4))
    second = device.read(out, 0, 4)
    await asyncio.sleep(0)
    first.cancel()
    assert await second == bytes(4)


def test_a_loop_that_ended_before_its_answer_harms_nobody(device: CpuDevice) -> None:
    plan, out = slow_plan(device, 0.05)

    async def leave() -> None:
        plan.run()
        device.read(out, 0, 4)

    asyncio.run(leave())

    async def stay() -> bytes:
        return await device.read(out, 0, 4)

    assert asyncio.run(stay()) == bytes(4)
