"""Host-written channels in any order: a pass sees the cell that was there when it was submitted, whatever is in flight."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pie_core.engine.errors import ChannelEmpty, EngineError, InvalidPass
from pie_core.eta.channel import put, read, take
from tests.engine.fake_runner import FakeRunner
from tests.engine.support import argmax, running, settle, spec

ACTS = st.lists(st.sampled_from(["put", "set", "take", "read", "set", "take", "wait", "breathe"]), min_size=1, max_size=24)


async def told(acts: list[str], capacity: int, sets: int) -> tuple[list[int], list[int | str]]:
    """What each pass must see by the order of the calls, and what it saw. `sets`: working sets that the passes go to in turn."""
    cells: list[int] = []  # a naive ring: what no pass has taken yet
    expected: list[int] = []
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("any order")
        pipe, ch = inst.pipeline(), inst.channel("u32", (), capacity, host="writer")
        working = [inst.working_set() for _ in range(sets)]
        outs: list[asyncio.Future[object]] = []
        for value, act in enumerate(acts):
            if act == "put":
                if not ch.room():
                    continue
                inst.put(ch, [value])
                cells.append(value)
            elif act == "set":
                inst.set(ch, [value])
                cells[:1] = [value]
            elif act == "wait":
                await asyncio.gather(*outs)
            elif act == "breathe":
                await asyncio.sleep(0)
            else:
                work = spec([value], [working[value % sets]], lambda act=act: take(ch) if act == "take" else read(ch))  # type: ignore[misc]
                if not cells:
                    with pytest.raises(ChannelEmpty):
                        inst.submit(pipe, work)
                    continue
                expected.append(cells.pop(0) if act == "take" else cells[0])
                outs.append(inst.submit(pipe, work)[0])
        seen = [
            error.type_name if isinstance(error, EngineError) else error for error in await asyncio.gather(*outs, return_exceptions=True)
        ]
        inst.close()
    return expected, seen  # type: ignore[return-value]


@settings(max_examples=150, deadline=None)
@given(acts=ACTS, capacity=st.sampled_from([1, 2, 3, 6]), sets=st.sampled_from([1, 3]))
def test_passes_see_what_was_there_at_submit(acts: list[str], capacity: int, sets: int) -> None:
    expected, seen = asyncio.run(told(acts, capacity, sets))
    assert seen == expected


SEEN_BY_USERS = [
    ("put put take set take", [0, 3]),
    ("put take set put wait take take", [0, 2, 3]),
    ("set take set take set take set take", [0, 2, 4, 6]),
    ("put read set take", [0, 2]),
    ("put read read set read take", [0, 0, 3, 3]),
    ("put take set set take", [0, 3]),
]


@pytest.mark.parametrize(("acts", "values"), SEEN_BY_USERS)
@pytest.mark.parametrize("capacity", [1, 3])
async def test_cases(acts: str, values: list[int], capacity: int) -> None:
    expected, seen = await told(acts.split(), max(capacity, acts.count("put") + acts.count("put take set put")), 1)
    assert seen == expected == values


async def test_a_stop_channel_is_put_into_by_its_own_pipeline_only() -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("stop")
        ws, pipe, other, stop = inst.working_set(), inst.pipeline(), inst.pipeline(), inst.channel("bool", (), 1)
        pipe.stop_when(stop)

        def says() -> object:
            put(stop, argmax() >= 0)
            return argmax()

        with pytest.raises(InvalidPass, match="ends another pipeline"):
            inst.submit(other, spec([1], [inst.working_set()], says))
        await inst.submit(pipe, spec([1], [ws], says))[0]
        await settle()
        assert pipe.stopped
        inst.close()
