"""What programmability costs: the greedy loop as a WebAssembly inferlet against the same loop called directly on the engine,
the host's time a step with a one-layer model against an empty replay, and the start of a Python inferlet.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from bench.replay import greedy
from bench.report import Report, arguments
from pie_core.device.protocol import Device, Launch
from pie_core.device.templates import template
from pie_core.engine.forward import PassSpec
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.host.process import Process
from pie_core.host.services import ModelFacts, Services
from pie_core.weights import open_gguf
from pie_server.loading import load_text
from pie_server.sandbox import Sandbox
from tests.support.engines import load_runner
from tests.support.paths import default_model
from tests.support.tiny_gguf import write_tiny_gguf

ROUNDS = 14
DISPATCHES = 300
Turns = AsyncGenerator[Any, int]
TURN = 12  # tokens that one loop decodes before the other has its turn
START = 4  # of them, not counted: a loop that was idle runs as one that never stops once the engine expects its passes again
LOOP = """
from inferlet import model, receive, send
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    from time import monotonic
    tokens = input["tokens"]
    ws = WorkingSet()
    pipe = Pipeline()
    done = 0
    while n := await receive():
        times = []
        for _ in range(n):
            fwd = ForwardPass()
            fwd.embed(tokens[done:])
            fwd.state([ws], StateGeometry.folding())
            out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
            pipe.submit(fwd)
            done = len(tokens)
            tokens.append(await out)
            times.append(monotonic())
        send(times)
    pipe.close()
    return tokens
"""


class Host:
    """An engine with a sandbox, as `pie serve` has them."""

    def __init__(self, engine: Engine, sandbox: Sandbox, services: Services) -> None:
        self.engine, self.sandbox, self.services = engine, sandbox, services

    async def inferlet(self, source: str, data: dict[str, Any]) -> Any:
        """Run an inferlet to its result."""
        process = Process(self.engine, self.services, "bench")
        return await process.run(self.sandbox.open(process.port), process.request(source, data))

    async def looped(self, ids: list[int]) -> Turns:
        """The greedy loop through WebAssembly: sent a number of tokens, it gives the seconds at which it had each; sent 0, all ids."""
        process = Process(self.engine, self.services, "bench")
        task = asyncio.create_task(process.run(self.sandbox.open(process.port), process.request(LOOP, {"tokens": list(ids)})))
        sent = process.messages()
        n = yield []
        while n:
            process.deliver(n)
            n = yield await anext(sent)
        process.deliver(0)
        yield await task

    async def direct(self, ids: list[int]) -> Turns:
        """The same loop on the engine's own API, driven the same way."""
        program = greedy(self.engine.runner)  # type: ignore[arg-type]
        inst = self.engine.open_instance("bench")
        ws, pipe = inst.working_set(), inst.pipeline()
        tokens, done = list(ids), 0
        n = yield []
        while n:
            times = []
            for _ in range(n):
                out = inst.submit(pipe, PassSpec(tokens=tokens[done:], state=[ws], program=program))[0]
                done = len(tokens)
                tokens.append(int(await out))  # type: ignore[arg-type]
                times.append(time.monotonic())
            n = yield times
        inst.close()
        yield tokens


def services_of(path: Path, engine: Engine) -> Services:
    """Tokenizer and chat template of a checkpoint."""
    checkpoint = open_gguf(path)
    text = load_text(checkpoint)
    limits = engine.limits
    facts = ModelFacts("bench", limits.vocab, limits.hidden, limits.context, tuple(text.spec["eos"]))
    return Services(facts, text.tokenizer, text.chat)


