"""Decode and prefill of one sequence: the engine against a bare replay of the same plans in the same run.

Also the sum of the best standalone kernel times against the step, and on the cpu device the engine against the plain
matrix-product kernels (bench/kernels_cpu.py's yardstick).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from bench.replay import Replay, greedy, kernel_times, packed_step
from bench.report import Report, arguments
from pie_core.engine.forward import PassSpec
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from tests.support.engines import load_runner
from tests.support.paths import default_model

ROUNDS = 5
PROMPT = 8
PREFILL = 512


async def engine_decode(engine: Engine, ids: list[int], tokens: int) -> float:
    """Seconds for `tokens` greedy passes, one token each, through the engine's own API."""
    program = greedy(engine.runner)  # type: ignore[arg-type]
    inst = engine.open_instance("bench", reuse=False)
    ws, pipe = inst.working_set(), inst.pipeline()
    token = await inst.submit(pipe, PassSpec(tokens=ids, state=[ws], program=program))[0]
    start = time.perf_counter()
    for _ in range(tokens):
        token = await inst.submit(pipe, PassSpec(tokens=[int(token)], state=[ws], program=program))[0]  # type: ignore[arg-type]
    elapsed = time.perf_counter() - start
    inst.close()
    return elapsed


async def engine_prefill(engine: Engine, ids: list[int]) -> float:
    """Seconds to the first token of a prompt."""
    program = greedy(engine.runner)  # type: ignore[arg-type]
    inst = engine.open_instance("bench", reuse=False)
    start = time.perf_counter()
    await inst.submit(inst.pipeline(), PassSpec(tokens=ids, state=[inst.working_set()], program=program))[0]
    elapsed = time.perf_counter() - start
    inst.close()
    return elapsed


async def measure(runner: ModelRunner, report: Report, kind: str, tokens: int, prefill: int) -> None:
    """Alternate engine and replay, so that both see the same machine."""
    engine = Engine(runner)
    engine.start()
    replay = Replay(runner, greedy(runner))
    program = replay.program
    chunk = runner.limits.max_tokens
    prompt = [(17 * i) % runner.limits.vocab for i in range(prefill)]
    decode_steps = [packed_step(program, PROMPT + i, [100 + i], first_page=4) for i in range(tokens)]
    chunks = [packed_step(program if at + chunk >= prefill else None, at, prompt[at : at + chunk]) for at in range(0, prefill, chunk)]
    await engine_decode(engine, prompt[:PROMPT], 2)
    await engine_prefill(engine, prompt)
    pairs: dict[str, list[tuple[float, float]]] = {"decode": [], "prefill": []}
    for _ in range(ROUNDS):
        bare = await replay.steps(decode_steps, 1)
        pairs["decode"].append((await engine_decode(engine, prompt[:PROMPT], tokens), bare))
        bare = await replay.steps(chunks, chunk)
        pairs["prefill"].append((await engine_prefill(engine, prompt), bare))
    bound = 0.85 if kind == "cpu" else 0.9
    for name, count in (("decode", tokens), ("prefill", prefill)):
        report.add(f"{name} tok/s", count / min(e for e, _ in pairs[name]))
        report.add(f"{name} tok/s, bare replay", count / min(b for _, b in pairs[name]))
        report.target(f"{name}: engine / bare replay", statistics.median(b / e for e, b in pairs[name]), ">=", bound)
    step = min(b for _, b in pairs["decode"]) / tokens
    times = await kernel_times(runner, decode_steps[-1], 1)
    report.add("sum of best kernel times / decode step", sum(n * t for n, t in times.values()) / step)
    for name, (n, t) in times.items():
        report.add(f"  kernel {name} x{n}, ms a step", 1e3 * n * t)
    await engine.stop()


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    runner = await load_runner(args.device, args.model or default_model(), kv_pool_mb=128)
    report = Report("decode", f"{runner.device.info.name} ({args.device})")
    await measure(runner, report, args.device, args.tokens, PREFILL if args.device == "cpu" else PREFILL // 2)
    runner.close()
    if args.device == "cpu" and args.model is None:
        from bench.kernels_cpu import yardstick_tokens_per_second

        bare = yardstick_tokens_per_second()
        report.add("yardstick: matrix products only, tok/s", bare)
        report.target("decode / yardstick", report.figures["decode tok/s"] / bare, ">=", 0.75)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
