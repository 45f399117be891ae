"""Greedy loops over the engine: what one loop alone gives, many together must give too."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.fake_runner import FakeRunner, generate, limits
from tests.engine.support import decode, running


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
async def test_one_loop(n: int) -> None:
    async with running(FakeRunner()) as engine:
        inst = engine.open_instance("one")
        assert await decode(inst, list(range(n)), 20) == generate(list(range(n)), 20)
        inst.close()


async def test_pitfall_11_copies_agree_and_mixed_lengths_equal_solo_runs() -> None:
    prompts = [[7] * n for n in (1, 15, 16, 17, 31, 33)] + [[7] * 17, [7] * 17]
    for order in (prompts, prompts[::-1]):
        async with running(FakeRunner()) as engine:
            insts = [engine.open_instance(str(k)) for k in range(len(order))]
            got = await asyncio.gather(*(decode(i, p, 12) for i, p in zip(insts, order, strict=True)))
            assert got == [generate(p, 12) for p in order]
            for inst in insts:
                inst.close()


async def test_a_long_prompt_runs_in_chunks_and_its_epilogue_with_the_last() -> None:
    runner = FakeRunner(limits(max_tokens=8))
    async with running(runner) as engine:
        inst = engine.open_instance("long")
        assert await decode(inst, list(range(50)), 2) == generate(list(range(50)), 2)
        assert [b.n_tokens for b in runner.batches] == [8, 8, 8, 8, 8, 8, 2, 1]
        assert [len(b.reads) for b in runner.batches] == [0, 0, 0, 0, 0, 0, 1, 1]
        inst.close()
