"""Gates on both devices: what they mask in a step, what they leave alone, and that plans and lanes behind a shut gate do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import NONE, Buffer, Device, DeviceError, EpilogueSpec, Launch
from pie_core.device.templates import template
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.channel import put
from pie_server.adapters.cpu_module import open_cpu_device
from tests.support.lavapipe import as_gpu, lavapipe

BUCKET, ARENA = 70, 64
HEADER = 16


@dataclass(frozen=True)
class Gate:
    """One gate: arena word, cell to look at, and how many words of the step it masks."""

    word: int
    cell: int = NONE
    places: int = 1


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu", "gpu kernels, direct dispatches"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    if request.param == "cpu":
        return cpu
    device = lavapipe() if request.param == "webgpu" else as_gpu()
    assert device.indirect == (request.param == "webgpu")
    return device


def step_words(gates: Sequence[Gate], free: int = 0, tokens: int = 5) -> tuple[Any, list[range]]:
    """A step buffer of header, rows, masked words and the table; and where each gate's masked words lie."""
    at, ranges = HEADER + 8 * tokens, []
    for gate in gates:
        ranges.append(range(at, at + gate.places))
        at += gate.places
    places = [word for r in ranges for word in r]
    table = at + len(places)
    entries, first = [], at
    for gate in gates:
        entries += [gate.word, gate.cell, first, gate.places]
        first += gate.places
    header = [tokens, 2, 1, HEADER, at, at, 0, 0, table, len(gates), free, *[0] * 5]
    return np.array([*header, *[5] * (at - HEADER), *places, *entries], np.uint32), ranges


def buffer(device: Device, words: Any, label: str) -> Buffer:
    made = device.create_buffer(words.nbytes, label)
    device.write(made, 0, words.tobytes())
    return made


async def gated(device: Device, words: Any, arena: Any) -> tuple[Any, Any]:
    """(step, arena) after the kernel."""
    buffers = {"step": buffer(device, words, "step"), "arena": buffer(device, arena, "arena")}
    device.compile_plan([Launch(device.compile(template("gate", bucket=BUCKET)), buffers)]).run()
    step, after = [
        np.frombuffer(await device.read(b, 0, b.size), np.uint32)[: len(n)] for b, n in zip(buffers.values(), (words, arena), strict=True)
    ]
    for b in buffers.values():
        b.destroy()
    return step, after


CASES: dict[str, tuple[list[Gate], dict[int, int], int, list[bool]]] = {  # gates, arena, free rows, which are shut
    "open": ([Gate(3, 4)], {}, 0, [False]),
    "no cell yet": ([Gate(3)], {}, 0, [False]),
    "the cell says stop": ([Gate(3, 4, 3)], {4: 1}, 0, [True]),
    "stopped before": ([Gate(3, 4)], {3: 1}, 0, [True]),
    "one of two": ([Gate(3, 4, 2), Gate(7, 8, 2)], {8: 1}, 0, [False, True]),
    "both": ([Gate(3, 4), Gate(7, 8)], {4: 1, 7: 1}, 0, [True, True]),
    "beside rows without a gate": ([Gate(3, 4, 4)], {4: 1}, 2, [True]),
    "more gates than invocations": (
        [Gate(k, NONE, 2) for k in range(BUCKET - 6)],
        {60: 1, 1: 1},
        0,
        [k in (1, 60) for k in range(BUCKET - 6)],
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_gates_mask_and_empty(device: Device, name: str) -> None:
    gates, cells, free, shut = CASES[name]
    words, ranges = step_words(gates, free)
    arena = np.zeros(ARENA, np.uint32)
    for word, value in cells.items():
        arena[word] = value
    want, latched = words.copy(), arena.copy()
    for gate, places, dead in zip(gates, ranges, shut, strict=True):
        latched[gate.word] = int(dead)
        if dead:
            want[list(places)] = NONE
    if all(shut) and not free:
        want[:2] = 0
    step, after = await gated(device, words, arena)
    np.testing.assert_array_equal(step, want)
    np.testing.assert_array_equal(after, latched)


async def test_a_step_without_gates_is_left_alone(device: Device) -> None:
    words, _ = step_words([])
    step, _ = await gated(device, words, np.ones(ARENA, np.uint32))
    np.testing.assert_array_equal(step, words)


async def test_a_table_outside_the_step_masks_nothing(device: Device) -> None:
    words, _ = step_words([Gate(0)])
    words[8] = 1 << 20
    if isinstance(device, CpuDevice):
        with pytest.raises(DeviceError):  # a malformed step is a fault there, and the device is lost: so on a device of its own
            other = open_cpu_device()
            try:
                await gated(other, words, np.ones(ARENA, np.uint32))
            finally:
                other.close()
    else:
        step, _ = await gated(device, words, np.ones(ARENA, np.uint32))
        np.testing.assert_array_equal(step, words)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("run_gated", [False, True])
async def test_a_gated_plan_runs_unless_the_step_is_empty(device: Device, tokens: int, run_gated: bool) -> None:
    words = np.zeros(64, np.uint32)
    words[:6] = tokens, 0, 1, HEADER, HEADER + 8, HEADER + 8
    x = np.arange(1, 9, dtype=np.float32)
    buffers = {"step": buffer(device, words, "step"), "x": buffer(device, x, "x"), "weight": buffer(device, np.ones(8, np.float32), "w")}
    buffers["out"] = buffer(device, np.full(8, 7, np.float32), "out")
    kernel = device.compile(template("rms_norm", width=8, eps=1e-5, rows="tokens", bucket=1))
    plan = device.compile_plan([Launch(kernel, buffers)] * 2)
    for _ in range(2):
        plan.run(gated=run_gated)
    out = np.frombuffer(await device.read(buffers["out"], 0, 32), np.float32)
    want = x / np.sqrt(np.mean(x * x) + 1e-5) if tokens else np.full(8, 7, np.float32)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    for b in buffers.values():
        b.destroy()


class Cell:
    dtype, shape, capacity, is_counter = "i32", (), 1, False


@pytest.mark.parametrize("vocab", [9, 20_000])
async def test_a_lane_whose_gate_is_shut_writes_nothing(device: Device, vocab: int) -> None:
    """Neither its status, outputs and copies nor its cells; the lanes beside it run."""
    cell = Cell()

    def program() -> Any:
        token = reduce_argmax(intrinsics.output(0, "logits"))
        put(cell, token)
        return token

    traced = trace_epilogue(program, Model(vocab, 4))
    logits = np.zeros((3, vocab), np.float32)
    logits[range(3), [4, 5, 6]] = 1
    lanes = np.array([[0, 0, NONE, 10, 1, 2], [NONE, 3, NONE, 11, 4, 5], [2, 6, NONE, 12, 7, 8]], np.uint32)
    buffers = {"logits": buffer(device, logits, "logits"), "lanes": buffer(device, np.resize(lanes.reshape(-1), 64), "lanes")}
    buffers |= {name: buffer(device, np.full(64, 99, np.uint32), name) for name in ("arena", "results")}
    plan = device.compile_plan([Launch(device.compile(EpilogueSpec(traced.program)), buffers)])
    plan.run(lanes=3, gated=True)
    arena, results = [np.frombuffer(await device.read(buffers[n], 0, 64), np.uint32).tolist() for n in ("arena", "results")]
    assert arena[10:13] == [4, 99, 6]
    assert results[:9] == [0, 4, 4, 99, 99, 99, 0, 6, 6]
    for b in buffers.values():
        b.destroy()
