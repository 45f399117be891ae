"""The engine's own host time a step, over a runner that answers at once: scheduling, packing and settling without any device; and the
same with an inferlet's Process around each loop: ops, checks, events.

The yardstick is the least an asyncio program can do for a step: make a future, have the loop call back, await it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.report import Report, arguments
from pie_core.device.protocol import LANE_ALIGN
from pie_core.engine.forward import PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.runner import RunnerLimits, StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.program import Program
from pie_core.host.port import GuestPort
from pie_core.host.process import Process
from pie_core.host.services import ModelFacts, Services

STEPS = 400
WIDTHS = (1, 8, 32)


class Landed:
    """A step whose results are zeros, in a future as the cpu device gives them."""

    def __init__(self, words: int) -> None:
        self._read: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._read.set_result(bytes(4 * words))

    def results(self) -> asyncio.Future[bytes]:
        """Zeros."""
        return self._read

    def times(self) -> None:
        """Not measured."""


class NullRunner:
    """Packs the step as a real runner does, and runs nothing."""

    limits = RunnerLimits(
        max_tokens=64, max_reads=64, context=8192, pages=2048, vocab=1024, hidden=64, arena_words=1 << 16, results_words=1 << 16,
        table_words=1 << 16, lane_words=64 * LANE_ALIGN,
    )  # fmt: skip

    def prepare(self, program: Program) -> None:
        """Nothing to compile."""

    def submit(self, batch: StepBatch) -> Landed:
        """Pack and answer."""
        pack_step(batch)
        return Landed(batch.results_words)

    def write_arena(self, word: int, data: bytes | bytearray | memoryview) -> None:
        """Nothing to write."""

    def copy_page(self, src: int, dst: int) -> None:
        """Nothing to copy."""

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing to move."""

    page_bytes = 1

    async def read_pages(self, pages: Sequence[int]) -> bytes:
        """A byte a page."""
        return bytes(len(pages))

    def write_pages(self, pages: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Nothing to write."""


async def loop(inst: Instance, program: Program, steps: int) -> None:
    """A greedy loop."""
    ws, pipe = inst.working_set(), inst.pipeline()
    feed: Sequence[int] = [1, 2, 3]
    for _ in range(steps):
        token = await inst.submit(pipe, PassSpec(tokens=feed, state=[ws], program=program))[0]
        feed = [int(token)]  # type: ignore[arg-type]
    inst.close()


async def engine_time(width: int) -> float:
    """Thread seconds of one step of `width` loops."""
    runner = NullRunner()
    engine = Engine(runner)
    engine.start()
    program = trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(1024, 64)).program
    best = float("inf")
    for _ in range(4):
        before, start = engine.metrics.steps, time.thread_time()
        await asyncio.gather(*(loop(engine.open_instance(str(k)), program, STEPS) for k in range(width)))
        best = min(best, (time.thread_time() - start) / (engine.metrics.steps - before))
    await engine.stop()
    return best


class StepGuest:
    """A guest that submits the next pass as the libraries of the guests do, in a turn of its own and no time."""

    def __init__(self, port: GuestPort, program: Program, steps: int) -> None:
        self._call, self._text, self._left = port.call, program.text, steps
        self._last = 10  # id of the last output

    def _submit(self, tokens: list[int]) -> str:
        self._last += 1
        self._op("submit", f'{{"pipe":2,"tokens":{tokens},"ws":[1],"geo":{{"mode":"folding"}},"prog":3,"outs":[{self._last}]}}')
        return f'{{"s":"pending","w":[{self._last}]}}'

    def _op(self, name: str, payload: str) -> None:
        if refusal := self._call(name, payload):
            raise RuntimeError(refusal)

    async def start(self, request: str) -> str:
        """Make the handles and submit the prompt."""
        self._op("ws.new", '{"ws":1}')
        self._op("pipe.new", '{"pipe":2}')
        self._op("program", json.dumps({"prog": 3, "text": self._text}))
        return self._submit([1, 2, 3])

    async def resume(self, events: str) -> str:
        """Feed the token that came."""
        await asyncio.sleep(0)
        self._left -= 1
        return self._submit([json.loads(events)[0][2]]) if self._left else '{"s":"done","r":null}'

    def close(self) -> None:
        """Nothing to free."""


class NoText:
    """Neither tokenizer nor template: the guests here use no text."""

    def prefix(self) -> list[int]:
        """No ids."""
        return []


async def process_time(width: int) -> float:
    """Thread seconds of one step of `width` inferlets."""
    engine = Engine(NullRunner())
    engine.start()
    program = trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(1024, 64)).program
    no_text: Any = NoText()
    services = Services(ModelFacts("null", 1024, 64, 8192), no_text, no_text)

    async def inferlet() -> None:
        process = Process(engine, services)
        await process.run(StepGuest(process.port, program, STEPS), {})

    best = float("inf")
    for _ in range(4):
        before, start = engine.metrics.steps, time.thread_time()
        await asyncio.gather(*(inferlet() for _ in range(width)))
        best = min(best, (time.thread_time() - start) / (engine.metrics.steps - before))
    await engine.stop()
    return best


async def hop_time() -> float:
    """Thread seconds of a future that the loop resolves."""
    running = asyncio.get_running_loop()
    best = float("inf")
    for _ in range(4):
        start = time.thread_time()
        for _ in range(STEPS):
            future = running.create_future()
            running.call_soon(future.set_result, None)
            await future
        best = min(best, (time.thread_time() - start) / STEPS)
    return best


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__, devices=False)
    report = Report("engine", "no device")
    hop = await hop_time()
    report.add("yardstick: a future through the loop, us", 1e6 * hop)
    times = {width: await engine_time(width) for width in WIDTHS}
    for width, spent in times.items():
        report.add(f"a step of {width} lanes, us", 1e6 * spent)
    for width in WIDTHS:
        report.add(f"a step of {width} inferlets, us", 1e6 * await process_time(width))
    report.add("a step of one lane / yardstick", times[1] / hop)
    report.add("each further lane / yardstick", (times[32] - times[1]) / 31 / hop)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
