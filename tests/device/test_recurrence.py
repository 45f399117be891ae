"""The recurrence kernel against NumPy on both devices: runs alone and mixed, partial folds by host and device counts, malformed runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import NONE, Buffer, Device, KernelError, Launch
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import open_cpu_device
from tests.device.oracles import F32, F64
from tests.support.lavapipe import lavapipe

SLOTS, BUCKET, ARENA = 8, 40, 16
STRIDE, OFFSET = 204, 64
WIDTHS = (4, 68, 140)


@dataclass(frozen=True)
class Run:
    """One entry of the recurrence table over `rows` token rows. `limit` None: all of them."""

    rows: int
    start: int = NONE
    write: int = NONE
    limit: int | None = None
    cell: int = NONE

    def words(self, begin: int) -> list[int]:
        """The entry, when the rows before it are `begin`."""
        return [begin + self.rows, self.start, self.write, self.rows if self.limit is None else self.limit, self.cell]


def step_words(runs: Sequence[Run], *, tokens: int | None = None, table: int | None = None, count: int | None = None) -> Any:
    """A step buffer with nothing but a recurrence table."""
    entries, begin = [], 0
    for run in runs:
        entries += run.words(begin)
        begin += run.rows
    n = begin if tokens is None else tokens
    at = 16 + 8 * n
    header = [n, 0, 1, 16, at, at, at if table is None else table, len(runs) if count is None else count, *[0] * 8]
    return np.array([*header, *[0] * 8 * n, *entries], np.uint32)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else lavapipe()


@dataclass
class Case:
    """Random inputs of one width, and what a launch made of them."""

    device: Device
    width: int
    arena: Any = field(default_factory=lambda: np.zeros(ARENA, np.int32))

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.width)
        self.x = rng.standard_normal((BUCKET, self.width)).astype(np.float32)
        self.decay = rng.uniform(-0.99, 0.99, self.width).astype(np.float32)
        self.gain = rng.standard_normal(self.width).astype(np.float32)
        self.state = rng.standard_normal((SLOTS, STRIDE)).astype(np.float32)

    def buffer(self, array: Any) -> Buffer:
        made = self.device.create_buffer(array.nbytes, "test")
        self.device.write(made, 0, np.ascontiguousarray(array).tobytes())
        return made

    async def run(self, words: Any, x: F32 | None = None) -> tuple[F32, F32]:
        """(rows of out, the whole state afterwards)."""
        buffers = {"step": self.buffer(words), "arena": self.buffer(self.arena), "x": self.buffer(self.x if x is None else x)}
        buffers |= {"decay": self.buffer(self.decay), "gain": self.buffer(self.gain), "state": self.buffer(self.state)}
        buffers["out"] = self.buffer(np.full((BUCKET, self.width), 7, np.float32))
        kernel = self.device.compile(template("recur", width=self.width, stride=STRIDE, offset=OFFSET, bucket=BUCKET))
        self.device.compile_plan([Launch(kernel, buffers)]).run()
        got = [await self.device.read(buffers[name], 0, buffers[name].size) for name in ("out", "state")]
        for buffer in buffers.values():
            buffer.destroy()
        return np.frombuffer(got[0], np.float32).reshape(BUCKET, -1), np.frombuffer(got[1], np.float32).reshape(SLOTS, STRIDE)

    def oracle(self, runs: Sequence[Run]) -> tuple[F64, F64]:
        """The same in float64, row after row."""
        part = slice(OFFSET, OFFSET + self.width)
        out, state, t = np.full((BUCKET, self.width), 7, np.float64), self.state.astype(np.float64), 0
        for run in runs:
            limit = run.rows if run.limit is None else run.limit
            folded = limit if run.cell == NONE else min(max(int(self.arena[run.cell]), 0), limit)
            h = np.zeros(self.width) if run.start == NONE else self.state[run.start, part].astype(np.float64)
            states = [h]
            for r in range(run.rows):
                before = states[folded] if r == limit else states[-1]
                states.append(self.decay * before + self.gain * self.x[t].astype(np.float64))
                out[t], t = states[-1], t + 1
            if run.write != NONE:
                state[run.write, part] = states[folded]
        return out, state


CASES: dict[str, Sequence[Run]] = {
    "one token of nothing": [Run(1)],
    "one token kept": [Run(1, write=3)],
    "one token from a slot to another": [Run(1, 2, 5)],
    "a prompt": [Run(BUCKET, write=7)],
    "in place": [Run(5, 4, 4)],
    "nothing is kept": [Run(3, 4)],
    "replayed, nothing folded": [Run(6, 1, NONE, 0)],
    "partly folded": [Run(6, 1, 2, 2)],
    "nothing folded is a copy": [Run(3, 1, 2, 0)],
    "forks of one slot": [Run(2, 1, 2), Run(4, 1, 3), Run(1, 1), Run(3, 1, 4, 1)],
    "mixed": [Run(1, 0, 6), Run(17, NONE, 1), Run(1, 2, 3), Run(9, 4, 5, 4), Run(1, NONE, 7), Run(11, 2)],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
async def test_runs(device: Device, name: str, width: int) -> None:
    case = Case(device, width)
    out, state = await case.run(step_words(CASES[name]))
    want_out, want_state = case.oracle(CASES[name])
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, want_state, rtol=1e-5, atol=1e-5)
    untouched = np.ones(SLOTS, bool)
    untouched[[run.write for run in CASES[name] if run.write != NONE]] = False
    np.testing.assert_array_equal(state[untouched], case.state[untouched])
    np.testing.assert_array_equal(state[:, :OFFSET], case.state[:, :OFFSET])


async def test_a_run_has_the_same_bits_alone_and_in_any_batch(device: Device) -> None:
    case = Case(device, 68)
    runs = CASES["mixed"]
    for order in (runs, runs[::-1]):
        out, state = await case.run(step_words(order))
        begin = 0
        for run in order:
            alone, kept = await case.run(step_words([run]), np.roll(case.x, -begin, axis=0))
            np.testing.assert_array_equal(alone[: run.rows], out[begin : begin + run.rows])
            if run.write != NONE:
                np.testing.assert_array_equal(kept[run.write], state[run.write])
            begin += run.rows


@pytest.mark.parametrize("cut", [1, 7, 20, 39])
async def test_a_prompt_in_chunks_has_the_bits_of_the_whole(device: Device, cut: int) -> None:
    case = Case(device, 68)
    out, state = await case.run(step_words([Run(BUCKET, write=0)]))
    first, after = await case.run(step_words([Run(cut, write=0)]))
    case.state = after
    rest, end = await case.run(step_words([Run(BUCKET - cut, 0, 0)]), np.roll(case.x, -cut, axis=0))
    np.testing.assert_array_equal(first[:cut], out[:cut])
    np.testing.assert_array_equal(rest[: BUCKET - cut], out[cut:])
    np.testing.assert_array_equal(end, state)


@pytest.mark.parametrize("count", [-(1 << 31), -1, 0, 1, 3, 5, 6, (1 << 31) - 1])
async def test_the_device_says_how_many_are_folded(device: Device, count: int) -> None:
    """Five rows that may be folded, then three that go on from those that were: as if the others had never been there."""
    case = Case(device, 68)
    case.arena[9] = count
    runs = [Run(2, 3, 0), Run(8, 1, 2, 5, 9), Run(1, 1, 4)]
    out, state = await case.run(step_words(runs))
    want_out, want_state = case.oracle(runs)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, want_state, rtol=1e-5, atol=1e-5)
    n = min(max(count, 0), 5)
    plain = [*range(2, 2 + n), *range(7, 10)]  # the rows of a sequence that has only what was folded
    alone, kept = await case.run(step_words([Run(n + 3, 1, 2, n)]), np.concatenate([case.x[plain], case.x[: BUCKET - n - 3]]))
    np.testing.assert_array_equal(alone[n : n + 3], out[7:10])
    np.testing.assert_array_equal(kept[2], state[2])


GOOD = [Run(2, 3, 0), Run(3, 1, 2)]
BAD: dict[str, tuple[Sequence[Run], dict[str, Any], slice]] = {
    "start outside": ([*GOOD, Run(2, SLOTS, 5)], {}, slice(5, 7)),
    "write outside": ([*GOOD, Run(2, 1, SLOTS)], {}, slice(5, 7)),
    "more folded than rows": ([*GOOD, Run(2, 1, 5, 3)], {}, slice(5, 7)),
    "cell outside": ([*GOOD, Run(2, 1, 5, 1, ARENA)], {}, slice(5, 7)),
    "behind the last token": ([*GOOD, Run(9, 1, 5)], {"tokens": 7}, slice(5, 7)),
    "rows of no run": (GOOD, {"tokens": 9}, slice(5, 9)),
    "no table": (GOOD, {"table": 0, "count": 0}, slice(0, 5)),
    "table in the header": (GOOD, {"table": 8}, slice(0, 5)),
    "table outside": (GOOD, {"table": 1 << 31}, slice(0, 5)),
    "table over the end": (GOOD, {"count": 3}, slice(0, 5)),
    "far too many": (GOOD, {"count": NONE}, slice(0, 5)),
}


@pytest.mark.parametrize("name", BAD)
async def test_malformed_runs_are_nan_and_hurt_nobody_else(device: Device, name: str) -> None:
    runs, header, nan = BAD[name]
    case = Case(device, 68)
    out, state = await case.run(step_words(runs, **header))
    want_out, want_state = await case.run(step_words(GOOD))
    if nan.start == 0:  # nothing of it can be trusted
        want_state = case.state
    want = want_out.copy()
    want[nan] = np.nan
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(state, want_state)


PARAMS = {"width": 8, "stride": 24, "offset": 8, "bucket": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"width": 6}, "width"), ({"stride": 0}, "stride"), ({"stride": 23}, "stride"), ({"bucket": 0}, "bucket"),
     ({"offset": 20}, "offset"), ({"offset": 2}, "offset"), ({"offset": -4}, "offset"), ({"offset": "0"}, "offset")],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_refused(device: Device, change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=f"recur: .*{message}"):
        device.compile(template("recur", **{**PARAMS, **change}))
