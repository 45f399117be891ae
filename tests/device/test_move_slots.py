"""Moving KV rows between slots: in list order on both devices, whatever overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.move_slots import SlotMover
from pie_core.device.protocol import NONE, Buffer, Device, Launch, LimitError
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import open_cpu_device
from tests.support.lavapipe import lavapipe

SLOTS, WIDTHS = 48, (12, 20)
Pairs = Sequence[tuple[int, int]]


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else lavapipe()


@pytest.fixture
def launch(device: Device) -> Callable[..., Buffer]:
    """Runs the template once over caches of 48 rows of 8 whose elements are their row's number; gives K."""

    def run(rows: Pairs, bucket: int) -> Buffer:
        words = [len(rows), 0, 1, 16, 16, 16, *[0] * 10]
        for source, target in rows:
            words += [source, NONE, 0, target, 0, 0, 0, 0]
        step = device.create_buffer(4 * len(words), "step")
        device.write(step, 0, np.array(words, np.uint32).tobytes())
        k, v = (device.create_buffer(4 * 8 * SLOTS, "cache") for _ in range(2))
        device.write(k, 0, np.repeat(np.arange(SLOTS, dtype=np.float32), 8).tobytes())
        kernel = device.compile(template("move_slots", width=8, bucket=bucket))
        device.compile_plan([Launch(kernel, {"step": step, "k_cache": k, "v_cache": v})]).run()
        return k

    return run


RNG = np.random.default_rng(4)
MOVES: dict[str, Pairs] = {
    "nothing": [],
    "one": [(40, 3)],
    "to its own slot": [(5, 5), (6, 6)],
    "a path to lower slots": [(20, 17), (23, 18), (24, 19), (30, 20), (31, 21)],
    "a run down by one": [(i, i - 1) for i in range(10, 40)],
    "a run down by many": [(i, i - 9) for i in range(10, 40)],
    "a run up by one repeats its first row": [(i, i + 1) for i in range(10, 40)],
    "a run up by three": [(i, i + 3) for i in range(10, 40)],
    "a run up, listed from its end": [(i, i + 3) for i in range(39, 9, -1)],
    "a run up behind itself": [(i, i + 20) for i in range(8, 28)],
    "a swap by way of a third slot": [(1, 47), (2, 1), (47, 2)],
    "the last one wins": [(1, 9), (2, 9), (3, 9)],
    "first and last slot": [(47, 0), (0, 46)],
    "64 at random": [(int(a), int(b)) for a, b in RNG.integers(0, SLOTS, (64, 2))],
    "150 at random": [(int(a), int(b)) for a, b in RNG.integers(0, SLOTS, (150, 2))],
}


def moved(array: Any, pairs: Pairs) -> Any:
    """One after the other."""
    out = array.copy()
    for source, target in pairs:
        out[target] = out[source]
    return out


@pytest.mark.parametrize("name", MOVES)
async def test_moves_follow_each_other(device: Device, name: str) -> None:
    rng = np.random.default_rng(1)
    content = [rng.standard_normal((2, SLOTS, width)).astype(np.float32) for width in WIDTHS]
    caches: list[tuple[Buffer, Buffer]] = []
    for layer, width in zip(content, WIDTHS, strict=True):
        k, v = (device.create_buffer(4 * SLOTS * width, "cache") for _ in range(2))
        device.write(k, 0, layer[0].tobytes())
        device.write(v, 0, layer[1].tobytes())
        caches.append((k, v))
    mover = SlotMover(device, caches, WIDTHS)
    mover.move(MOVES[name])
    mover.close()
    for layer, pair in zip(content, caches, strict=True):
        for before, buffer in zip(layer, pair, strict=True):
            got = np.frombuffer(await device.read(buffer, 0, buffer.size), np.float32).reshape(before.shape)
            np.testing.assert_array_equal(got, moved(before, MOVES[name]))
            buffer.destroy()


@pytest.mark.parametrize("pair", [(48, 0), (0, 48), (-1, 0), (0, -1)])
async def test_a_slot_outside_the_caches_moves_nothing(device: Device, pair: tuple[int, int]) -> None:
    k, v = (device.create_buffer(4 * 12 * SLOTS, "cache") for _ in range(2))
    data = np.arange(12 * SLOTS, dtype=np.float32)
    device.write(k, 0, data.tobytes())
    with pytest.raises(LimitError, match=f"cannot move slot {pair[0]} to slot {pair[1]}: the caches have 48 slots"):
        SlotMover(device, [(k, v)], [12]).move([(1, 2), pair])
    assert await device.read(k, 0, k.size) == data.tobytes()


async def test_the_kernel_skips_slots_outside_the_caches(device: Device, launch: Callable[..., Buffer]) -> None:
    k = launch([(SLOTS, 0), (1, SLOTS), (NONE, 2), (3, NONE), (1 << 29, 4), (7, 5)], 6)
    want = np.repeat(np.arange(SLOTS, dtype=np.float32), 8)
    want[40:48] = 7
    np.testing.assert_array_equal(np.frombuffer(await device.read(k, 0, k.size), np.float32), want)


async def test_a_mover_works_again_and_after_close(device: Device) -> None:
    k, v = (device.create_buffer(4 * 8 * SLOTS, "cache") for _ in range(2))
    device.write(k, 0, np.repeat(np.arange(SLOTS, dtype=np.float32), 8).tobytes())
    mover = SlotMover(device, [(k, v)], [8])
    mover.move([(9, 1)])
    mover.move([(1, 2), (10, 1)])
    mover.close()
    mover.close()
    mover.move([(2, 3)])
    got = np.frombuffer(await device.read(k, 0, k.size), np.float32)[::8]
    assert got[:5].tolist() == [0, 10, 9, 9, 4]


@pytest.mark.parametrize(("sizes", "width"), [((96, 48), 12), ((96, 96), 16), ((96, 96), 0), ((96, 96), 6)])
def test_caches_of_part_rows_are_refused(device: Device, sizes: tuple[int, int], width: int) -> None:
    k, v = (device.create_buffer(size, "cache") for size in sizes)
    with pytest.raises(LimitError, match=f"caches of {sizes[0]} and {sizes[1]} bytes do not hold whole rows of {4 * width} bytes .16"):
        SlotMover(device, [(k, v)], [width])
