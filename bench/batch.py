"""Continuous batching: aggregate decode of 1 to 32 inferlets against the bare batched plans of that width, and the gaps between a
stream's tokens while prompts come in beside it (there on the engine's own API, so that nothing but the engine makes the gaps).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

from bench.replay import greedy
from bench.report import Report, arguments
from bench.tax import Host, with_host
from pie_core.codegen.layout import lane_layout
from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.runner import EpilogueGroup, StepBatch
from pie_core.engine.step_buffer import PackedStep, pack_step
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.program import Program
from pie_core.host.process import Process
from pie_server.sandbox import Sandbox
from tests.support.engines import load_runner
from tests.support.paths import default_model

WIDTHS = (1, 4, 8, 16, 32)
ROUNDS = 3
PROMPT = 8
STREAMS = 4
LONG = 300  # tokens of the prompts that come in beside the streams
PAGES = 8  # of a sequence in the yardstick
LOOP = """
from inferlet import receive, send
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    feed, ws, pipe = input["prompt"], WorkingSet(), Pipeline()
    for i in range(input["n"] + 1):
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        feed = [await out]
        if i == 0:
            send("ready")
            await receive()
    send("done")
    return {}
"""


def packed_batch(program: Program, width: int, pos: int) -> PackedStep:
    """One token at position `pos` of each of `width` sequences on pages of their own; greedy at each."""
    batch = StepBatch(n_seqs=width, results_words=2 * width)
    lanes = EpilogueGroup(program)
    for k in range(width):
        first = k * PAGES
        batch.rows.extend((100 + k, NONE, pos, first * PAGE_TOKENS + pos, len(batch.tables), 0, 0, 0))
        batch.tables.extend(range(first, first + PAGES))
        batch.reads.append(k)
        lanes.lanes.append(lane_layout(program).pack(k, 2 * k, (), (2 * k + 1,), ()))
    batch.epilogues.append(lanes)
    return pack_step(batch)


async def bare(runner: ModelRunner, program: Program, width: int, steps: list[PackedStep]) -> float:
    """Seconds to run the steps one after another on the plans alone, each awaited by its read-back."""
    device, model = runner.device, runner.model
    body, head, epilogue = model.body(width), model.head(width), runner.epilogue_plan(program)
    start = time.perf_counter()
    for p in steps:
        device.write(runner.tables.step, 0, p.data)
        body.run()
        head.run()
        epilogue.run(lane_offset=p.groups[0].lane_offset, lanes=width)
        await device.read(runner.results, 0, 8 * width)
    return time.perf_counter() - start


class Stream:
    """One greedy loop on an instance of its own."""

    def __init__(self, engine: Engine, program: Program, k: int) -> None:
        self.inst: Instance = engine.open_instance(f"stream {k}", reuse=False)
        self.ws: WorkingSet = self.inst.working_set()
        self.pipe: Pipeline = self.inst.pipeline()
        self.program = program
        self.feed = [(31 * k + i) % 1000 for i in range(PROMPT)]
        self.times: list[float] = []

    async def run(self, tokens: int) -> None:
        """Decode `tokens` more."""
        for _ in range(tokens):
            token = await self.inst.submit(self.pipe, PassSpec(self.feed, [self.ws], program=self.program))[0]
            self.feed = [int(token)]  # type: ignore[arg-type]
            self.times.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def together(host: Host, width: int, tokens: int) -> float:
    """Seconds in which each of `width` inferlets decodes `tokens` after its first, all beginning at once."""
    ready, go, ends = 0, asyncio.Event(), []
    begun = 0.0

    async def one(k: int) -> None:
        nonlocal ready, begun
        process = Process(host.engine, host.services, f"bench {k}")
        request = process.request(LOOP, {"prompt": [(31 * k + i) % 1000 for i in range(PROMPT)], "n": tokens})
        task = asyncio.ensure_future(process.run(host.sandbox.open(process.port), request))
        async for message in process.messages():
            if message == "done":
                ends.append(time.perf_counter())
                continue
            ready += 1
            if ready == width:
                begun = time.perf_counter()
                go.set()
            await go.wait()
            process.deliver(None)
        await task

    await asyncio.gather(*(one(k) for k in range(width)))
    return max(ends) - begun


async def mixed(engine: Engine, program: Program, prompts: int, length: int) -> tuple[list[float], list[float]]:
    """(gaps of the streams while prompts run one after another beside them, gaps of the same streams alone)."""
    streams = [Stream(engine, program, k) for k in range(STREAMS)]
    loops = [asyncio.ensure_future(stream.run(4096)) for stream in streams]
    await asyncio.sleep(1.0)
    gone = [len(stream.times) for stream in streams]
    alone = [gap for stream in streams for gap in stream.gaps()[4:]]
    vocab = engine.limits.vocab
    for k in range(prompts):
        inst = engine.open_instance("prompt", reuse=False)
        ids = [(17 * i + 1009 * k + 5) % vocab for i in range(length)]
        await inst.submit(inst.pipeline(), PassSpec(ids, [inst.working_set()], program=program))[0]
        inst.close()
    beside = [gap for stream, n in zip(streams, gone, strict=True) for gap in stream.gaps()[n:]]
    for stream, loop in zip(streams, loops, strict=True):
        stream.inst.close()
        await asyncio.wait([loop])
        loop.exception()
    return beside, alone


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(runner: ModelRunner, host: Host, report: Report, tokens: int, length: int) -> None:
    """Inferlets and bare plans in turn, width by width; then the mixed load."""
    engine = host.engine
    program = greedy(runner)
    widths = [w for w in WIDTHS if w <= min(runner.limits.max_reads, runner.limits.max_tokens)]
    for width in widths:
        steps = [packed_batch(program, width, PROMPT + 1 + i) for i in range(tokens)]
        await bare(runner, program, width, steps[:2])
        await together(host, width, 2)
        pairs = [(await together(host, width, tokens), await bare(runner, program, width, steps)) for _ in range(ROUNDS)]
        report.add(f"{width} inferlets, tok/s together", width * tokens / min(e for e, _ in pairs))
        report.add(f"{width} inferlets, yardstick: bare plans, tok/s", width * tokens / min(b for _, b in pairs))
        report.target(f"{width} inferlets: together / bare", statistics.median(b / e for e, b in pairs), ">=", 0.85)
    beside, alone = await mixed(engine, program, 2, length)
    report.add(f"{STREAMS} streams alone: median gap, ms", 1e3 * statistics.median(alone))
    report.add(f"beside prompts of {length}: median gap, ms", 1e3 * statistics.median(beside))
    report.add(f"beside prompts of {length}: p99 gap, ms", 1e3 * percentile(beside, 0.99))
    report.target("mixed load: p99 gap / median gap", percentile(beside, 0.99) / statistics.median(beside), "<=", 3)
    report.add("mixed load: median gap / alone", statistics.median(beside) / statistics.median(alone))


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    path = Path(args.model or default_model())
    sandbox = Sandbox()
    runner = await load_runner(args.device, path, kv_pool_mb=512)
    report = Report("batch", f"{runner.device.info.name} ({args.device})")
    host = await with_host(runner, path, sandbox)
    await measure(runner, host, report, min(args.tokens, 16), LONG if args.device == "cpu" else 64)
    await host.engine.stop()
    runner.close()
    sandbox.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
