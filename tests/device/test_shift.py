"""Shifts on both devices: totals, rows that move, rows and slots that stay, and tables that no step may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import NONE, Buffer, Device, DeviceError, Launch
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import open_cpu_device
from tests.support.lavapipe import as_gpu, lavapipe

BUCKET, ARENA, HEADER = 70, 64, 16
PAGES = [9, 4, 7]


@dataclass(frozen=True)
class Shift:
    """An entry of the table, in its order."""

    total: int
    fresh: int
    cell: int
    limit: int
    known: int
    first: int
    early: int
    rows: int


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu", "gpu kernels"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    if request.param == "cpu":
        return cpu
    return lavapipe() if request.param == "webgpu" else as_gpu()


def step_words(rows: list[tuple[int, bool]], shifts: list[Shift]) -> Any:
    """A step of (position, whether it stores) rows of one sequence, and a shift table."""
    table = HEADER + 8 * len(rows)
    words = [len(rows), 0, 1, HEADER, table, table, 0, 0, 0, 0, 0, table + len(PAGES), len(shifts), 0, 0, 0]
    for k, (pos, stores) in enumerate(rows):
        words += [k, NONE, pos, slot(pos) if stores else NONE, table, 0, 0, 0]
    return np.array([*words, *PAGES, *(word for shift in shifts for word in astuple(shift))], np.uint32)


def slot(pos: int) -> int:
    return PAGES[pos // 16] * 16 + pos % 16


def buffer(device: Device, words: Any, label: str) -> Buffer:
    made = device.create_buffer(words.nbytes, label)
    device.write(made, 0, words.tobytes())
    return made


async def shifted(device: Device, words: Any, arena: Any) -> tuple[Any, Any]:
    """(step, arena) after the kernel."""
    buffers = {"step": buffer(device, words, "step"), "arena": buffer(device, arena, "arena")}
    try:
        device.compile_plan([Launch(device.compile(template("shift", bucket=BUCKET)), buffers)]).run()
        read = [await device.read(b, 0, b.size) for b in buffers.values()]
        return tuple(np.frombuffer(data, np.uint32)[: len(n)] for data, n in zip(read, (words, arena), strict=True))
    finally:
        for b in buffers.values():
            b.destroy()


ROWS = [(pos, True) for pos in range(28, 36)]
CASES: dict[str, tuple[Shift, dict[int, int], int, int, int]] = {  # shift, arena, total after, moves of early rows and of the others
    "all were kept": (Shift(3, 1, 4, 5, 0, 0, 0, 8), {4: 5}, 0, 0, 0),
    "two were kept": (Shift(3, 1, 4, 5, 0, 0, 0, 8), {4: 2}, 3, 0, 3),
    "what the word held is no total": (Shift(3, 1, 4, 5, 0, 0, 0, 8), {3: 99, 4: 2}, 3, 0, 3),
    "none, over a page's edge": (Shift(3, 1, 4, 14, 0, 0, 0, 8), {4: 0}, 14, 0, 14),
    "more than there are": (Shift(3, 1, 4, 5, 0, 0, 0, 8), {4: 77}, 0, 0, 0),
    "a negative count": (Shift(3, 1, 4, 5, 0, 0, 0, 8), {4: NONE}, 5, 0, 5),
    "behind another count": (Shift(3, 0, 4, 5, 0, 0, 0, 8), {3: 4, 4: 2}, 7, 0, 7),
    "the host knows a part": (Shift(3, 0, 4, 5, 4, 0, 0, 8), {3: 4, 4: 2}, 7, 0, 3),
    "no new count": (Shift(3, 0, NONE, 0, 1, 0, 0, 8), {3: 6}, 6, 0, 5),
    "replayed rows are in front of the count": (Shift(3, 0, 4, 5, 4, 0, 3, 8), {3: 6, 4: 1}, 10, 2, 6),
    "a part of the rows": (Shift(3, 1, 4, 5, 0, 2, 1, 4), {4: 0}, 5, 0, 5),
}


@pytest.mark.parametrize("name", CASES)
async def test_rows_move(device: Device, name: str) -> None:
    shift, cells, total, early, late = CASES[name]
    arena = np.zeros(ARENA, np.uint32)
    for word, value in cells.items():
        arena[word] = value
    words = step_words(ROWS, [shift])
    moved = [(p - (early if k < shift.first + shift.early else late) if shift.first <= k < shift.first + shift.rows else p, s)
             for k, (p, s) in enumerate(ROWS)]  # fmt: skip
    want = arena.copy()
    want[shift.total] = total
    step, after = await shifted(device, words, arena)
    np.testing.assert_array_equal(step, step_words(moved, [shift]))
    np.testing.assert_array_equal(after, want)


async def test_several_shifts_and_rows_that_store_nothing(device: Device) -> None:
    n = 33
    rows = [(30 + k % 3, k % 3 != 0) for k in range(2 * n)]
    shifts = [Shift(k, 1, ARENA - 1, 9, 0, 2 * k, 0, 2) for k in range(n)]
    arena = np.full(ARENA, 4, np.uint32)
    step, after = await shifted(device, step_words(rows, shifts), arena)
    np.testing.assert_array_equal(step, step_words([(pos - 5, stores) for pos, stores in rows], shifts))
    np.testing.assert_array_equal(after, [*[5] * n, *[4] * (ARENA - n)])


async def test_a_step_without_shifts_is_left_alone(device: Device) -> None:
    words, arena = step_words(ROWS, []), np.arange(ARENA, dtype=np.uint32)
    step, after = await shifted(device, words, arena)
    np.testing.assert_array_equal(step, words)
    np.testing.assert_array_equal(after, arena)


@pytest.mark.parametrize("what", ["table in the header", "table behind the end", "total outside the arena", "rows behind the last"])
async def test_a_malformed_table_harms_nobody(device: Device, cpu: CpuDevice, what: str) -> None:
    """The cpu refuses it; webgpu leaves the step alone, or moves the rows that there are."""
    rows = 9 if what == "rows behind the last" else 8
    words = step_words(ROWS, [Shift(ARENA if what == "total outside the arena" else 3, 1, 4, 5, 0, 0, 0, rows)])
    if what == "table in the header":
        words[11] = 15
    if what == "table behind the end":
        words[11] = len(words) - 7
    arena = np.zeros(ARENA, np.uint32)
    if device is cpu:
        other = open_cpu_device()  # it is lost by that
        try:
            with pytest.raises(DeviceError):
                await shifted(other, words, arena)
        finally:
            other.close()
        return
    step, after = await shifted(device, words, arena)
    if what == "rows behind the last":
        assert after[3] == 5
        assert list(step[HEADER + 2 : HEADER + 64 : 8]) == [pos - 5 for pos, _ in ROWS]
    else:
        np.testing.assert_array_equal(step, words)
        np.testing.assert_array_equal(after, arena)


async def test_a_row_that_would_leave_its_page_table_stores_nothing(device: Device) -> None:
    """Its position is none of the cache: attention makes it a NaN row."""
    shift = Shift(3, 1, 4, 40, 0, 0, 0, 8)
    step, _ = await shifted(device, step_words(ROWS, [shift]), np.zeros(ARENA, np.uint32))
    assert list(step[HEADER + 3 : HEADER + 64 : 8]) == [NONE] * 8
