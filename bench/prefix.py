"""Prefix reuse: time to the first token of a repeated 1,000-token prompt against the same prompt cold, in the same run.

Also a longer prompt with the same beginning, two identical prompts at once, and what a look-up costs where nothing is shared.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from bench.replay import greedy
from bench.report import Report, arguments
from pie_core.engine.forward import PassSpec
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from tests.support.engines import load_runner
from tests.support.paths import default_model

ROUNDS = 2
PROMPT = 1000


async def first_token(engine: Engine, ids: list[int], *, reuse: bool = True) -> float:
    """Seconds to the first token of a prompt."""
    program = greedy(engine.runner)  # type: ignore[arg-type]
    inst = engine.open_instance("bench", reuse=reuse)
    start = time.perf_counter()
    await inst.submit(inst.pipeline(), PassSpec(tokens=ids, state=[inst.working_set()], program=program))[0]
    elapsed = time.perf_counter() - start
    inst.close()
    return elapsed


async def measure(runner: ModelRunner, report: Report, length: int) -> None:
    """Cold and warm in turn; a new prompt each round."""
    engine = Engine(runner)
    engine.start()
    vocab = runner.limits.vocab

    def prompts(k: int) -> list[int]:
        return [(17 * i + 1009 * k + 5) % vocab for i in range(length)]

    await first_token(engine, prompts(99)[:64])
    ratios, longer, twice = [], [], []
    cold = warm = float("inf")
    for k in range(ROUNDS):
        first = await first_token(engine, prompts(k))
        again = [await first_token(engine, prompts(k)) for _ in range(3)]
        cold, warm = min(cold, first), min(warm, *again)
        ratios.append(statistics.median(again) / first)
        longer.append(await first_token(engine, [*prompts(k), *range(20)]) / first)
        start = time.perf_counter()
        await asyncio.gather(*(first_token(engine, prompts(100 + k)) for _ in range(2)))
        twice.append((time.perf_counter() - start) / first)
    report.add(f"yardstick: first token of {length} tokens, cold, s", cold)
    report.add("the same again, s", warm)
    report.target("again / cold", statistics.median(ratios), "<=", 0.1)
    report.add("with 20 more tokens behind / cold", statistics.median(longer))
    report.target("two identical ones at once / one cold", statistics.median(twice), "<=", 1.2)
    inst = engine.open_instance("names")
    ws = inst.working_set()
    start = time.perf_counter()
    ws.names(length // 16, prompts(7))
    report.add("names of its pages, us", 1e6 * (time.perf_counter() - start))
    inst.close()
    await engine.stop()


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    runner = await load_runner(args.device, args.model or default_model(), kv_pool_mb=512)
    report = Report("prefix", f"{runner.device.info.name} ({args.device})")
    await measure(runner, report, PROMPT if args.device == "cpu" else PROMPT // 4)
    runner.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