async def token_tax(host: Host, report: Report, label: str, n: int, bound: float | None) -> None:
    """Run the two loops in turns of a few tokens and compare what a token takes in neighbouring turns.

    A software rasteriser on a shared machine works at half speed for stretches of some ten tokens, so that whole loops beside each other
    differ by 10 % and more when nothing else differs; short turns mostly share a stretch. The figure is the median of the ratios of
    neighbours, given with its standard error.
    """
    ids = [504 % host.engine.limits.vocab, 275, 282, 164, 214]
    through: list[float] = []
    straight: list[float] = []
    for turn in range(ROUNDS):
        loops = [(host.looped(ids), through), (host.direct(ids), straight)][:: 1 if turn % 2 == 0 else -1]
        for loop, _ in loops:
            await anext(loop)
            await loop.asend(2)  # the prompt, and where it is the first round, whatever is made once
        for _ in range(n // TURN):
            for loop, found in loops:
                times = await loop.asend(TURN)
                found.append((times[-1] - times[START - 1]) / (TURN - START))
        texts = [await loop.asend(0) for loop, _ in loops]
        assert texts[0] == texts[1], "the two loops must decode the same tokens"
    ratios = sorted(a / b for a, b in zip(through, straight, strict=True))
    low, ratio, high = statistics.quantiles(ratios, n=4)
    report.add(f"{label}: ms a token through WebAssembly", 1e3 * statistics.median(through))
    report.add(f"{label}: ms a token, direct", 1e3 * statistics.median(straight))
    report.add(f"{label}: standard error of the ratio", 0.93 * (high - low) / len(ratios) ** 0.5)
    if bound is None:
        report.add(f"{label}: WebAssembly / direct", ratio)
    else:
        report.target(f"{label}: WebAssembly / direct", ratio, "<=", bound)


async def empty_replay(device: Device) -> float:
    """Best seconds of a plan of 300 dispatches that find no rows to work on, plus a read-back of 4 bytes."""
    kernel = device.compile(template("rms_norm", width=32, eps=1e-5, rows="tokens", bucket=1))
    buffers = {name: device.create_buffer(4096, name) for name in ("step", "x", "weight", "out")}  # a zeroed step has no tokens
    plan = device.compile_plan([Launch(kernel, buffers)] * DISPATCHES)
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        plan.run()
        await device.read(buffers["out"], 0, 4)
        best = min(best, time.perf_counter() - start)
    return best


async def start_times(host: Host, report: Report) -> None:
    """A request that returns at once: instantiate, run the source, give the result."""
    source = "async def main(input):\n    return {}\n"
    await host.inferlet(source, {})
    times = []
    for _ in range(40):
        await asyncio.sleep(0.02)  # requests do not arrive back to back; spares refill meanwhile
        start = time.perf_counter()
        await host.inferlet(source, {})
        times.append(time.perf_counter() - start)
    report.target("start of a warm Python inferlet, whole request, median ms", 1e3 * statistics.median(times), "<=", 3.0)
    report.add("start of a warm Python inferlet, whole request, p95 ms", 1e3 * sorted(times)[int(0.95 * len(times))])


async def with_host(runner: ModelRunner, path: Path, sandbox: Sandbox) -> Host:
    """A started engine over `runner` with a warm sandbox."""
    engine = Engine(runner)
    engine.start()
    sandbox.warm()
    return Host(engine, sandbox, services_of(path, engine))


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__, tokens=96)
    path = Path(args.model or default_model())
    sandbox = Sandbox()
    runner = await load_runner(args.device, path, kv_pool_mb=64)
    report = Report("tax", f"{runner.device.info.name} ({args.device})")
    host = await with_host(runner, path, sandbox)
    await token_tax(host, report, "SmolLM2", args.tokens, 1.03)
    await start_times(host, report)
    await host.engine.stop()
    runner.close()
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_gguf(Path(folder) / "tiny.gguf", layers=1)
        runner = await load_runner(args.device, tiny, kv_pool_mb=4)
        host = await with_host(runner, tiny, sandbox)
        await token_tax(host, report, "one layer", 200, None)
        empty = await empty_replay(runner.device)
        report.add(f"{DISPATCHES} empty dispatches + 4-byte read-back, ms", 1e3 * empty)
        step = report.figures["one layer: ms a token, direct"] / 1e3
        ratio = step / empty
        if args.device == "webgpu":
            report.target("one layer: host time a step / empty replay", ratio, "<=", 2.0)
        else:
            report.add("one layer: host time a step / empty replay", ratio)
        await host.engine.stop()
        runner.close()
    sandbox.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
