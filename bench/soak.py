"""Soak: 5,000 mixed requests on a tiny generated model with cancels, forks, drafts, self-feeding loops, faults of the device and of
passes, and a pool that is too small for them. At the end every page is back, and memory has not grown since the warm-up.

Requests that no fault touched are checked: the tokens of the same prompt must be the same as alone.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.report import Report, arguments
from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import EngineError, InstanceClosed, PassFailed
from pie_core.engine.forward import BUFFERED, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import StepBatch, StepHandle
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta import channel as ch
from pie_core.eta.program import Program
from pie_server import memory
from tests.support.engines import load_runner
from tests.support.tiny_gguf import write_tiny_gguf

REQUESTS = 5000
WARM_UP = 1000
AT_ONCE = 24
CONTEXT = 256
PAGES = 40  # for AT_ONCE requests of up to 9 and more each
FAULT_EVERY = 400  # steps
PROMPTS = 12
SEED = 7


class Faulty:
    """A runner whose device refuses a step now and then."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.limits, self.prepare = replace(runner.limits, pages=PAGES), runner.prepare
        self.write_arena, self.copy_page = runner.write_arena, runner.copy_page
        self.steps = 0
        self.faults = 0
        self.armed = False

    def submit(self, batch: StepBatch) -> StepHandle:
        """Enqueue, or refuse."""
        self.steps += 1
        if self.armed and self.steps % FAULT_EVERY == 0:
            self.faults += 1
            raise DeviceError("injected by the bench")
        return self._runner.submit(batch)


