"""Loops that feed themselves on the device, on a one-layer model: host waits, read-backs, maps and bytes a token, counted; tokens a second
against the same loop fed by the host; what a stop channel costs, and what a step costs that a stop has cancelled.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.replay import greedy
from bench.report import Report, arguments
from pie_core import eta
from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.channel import Channel
from pie_core.engine.forward import PassSpec
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import Gate, StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.channel import put
from tests.support.engines import load_runner
from tests.support.tiny_gguf import write_tiny_gguf

ROUNDS = 9
AHEAD = 16  # passes
LAYERS = 24  # of the model whose cancelled steps are timed
SHAPE = {"width": 256, "heads": 8, "kv_heads": 4, "ff": 1024, "vocab": 4096}


async def device_fed(engine: Engine, first: int, n: int, *, stops: bool = False, ahead: int = AHEAD) -> tuple[float, list[Any]]:
    """Seconds for `n` passes that feed each other, and their tokens. `ahead`: how many are submitted before the first is awaited, and
    outstanding from then on; `stops`: each could end the loop."""
    limits = engine.limits
    inst = engine.open_instance("bench")
    ws, pipe, feed = inst.working_set(), inst.pipeline(), inst.channel("i32", seed=[first])
    stop: Channel | None = inst.channel("bool") if stops else None
    if stop is not None:
        pipe.stop_when(stop)

    def fn() -> Any:
        token = reduce_argmax(intrinsics.output(0, "logits"))
        put(feed, token)
        if stop is not None:
            put(stop, eta.eq(token, -1))
        return token

    t = trace_epilogue(fn, Model(limits.vocab, limits.hidden))
    spec = PassSpec(feed, [ws], program=t.program, params=t.params, channels=t.channels)
    start = time.perf_counter()
    futures: deque[asyncio.Future[Any]] = deque()
    tokens: list[Any] = []
    for _ in range(n):
        if len(futures) == ahead:
            tokens.append(await futures.popleft())
        futures.append(inst.submit(pipe, spec)[0])
    tokens += [await f for f in futures]
    spent = time.perf_counter() - start
    inst.close()
    return spent, tokens


async def host_fed(engine: Engine, first: int, n: int) -> tuple[float, list[Any]]:
    """The same tokens, each of which the host awaits and gives back."""
    program = greedy(engine.runner)  # type: ignore[arg-type]
    inst = engine.open_instance("bench")
    ws, pipe = inst.working_set(), inst.pipeline()
    tokens: list[Any] = [first]
    start = time.perf_counter()
    for _ in range(n):
        tokens.append(await inst.submit(pipe, PassSpec(tokens[-1:], [ws], program=program))[0])
    spent = time.perf_counter() - start
    inst.close()
    return spent, tokens[1:]


class Counted:
    """Counts the reads of a device; on webgpu each is one map."""

    def __init__(self, runner: ModelRunner) -> None:
        self.reads, self._read = 0, runner.device.read
        runner.device.read = self.read  # type: ignore[method-assign]

    def read(self, *args: Any) -> Any:
        """The read, counted."""
        self.reads += 1
        return self._read(*args)


async def loops(runner: ModelRunner, report: Report, n: int) -> None:
    """Alternate the loops on one engine; report counts of one run and ratios of medians."""
    engine, plain = Engine(runner), Engine(runner, predict=False)
    engine.start()
    plain.start()
    first = 5
    want = (await host_fed(engine, first, n))[1]
    await device_fed(engine, first, n)
    await device_fed(engine, first, n, stops=True)
    counted = Counted(runner)
    before, reads = engine.status(), counted.reads
    tokens = (await device_fed(engine, first, n, stops=True))[1]
    after = engine.status()
    assert tokens == want, "the loops must give the same tokens"
    report.target("host waits a token", (after["host_waits"] - before["host_waits"]) / n, "<=", 0)
    report.add("read-backs a token", (after["read_backs"] - before["read_backs"]) / n)
    report.add("maps (reads of the device) a token", (counted.reads - reads) / n)
    report.target("bytes read back a token", (after["read_back_bytes"] - before["read_back_bytes"]) / n, "<=", 16)
    kinds = ("device-fed", "all submitted at once", "with a stop channel", "host-fed", "host-fed, nothing predicted")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        times["device-fed"].append((await device_fed(engine, first, n))[0])
        times["all submitted at once"].append((await device_fed(engine, first, n, ahead=n))[0])
        times["with a stop channel"].append((await device_fed(engine, first, n, stops=True))[0])
        times["host-fed"].append((await host_fed(engine, first, n))[0])
        times["host-fed, nothing predicted"].append((await host_fed(plain, first, n))[0])
    for name, spent in times.items():
        report.add(f"{name}, tok/s", n / statistics.median(spent))

    def ratio(a: str, b: str) -> float:
        return statistics.median(y / x for x, y in zip(times[a], times[b], strict=True))

    report.target("device-fed / host-fed", ratio("device-fed", "host-fed"), ">=", 1)
    report.add("all submitted at once / host-fed", ratio("all submitted at once", "host-fed"))
    report.add("device-fed / host-fed, nothing predicted", ratio("device-fed", "host-fed, nothing predicted"))
    report.add("with a stop channel / without", ratio("with a stop channel", "device-fed"))
    await engine.stop()
    await plain.stop()


def one_token(runner: ModelRunner, at: int, gate: int | None) -> StepBatch:
    """A step of one token at position `at`; `gate`: the arena word of its gate."""
    batch = StepBatch(tables=list(range(at // PAGE_TOKENS + 1)), n_seqs=1, reads=[0], results_words=1)
    batch.rows.extend((7, NONE, at, at, 0, 0, 0, 0))
    if gate is not None:
        batch.gates.append(Gate(gate, NONE, range(1), range(0), None))
    return batch


async def cancelled(runner: ModelRunner, report: Report, n: int) -> None:
    """Steps of one token without a gate, behind an open one and behind one that is shut, run by run."""
    device, model = runner.device, runner.model
    runner.write_arena(0, bytes(4))
    runner.write_arena(1, (1).to_bytes(4, "little"))
    kinds: dict[str, int | None] = {"no gate": None, "gate open": 0, "gate shut": 1}
    packed = {name: [pack_step(one_token(runner, at, gate)) for at in range(n)] for name, gate in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    body, head, gates = model.body(1), model.head(1), runner._gates

    async def run(name: str, steps: Sequence[Any]) -> float:
        gated = kinds[name] is not None
        start = time.perf_counter()
        for step in steps:
            device.write(runner.tables.step, 0, step.data)
            if gated:
                gates.run()
            body.run(gated=gated)
            head.run(gated=gated)
        await device.read(runner.results, 0, 4)
        return time.perf_counter() - start

    for _ in range(ROUNDS):
        for name, steps in packed.items():
            times[name].append(await run(name, steps))
    for name, spent in times.items():
        report.add(f"{LAYERS} layers, {name}, ms a step", 1e3 * min(spent[1:]) / n)
    report.add("gate open / no gate", statistics.median(a / b for a, b in zip(times["gate open"][1:], times["no gate"][1:], strict=True)))
    report.target(
        "gate shut / no gate",
        statistics.median(a / b for a, b in zip(times["gate shut"][1:], times["no gate"][1:], strict=True)),
        "<=",
        0.5,
    )


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    n = args.tokens if args.tokens != arguments(__doc__, []).tokens else 200 if args.device == "cpu" else 60
    with tempfile.TemporaryDirectory() as folder:
        runner = await load_runner(args.device, write_tiny_gguf(Path(folder) / "one.gguf", layers=1), kv_pool_mb=4)
        report = Report("runahead", f"{runner.device.info.name} ({args.device})")
        n = min(n, runner.limits.context - 1)
        await loops(runner, report, n)
        runner.close()
        runner = await load_runner(args.device, write_tiny_gguf(Path(folder) / "deep.gguf", layers=LAYERS, **SHAPE), kv_pool_mb=32)
        await cancelled(runner, report, 16)
        runner.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
