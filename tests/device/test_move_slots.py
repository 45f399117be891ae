"""Moving KV rows between slots: in list order on both devices, whatever overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.move_slots import SlotMover, runs
from pie_core.device.protocol import Buffer, Device, LimitError
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
    SlotMover(device, caches, WIDTHS).move(MOVES[name])
    for layer, pair in zip(content, caches, strict=True):
        for before, buffer in zip(layer, pair, strict=True):
            got = np.frombuffer(await device.read(buffer, 0, buffer.size), np.float32).reshape(before.shape)
            np.testing.assert_array_equal(got, moved(before, MOVES[name]))
            buffer.destroy()


@pytest.mark.parametrize("name", MOVES)
def test_runs_do_what_the_list_does(name: str) -> None:
    rows = np.arange(SLOTS)
    got = rows.copy()
    for source, target, count in runs(MOVES[name]):
        assert source != target
        got[target : target + count] = got[source : source + count].copy()
    np.testing.assert_array_equal(got, moved(rows, MOVES[name]))


JOINED = [("a run down by one", 1), ("a run down by many", 1), ("a run up behind itself", 1), ("a path to lower slots", 3), ("nothing", 0)]


@pytest.mark.parametrize(("name", "copies"), JOINED)
def test_neighbours_are_one_copy(name: str, copies: int) -> None:
    assert len(list(runs(MOVES[name]))) == copies


@pytest.mark.parametrize("pair", [(48, 0), (0, 48), (-1, 0), (0, -1)])
async def test_a_slot_outside_the_caches_moves_nothing(device: Device, pair: tuple[int, int]) -> None:
    k, v = (device.create_buffer(4 * 12 * SLOTS, "cache") for _ in range(2))
    data = np.arange(12 * SLOTS, dtype=np.float32)
    device.write(k, 0, data.tobytes())
    with pytest.raises(LimitError, match=f"cannot move slot {pair[0]} to slot {pair[1]}: the caches have 48 slots"):
        SlotMover(device, [(k, v)], [12]).move([(1, 2), pair])
    assert await device.read(k, 0, k.size) == data.tobytes()


@pytest.mark.parametrize(("sizes", "width"), [((96, 48), 12), ((96, 96), 16), ((96, 96), 0)])
def test_caches_of_part_rows_are_refused(device: Device, sizes: tuple[int, int], width: int) -> None:
    k, v = (device.create_buffer(size, "cache") for size in sizes)
    with pytest.raises(LimitError, match=f"caches of {sizes[0]} and {sizes[1]} bytes do not hold whole rows of {4 * width} bytes"):
        SlotMover(device, [(k, v)], [width])
