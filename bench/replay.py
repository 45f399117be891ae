"""The yardstick of the engine benches: the same plans driven by hand, without engine, inferlet or futures of passes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from pie_core.codegen.layout import lane_layout
from pie_core.device.protocol import NONE, PAGE_TOKENS, Launch
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import EpilogueGroup, StepBatch
from pie_core.engine.step_buffer import PackedStep, pack_step
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.program import Program


def greedy(runner: ModelRunner) -> Program:
    """argmax over the logits of read-out 0."""
    limits = runner.limits
    return trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(limits.vocab, limits.hidden)).program


def packed_step(program: Program | None, first: int, ids: list[int], first_page: int = 0) -> PackedStep:
    """A step that appends `ids` at position `first` of one sequence on consecutive pages; greedy at the last token."""
    last = first + len(ids) - 1
    batch = StepBatch(tables=list(range(first_page, first_page + last // PAGE_TOKENS + 1)), n_seqs=1)
    for pos, token in enumerate(ids, first):
        batch.rows.extend((token, NONE, pos, first_page * PAGE_TOKENS + pos, 0, 0, 0, 0))
    if program is not None:
        batch.reads.append(len(ids) - 1)
        lane = lane_layout(program).pack(0, 0, (), (1,), ())
        batch.epilogues.append(EpilogueGroup(program, [lane]))
        batch.results_words = 2
    return pack_step(batch)


@dataclass
class Replay:
    """Runs packed steps of `rows` tokens through the model's plans."""

    runner: ModelRunner
    program: Program

    async def steps(self, packed: list[PackedStep], rows: int) -> float:
        """Seconds to run the steps one after another, each awaited by its read-back of 8 bytes."""
        runner, model = self.runner, self.runner.model
        device, step, results = runner.device, runner.tables.step, runner.results
        body, head = model.body(rows), model.head(1)
        epilogue = runner.epilogue_plan(self.program)
        start = time.perf_counter()
        for p in packed:
            device.write(step, 0, p.data)
            body.run()
            if p.groups:
                head.run()
                epilogue.run(lane_offset=p.groups[0].lane_offset, lanes=1)
            await device.read(results, 0, 8)
        return time.perf_counter() - start


async def kernel_times(
    runner: ModelRunner, packed: PackedStep, rows: int, repeat: int = 20, rounds: int = 3
) -> dict[str, tuple[int, float]]:
    """Each distinct kernel of the step `packed` alone: name -> (launches in a step, best seconds of one launch)."""
    device, results = runner.device, runner.results
    device.write(runner.tables.step, 0, packed.data)
    by_spec: dict[object, list[Launch]] = defaultdict(list)
    for launch in runner.model.launches(rows, 1):
        by_spec[launch.kernel.spec].append(launch)
    times: dict[str, tuple[int, float]] = {}
    for i, (spec, launches) in enumerate(by_spec.items()):
        # all layers in turn, so that weights come from memory as they do in a step
        many = (launches * -(-repeat // len(launches)))[: max(repeat, len(launches))]
        plan = device.compile_plan(many)
        best = float("inf")
        for _ in range(rounds + 1):
            start = time.perf_counter()
            plan.run()
            await device.read(results, 0, 4)
            best = min(best, time.perf_counter() - start)
        empty = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            await device.read(results, 0, 4)
            empty = min(empty, time.perf_counter() - start)
        name = f"{getattr(spec, 'name', 'map')}.{i}"
        times[name] = (len(launches), max(0.0, best - empty) / len(many))
    return times
