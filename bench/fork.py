"""Forks: ten branches of one long prompt against ten requests that share nothing, and what a fork itself costs.

From one run with P, the prefill of the prompt, and D, ten-wide decode of the branches, measured alone: sharing should save all but
one of ten prefills, (10 P + D) / (P + D).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

from bench.replay import greedy
from bench.report import Report, arguments
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.program import Program
from tests.support.engines import load_runner
from tests.support.paths import default_model

BRANCHES = 10
FORKS = 200


async def prefill(inst: Instance, prompt: Sequence[int]) -> WorkingSet:
    """The prompt without its last token, which every branch feeds itself."""
    ws = inst.working_set()
    await inst.submit(inst.pipeline(), PassSpec(prompt[:-1], [ws], reuse=False))[0]
    return ws


async def branch(inst: Instance, ws: WorkingSet, first: int, program: Program, tokens: int) -> None:
    """A greedy loop; `first` makes the branches different."""
    pipe, feed = inst.pipeline(), [first]
    for _ in range(tokens):
        feed = [int(await inst.submit(pipe, PassSpec(feed, [ws], program=program, reuse=False))[0])]  # type: ignore[arg-type]
    inst.close_pipeline(pipe)


async def branches(inst: Instance, sets: Sequence[WorkingSet], program: Program, tokens: int) -> None:
    """All branches at the same time."""
    await asyncio.gather(*(branch(inst, ws, 100 + k, program, tokens) for k, ws in enumerate(sets)))


async def shared(engine: Engine, prompt: Sequence[int], program: Program, tokens: int) -> tuple[float, float, float]:
    """Seconds of (prefill, decode of the forks, all)."""
    inst = engine.open_instance("shared")
    start = time.perf_counter()
    ws = await prefill(inst, prompt)
    forked = time.perf_counter()
    await branches(inst, [inst.fork(ws) for _ in range(BRANCHES)], program, tokens)
    end = time.perf_counter()
    inst.close()
    return forked - start, end - forked, end - start


async def unshared(engine: Engine, prompt: Sequence[int], program: Program, tokens: int) -> float:
    """Seconds of ten requests, each with a prompt of its own to compute."""

    async def request(k: int) -> None:
        inst = engine.open_instance(str(k), str(k), reuse=False)
        await branch(inst, await prefill(inst, prompt), 100 + k, program, tokens)
        inst.close()

    start = time.perf_counter()
    await asyncio.gather(*(request(k) for k in range(BRANCHES)))
    return time.perf_counter() - start


async def fork_cost(engine: Engine, prompt: Sequence[int]) -> float:
    """Median seconds of one fork, ordered behind a pipeline with nothing outstanding."""
    inst = engine.open_instance("fork")
    ws, pipe = await prefill(inst, prompt), inst.pipeline()
    spent = []
    for _ in range(FORKS):
        start = time.perf_counter()
        child = inst.fork(ws, pipe)
        spent.append(time.perf_counter() - start)
        inst.drop(child)
    inst.close()
    return statistics.median(spent)


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    runner = await load_runner(args.device, args.model or default_model(), kv_pool_mb=768)
    report = Report("fork", f"{runner.device.info.name} ({args.device})")
    engine, program, vocab = Engine(runner), greedy(runner), runner.limits.vocab
    length, tokens = (1000, 32) if args.device == "cpu" else (200, 8)
    engine.start()
    prompt = [(17 * i) % vocab for i in range(length)]
    await shared(engine, prompt[:40], program, 4)  # kernels are compiled, caches are warm
    before, p, d = [], 0.0, 0.0
    for _ in range(2):
        p, d, both = await shared(engine, prompt, program, tokens)
        before.append((both, p, d))
    alone = await unshared(engine, prompt, program, tokens)
    both, p, d = min(before)
    report.add(f"P, prefill of {length} tokens, s", p)
    report.add(f"D, {BRANCHES} x {tokens} tokens, s", d)
    report.add("shared, s", both)
    report.add("unshared, s", alone)
    yardstick = (BRANCHES * p + d) / (p + d)
    report.add("yardstick: (10 P + D) / (P + D)", yardstick)
    report.target("speed-up / yardstick", alone / both / yardstick, ">=", 0.9)
    report.target("a fork, us", 1e6 * await fork_cost(engine, prompt), "<=", 50)
    await engine.stop()
    runner.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