class Load:
    """Random requests against one engine, and what came of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = random.Random(SEED)
        self.ends: Counter[str] = Counter()
        self.wrong = 0
        vocab = engine.limits.vocab
        model = Model(vocab, engine.limits.hidden)
        self.greedy = trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), model).program
        self.prompts = [[(k * p + 7 * p + k) % vocab for p in range(20 + 9 * k)] for k in range(PROMPTS)]
        self.known: dict[tuple[int, int], list[int]] = {}
        self.kinds: list[Callable[[Instance, int], Awaitable[None]]] = [
            self.chat,
            self.branches,
            self.drafts,
            self.self_feeding,
            self.fault,
        ]

    async def decode(self, inst: Instance, ws: Any, pipe: Any, feed: list[int], n: int) -> list[int]:
        """`n` greedy tokens behind `feed`."""
        said = []
        for _ in range(n):
            token = await inst.submit(pipe, PassSpec(feed, [ws], program=self.greedy))[0]
            said.append(int(token))  # type: ignore[arg-type]
            feed = said[-1:]
        return said

    def check(self, key: tuple[int, int], said: list[int]) -> None:
        """The same prompt gives the same tokens, whatever ran beside it."""
        if said != self.known.setdefault(key, said)[: len(said)]:
            self.wrong += 1

    async def chat(self, inst: Instance, k: int) -> None:
        """A prompt, an answer, a second turn."""
        ws, pipe = inst.working_set(), inst.pipeline()
        said = await self.decode(inst, ws, pipe, self.prompts[k], 8)
        self.check((k, 0), said)
        self.check((k, 1), await self.decode(inst, ws, pipe, [said[-1], 5, 6], 4))

    async def branches(self, inst: Instance, k: int) -> None:
        """Forks of one prompt, one of them dropped half way."""
        ws, pipe = inst.working_set(), inst.pipeline()
        inst.submit(pipe, PassSpec(self.prompts[k], [ws]))
        sets = [inst.fork(ws, pipe) for _ in range(3)]
        loops = [self.decode(inst, s, inst.pipeline(), [10 + i], 5) for i, s in enumerate(sets)]
        for i, said in enumerate(await asyncio.gather(*loops)):
            self.check((k, 10 + i), said)
        inst.drop(sets[0])
        await self.decode(inst, sets[1], pipe, [3], 2)

    async def drafts(self, inst: Instance, k: int) -> None:
        """Speculation: buffered tokens, some committed, the rest discarded."""
        ws, pipe = inst.working_set(), inst.pipeline()
        await inst.submit(pipe, PassSpec(self.prompts[k], [ws], program=self.greedy))[0]
        for n in range(1, 4):
            inst.submit(pipe, PassSpec([1, 2, 3, 4], [ws], BUFFERED, program=self.greedy))
            inst.commit(ws, n)
            inst.discard(ws, 4 - n)
        self.check((k, 20), await self.decode(inst, ws, pipe, [9], 3))

    async def self_feeding(self, inst: Instance, k: int) -> None:
        """Tokens go through a channel, nothing is awaited in between."""
        cell = inst.channel("i32", (1,), 2)

        def step() -> Any:
            token = reduce_argmax(intrinsics.output(0, "logits"))
            ch.put(cell, token)
            return token

        traced = trace_epilogue(step, Model(self.engine.limits.vocab, self.engine.limits.hidden))
        ws, pipe = inst.working_set(), inst.pipeline()
        program: Program = traced.program
        outs = [inst.submit(pipe, PassSpec(self.prompts[k], [ws], program=program, channels=traced.channels))[0]]
        outs += [inst.submit(pipe, PassSpec(cell, [ws], program=program, channels=traced.channels))[0] for _ in range(7)]
        try:
            self.check((k, 0), [int(await out) for out in outs])  # type: ignore[arg-type]
        finally:
            outs.clear()  # an error raised here holds this frame, and its future the error

    async def fault(self, inst: Instance, k: int) -> None:
        """A pass that fails on the device: an id outside the vocabulary."""
        cell = inst.channel("i32", (1,), 1, host="writer")
        inst.put(cell, [self.engine.limits.vocab + 1])
        await inst.submit(inst.pipeline(), PassSpec(cell, [inst.working_set()], program=self.greedy))[0]

    async def request(self) -> None:
        """One request, cancelled after a random moment one time in five."""
        rng = self.random
        kind, k = rng.choices(self.kinds, (6, 3, 3, 3, 1))[0], rng.randrange(PROMPTS)
        inst = self.engine.open_instance("soak", rng.choice("aab"))
        task = asyncio.ensure_future(kind(inst, k))
        try:
            if rng.random() < 0.2:
                await asyncio.wait([task], timeout=rng.random() * 0.05)
                inst.close()
            await task
            self.ends["ok"] += 1
        except InstanceClosed:
            self.ends["cancelled"] += 1
        except PassFailed:
            self.ends["failed"] += 1
        except EngineError as error:
            self.ends[error.type_name] += 1
        finally:
            inst.close()
            del task  # as above

    async def run(self, count: int) -> None:
        """`count` requests, AT_ONCE at a time."""
        left = count

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.request()

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


def resident() -> float:
    """MB of this process, after a collection and without what the allocator keeps for later, as `pie serve` gives it back."""
    gc.collect()
    memory.give_back()
    return float(psutil.Process().memory_info().rss) / 1e6


async def measure(runner: ModelRunner, report: Report, count: int, warm_up: int) -> None:
    """Warm up, then the soak."""
    faulty = Faulty(runner)
    engine = Engine(faulty)
    engine.start()
    load = Load(engine)
    for k in range(PROMPTS):  # what is right: alone, before anything can go wrong
        for kind in (load.chat, load.branches, load.drafts):
            inst = engine.open_instance("alone", reuse=False)
            await kind(inst, k)
            inst.close()
    faulty.armed = True
    await load.run(warm_up)
    before, start = resident(), time.perf_counter()
    await load.run(count - warm_up)
    seconds, after = time.perf_counter() - start, resident()
    status = engine.status()
    report.add("requests", count)
    report.add("requests a second", (count - warm_up) / seconds)
    for name, n in sorted(load.ends.items()):
        report.add(f"  ended {name}", n)
    for name in ("steps", "paused", "revived", "evicted", "reused_tokens", "adopted"):
        report.add(f"  {name}", status[name])
    report.add("  faults of the device", faulty.faults)
    report.target("answers that differ from the same alone", load.wrong, "<=", 0)
    report.target("requests that did not end in one of the ways above", count - sum(load.ends.values()), "<=", 0)
    report.target("pages held at the end", status["pages_used"], "<=", 0)
    report.target("arena words held at the end", status["arena_words_used"], "<=", 0)
    report.target("instances left", status["instances"], "<=", 0)
    report.add("resident after the warm-up, MB", before)
    report.target("growth of the resident size since, %", 100 * (after - before) / before, "<=", 2)
    await engine.stop()


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_gguf(path, layers=2, context=CONTEXT, seed=3)
        runner = await load_runner(args.device, args.model or path, kv_pool_mb=1)
        report = Report("soak", f"{runner.device.info.name} ({args.device})")
        share = 1 if args.device == "cpu" else 10
        await measure(runner, report, REQUESTS // share, WARM_UP // share)
        runner.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
