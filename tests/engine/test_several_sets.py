"""Passes on several working sets that run over several steps: each read-out is that of its own token, whatever runs beside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from tests.engine.fake_runner import VOCAB, FakeRunner, generate, limits, reference
from tests.engine.support import argmax, decode, running, spec

STEP = 32  # tokens, of `limits()`
LISTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90), min_size=1, max_size=6)


async def read_all(inst: Instance, pipe: Pipeline, lists: Sequence[list[int]], reads: Sequence[list[int]] | None) -> list[int]:
    """The greedy tokens of all read-outs of one pass on new sets, which goes on as if each had run alone."""
    sets = [inst.working_set() for _ in lists]
    rows = len(lists) if reads is None else sum(map(len, reads))
    values: list[Any] = [await out for out in inst.submit(pipe, spec(lists, sets, lambda: tuple(map(argmax, range(rows))), reads=reads))]
    for ws, ids in zip(sets, lists, strict=True):
        assert await decode(inst, [7], 2, ws) == generate([*ids, 7], 2), "what the sets hold"
    return values


@pytest.mark.parametrize("lengths", [(14, 14), (70, 70), (32, 1), (1, 32, 33), (31, 33, 2), (16, 16, 16, 16), (5,) * 12])
@pytest.mark.parametrize("beside", [0, 3])
async def test_each_set_reads_its_own_last_token(lengths: Sequence[int], beside: int) -> None:
    lists = [[(11 * k + i) % VOCAB for i in range(n)] for k, n in enumerate(lengths)]
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("sets")
        others = [engine.open_instance(str(k)) for k in range(beside)]
        loops = [asyncio.ensure_future(decode(other, [k], 12)) for k, other in enumerate(others)]
        await asyncio.sleep(0)
        for _ in range(3):
            assert await read_all(inst, inst.pipeline(), lists, None) == [reference(ids) for ids in lists]
        assert await asyncio.gather(*loops) == [generate([k], 12) for k in range(beside)]
        for other in (inst, *others):
            other.close()


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lists=LISTS, data=st.data(), beside=st.integers(0, 2), most=st.sampled_from([STEP, 20]))
def test_read_outs_anywhere_in_the_tail(lists: list[list[int]], data: st.DataObject, beside: int, most: int) -> None:
    left = most
    reads: list[list[int]] = []
    for k, ids in enumerate(lists):  # from the earliest read-out to the end of each, all in one step
        tail = data.draw(st.integers(0 if k or len(lists) > 1 else 1, min(len(ids), left, 5)))
        left -= tail
        more = data.draw(st.lists(st.integers(len(ids) - tail, len(ids) - 1), max_size=2)) if tail else []
        reads.append([len(ids) - tail, *more] if tail else [])
    if not any(reads):
        reads[0] = [len(lists[0]) - 1]
    while sum(map(len, reads)) > limits().max_reads:
        max(reads, key=len).pop()

    async def run() -> None:
        async with running(FakeRunner(limits(max_tokens=most))) as engine:
            insts = [engine.open_instance(str(k)) for k in range(beside + 1)]
            loops = [asyncio.ensure_future(decode(inst, [k], 8)) for k, inst in enumerate(insts[1:])]
            await asyncio.sleep(0)
            got = await read_all(insts[0], insts[0].pipeline(), lists, reads)
            assert got == [reference(ids[: r + 1]) for ids, positions in zip(lists, reads, strict=True) for r in positions]
            assert await asyncio.gather(*loops) == [generate([k], 8) for k in range(beside)]
            for inst in insts:
                inst.close()

    asyncio.run(run())
