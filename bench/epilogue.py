"""What a sampler costs: a token through each decoding algorithm against greedy argmax in the same loop, at batch 1, 8 and 32.

Also the first use of an epilogue that the process has not seen (text to result, beyond a pass with it afterwards; cold shader cache), the
same text again, and the time that a Python guest in WebAssembly takes to trace and encode an epilogue that it gave before.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import Report, arguments
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.eta import (
    Model,
    Tensor,
    dry,
    eta_cutoff,
    frequency_penalty,
    gather,
    gumbel_max,
    intrinsics,
    iota,
    masked,
    mirostat,
    presence_penalty,
    reduce_argmax,
    sample,
    select,
    tail_free,
    token_counts,
    top_a,
    trace_epilogue,
    typical,
    xtc,
)
from pie_core.eta import channel as channels
from pie_core.eta.dtypes import f32_bits
from pie_core.eta.program import Program
from pie_core.eta.tracing import Traced
from pie_server.sandbox import Sandbox
from tests.sdk.measure_guest import EPILOGUES, per_token
from tests.support.engines import load_runner
from tests.support.paths import default_model

PROMPT = [504, 5185, 282, 4649, 314]
HISTORY = 256  # tokens that the penalties and DRY look back on


@dataclass(eq=False)
class Cell:
    """A channel of a traced program, with the words of its first cell."""

    dtype: str
    shape: tuple[int, ...]
    seed: list[int]
    is_counter: bool = False
    capacity: int = 1


def _logits() -> Tensor:
    return intrinsics.output(0, "logits")


def _draws() -> Cell:
    return Cell("u32", (2,), [7, 0], is_counter=True)


def _sampler(**filters: Any) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        rng = _draws()
        return lambda: sample(_logits(), channels.take(rng), 0.8, **filters)

    return make


def _penalties() -> Callable[[], Tensor]:
    rng, history = _draws(), Cell("i32", (HISTORY,), [0xFFFFFFFF] * HISTORY)

    def epilogue() -> Tensor:
        seen, place = channels.take(history), iota(HISTORY)
        counts = token_counts(seen, _logits().shape[0])
        x = presence_penalty(frequency_penalty(_logits(), counts, 0.4), counts, 0.6)
        token = sample(x, channels.take(rng), 0.8)
        channels.put(history, select(place == HISTORY - 1, token, gather(seen, place + 1)))
        return token

    return epilogue


def _filtered(mask: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        rng = _draws()

        def epilogue() -> Tensor:
            x = _logits() / 0.8
            return gumbel_max(masked(x, mask(x)), channels.take(rng))

        return epilogue

    return make


def _xtc() -> Callable[[], Tensor]:
    coin = _draws()
    return _filtered(lambda x: xtc(x, 0.1, 0.5, channels.take(coin)))()


def _dry() -> Callable[[], Tensor]:
    rng, history = _draws(), Cell("i32", (HISTORY,), [k % 40 for k in range(HISTORY)])

    def epilogue() -> Tensor:
        seen, place = channels.take(history), iota(HISTORY)
        token = gumbel_max(dry(_logits(), seen) / 0.8, channels.take(rng))
        channels.put(history, select(place == HISTORY - 1, token, gather(seen, place + 1)))
        return token

    return epilogue


def _mirostat() -> Callable[[], Tensor]:
    rng, mu = _draws(), Cell("f32", (), [f32_bits(6.0)])

    def epilogue() -> Tensor:
        token, then = mirostat(_logits(), channels.take(mu), channels.take(rng), 3.0)
        channels.put(mu, then)
        return token

    return epilogue


METHODS: dict[str, tuple[Callable[[], Callable[[], Tensor]], float]] = {  # how to make it, and the bound at batch 1
    "temperature + Gumbel": (_sampler(), 1.05),
    "top-k 40": (_sampler(top_k=40), 1.15),
    "top-p 0.9": (_sampler(top_p=0.9), 1.15),
    "min-p 0.1": (_sampler(min_p=0.1), 1.25),
    "penalties, history of 256": (_penalties, 1.25),
    "typical 0.9": (_filtered(lambda x: typical(x, 0.9)), 1.25),
    "mirostat v2": (_mirostat, 1.25),
    # bounded by what others publish of them
    "top-a 0.2": (_filtered(lambda x: top_a(x, 0.2)), 1.15),
    "eta 3e-4": (_filtered(lambda x: eta_cutoff(x, 3e-4)), 1.31),
    "XTC 0.1, 0.5": (_xtc, 1.36),
    "tail-free 0.95": (_filtered(lambda x: tail_free(x, 0.95)), 1.49),
    "DRY, history of 256": (_dry, 2.15),
}


class Lane:
    """One sequence that can take a token by any of the traced programs."""

    def __init__(self, inst: Instance) -> None:
        self.inst, self.ws, self.pipe = inst, inst.working_set(), inst.pipeline()
        self.feed = list(PROMPT)
        self._cells: dict[tuple[Any, ...], list[Any]] = {}

    async def step(self, traced: Traced, n: int = 1) -> None:
        """Take `n` tokens."""
        cells = self._cells.get(traced.channels)
        if cells is None:
            cells = self._cells[traced.channels] = [self.inst.channel(c.dtype, c.shape, seed=c.seed) for c in traced.channels]
        for _ in range(n):
            spec = PassSpec(tokens=self.feed, state=[self.ws], program=traced.program, params=traced.params, channels=cells)
            self.feed = [int(await self.inst.submit(self.pipe, spec)[0])]  # type: ignore[arg-type]


async def chunk(lanes: list[Lane], traced: Traced, steps: int) -> float:
    """Seconds of one of `steps` steps of all lanes, after one that is not counted: the engine may have guessed another program."""
    await asyncio.gather(*(lane.step(traced) for lane in lanes))
    start = time.perf_counter()
    await asyncio.gather(*(lane.step(traced, steps) for lane in lanes))
    return (time.perf_counter() - start) / steps


async def compare(engine: Engine, traced: dict[str, Traced], batch: int, steps: int) -> tuple[dict[str, float], float]:
    """({method: seconds of a step / those of greedy steps just before and after}, best seconds of a greedy step): one round, in which
    all methods take turns on the same sequences."""
    inst = engine.open_instance("bench")
    lanes = [Lane(inst) for _ in range(batch)]
    greedy = [await chunk(lanes, traced["greedy"], steps)]
    spent: dict[str, float] = {}
    for name in METHODS:
        spent[name] = await chunk(lanes, traced[name], steps)
        greedy.append(await chunk(lanes, traced["greedy"], steps))
    inst.close()
    return {name: 2 * spent[name] / (greedy[i] + greedy[i + 1]) for i, name in enumerate(METHODS)}, min(greedy)


def variant(make: Callable[[], Callable[[], Tensor]], extra: int) -> Callable[[], Tensor]:
    """The same sampler as another program, which no cache knows."""
    epilogue = make()

    def varied() -> Tensor:
        token = epilogue()
        for _ in range(extra):
            token = token + 0
        return token

    return varied


class Spent(NamedTuple):
    """Seconds on the clock, and of all threads of this process: the honest figure on a machine with other work."""

    wall: float
    cpu: float


async def first_use(engine: Engine, greedy: Traced, others: list[Traced], pairs: int) -> tuple[Spent, Spent]:
    """(from the text of an epilogue to its first result, the same again), both beyond a pass whose program is at hand: of first uses the
    best of several programs, of the others the median of `pairs` passes, each beyond the one after it."""
    inst = engine.open_instance("bench")
    lane = Lane(inst)
    await lane.step(greedy, 2)

    async def timed(t: Traced, *, from_text: bool) -> Spent:
        text, start, cpu = t.program.text, time.perf_counter(), time.process_time()
        await lane.step(t._replace(program=Program.parse(text)) if from_text else t)
        return Spent(time.perf_counter() - start, time.process_time() - cpu)

    cold = [await timed(t, from_text=True) for t in others]
    await lane.step(others[0])
    found = [(await timed(others[0], from_text=True), await timed(others[0], from_text=False)) for _ in range(pairs)]
    inst.close()
    bare = [b for _, b in found]
    first = Spent(*(max(0.0, min(c) - min(b)) for c, b in zip(zip(*cold, strict=True), zip(*bare, strict=True), strict=True)))
    return first, Spent(*(statistics.median(a[i] - b[i] for a, b in found) for i in range(2)))


async def first_uses(engine: Engine, model: Model, report: Report, *, webgpu: bool) -> None:
    """First use and use before of each method."""
    greedy = trace_epilogue(lambda: reduce_argmax(_logits()), model)
    for name, (make, _) in METHODS.items():
        fresh = [trace_epilogue(variant(make, extra), model) for extra in range(1, 4 if webgpu else 7)]
        cold, again = await first_use(engine, greedy, fresh, 40 if webgpu else 30)
        report.target(f"first use: {name}, ms", 1e3 * cold.wall, "<=", 300 if webgpu else 30)
        report.add(f"first use: {name}, CPU ms", 1e3 * cold.cpu)
        report.add(f"used before: {name}, ms", 1e3 * again.wall)
        report.target(f"used before: {name}, CPU ms", 1e3 * again.cpu, "<=", 2)  # parse, hash, look-up: nothing that waits


async def loops(engine: Engine, traced: dict[str, Traced], report: Report, *, few: bool) -> None:
    """The cost of each method a token, at each batch: the median over rounds."""
    plan = ((1, 9, 5), (8, 3, 2), (32, 3, 1)) if few else ((1, 25, 5), (8, 5, 5), (32, 3, 4))  # batch, rounds, steps of a chunk
    for batch, rounds, steps in plan:
        found = [await compare(engine, traced, batch, steps) for _ in range(rounds)]
        for name, (_, bound) in METHODS.items():
            ratio = statistics.median(ratios[name] for ratios, _ in found)
            label = f"batch {batch}: {name} / greedy"
            report.target(label, ratio, "<=", bound) if batch == 1 else report.add(label, ratio)
        report.add(f"batch {batch}: a greedy step, ms", 1e3 * min(best for _, best in found))


async def guest(report: Report) -> None:
    """Trace and encode in the sandbox."""
    sandbox = Sandbox(spares=1)
    sandbox.warm()
    for name, epilogue in EPILOGUES.items():
        label, spent = f"guest: {name}, us", (await per_token(sandbox, epilogue))["trace_us"]
        report.add(label, spent) if "each time" in name else report.target(label, spent, "<=", 150)
    sandbox.close()


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    webgpu = args.device == "webgpu"
    with tempfile.TemporaryDirectory() as shaders:
        os.environ["MESA_SHADER_CACHE_DIR"] = str(Path(shaders))  # a cold one
        runner = await load_runner(args.device, args.model or default_model(), kv_pool_mb=256)
        engine = Engine(runner)
        engine.start()
        report = Report("epilogue", f"{runner.device.info.name} ({args.device})")
        model = Model(runner.limits.vocab, runner.limits.hidden)
        traced = {"greedy": trace_epilogue(lambda: reduce_argmax(_logits()), model)}
        traced |= {name: trace_epilogue(make(), model) for name, (make, _) in METHODS.items()}
        await first_uses(engine, model, report, webgpu=webgpu)
        await loops(engine, traced, report, few=webgpu)
        await engine.stop()
        runner.close()
    await guest(report)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
