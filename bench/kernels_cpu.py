"""The cpu device's kernels alone at SmolLM2-135M shapes, and their sum for one token, against plain int16 products.

The yardstick (bench/yardsticks/int16_products.c) computes the same matrix products in the plainest blocked form in the same run.
Both are timed by the CPU time of their threads, in an order that lets them see the same machine.
Then the ops of samplers over a vocabulary of 49,152, as ratios to a bare maximum of the same row, and first use of whole samplers.
`--context N` sets the positions that attention sees.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.report import Report
from bench.yardsticks.int16_products import HEAD, LAYERS, SHAPES, Int16Products
from pie_core.codegen import lane_layout
from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.protocol import NONE, Buffer, EpilogueSpec, KernelSpec, Launch, MapSpec, Plan, Weight
from pie_core.device.templates import template
from pie_core.eta import FUNCTIONS, Model, Tensor, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.program import Node, Program
from pie_server.adapters.cpu_module import WasmtimeCpuModule
from pie_server.build.cpu_module import cpu_module

WIDTH, QKV, FFN, VOCAB = 576, 960, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
NAMES = ("qkv", "o", "gate_up", "down")
ROWS = (1, 4, 8, 32, 128)
RUNS = 5
BLOCKS = {"q4_1": bytes.fromhex("1f210cac") + bytes(range(16)), "q8_0": bytes.fromhex("1f21") + bytes(range(32))}


def yardstick_tokens_per_second() -> float:
    """Matrix products only: what the plain int16 program reaches for one token on this machine now."""
    return 1 / Int16Products().token()


@dataclass(frozen=True)
class Case:
    """A kernel, its launches in one token, and its buffers by binding."""

    name: str
    spec: KernelSpec
    times: int
    buffers: Mapping[str, Buffer]
    lanes: int = 0


class Model135M:
    """Weights of every layer (distinct bytes in memory, as in decoding) and activations for 128 rows."""

    def __init__(self, device: CpuDevice, context: int) -> None:
        self.device = device
        start = time.perf_counter()
        self.layers = [[self.upload("q4_1", m, k) for m, k in SHAPES] for _ in range(LAYERS)]
        self.head = self.upload("q8_0", *HEAD)
        self.upload_s = time.perf_counter() - start
        self.wide, self.rows = self.zeros(128 * 2 * FFN), self.zeros(128 * FFN)
        self.logits = self.zeros(VOCAB)
        self.pages = -(-context // 16)
        self.context = context
        self.caches = [self.zeros(self.pages * 16 * KV_HEADS * HEAD_DIM) for _ in range(2)]
        self.step = device.create_buffer(4 * (16 + 128 * 9 + self.pages), "step")
        for buffer in (self.wide, self.rows, *self.caches):
            device.write(buffer, 0, b"\x00\x00\x80\x3e\x00\x00\x40\xbf" * (buffer.size // 8))

    def upload(self, fmt: str, m: int, k: int) -> Weight:
        """A weight of one repeated block."""
        rows = [memoryview(BLOCKS[fmt] * (k // 32 * 64))] * (m // 64)
        return self.device.upload(fmt, m, k, rows)

    def zeros(self, elements: int) -> CpuBuffer:
        """An f32 buffer."""
        return self.device.create_buffer(4 * elements, "bench")

    def set_rows(self, n: int) -> None:
        """A step of n tokens at the last position of one sequence."""
        first_page = 16 + 9 * n
        words = [n, n, 1, 16, 16 + 8 * n, first_page, *[0] * 10]
        for i in range(n):
            pos = max(self.context - n + i, 0)
            words += [i, NONE, pos, pos, first_page, 0, 0, 0]
        words += [*range(n), *range(self.pages)]
        self.device.write(self.step, 0, b"".join(w.to_bytes(4, "little") for w in words))

    def linear(self, weight: Weight, *, add: bool = False) -> Launch:
        """One product; the widest buffers serve as input and output."""
        head = weight.rows == VOCAB
        kernel = self.device.compile(
            template("linear", fmt=weight.fmt, m=weight.rows, k=weight.cols, add=add, rows="tokens", bucket=1 if head else 128)
        )
        assert weight.scales is not None
        out = self.logits if head else self.wide
        return Launch(kernel, {"step": self.step, "x": self.rows, "quants": weight.quants, "scales": weight.scales, "out": out})

    def products(self) -> Plan:
        """Every product of the layers."""
        return self.device.compile_plan([self.linear(w, add=i % 2 == 1) for layer in self.layers for i, w in enumerate(layer)])

    def others(self) -> list[Case]:
        """Every kernel of a decode step that is no product."""
        d, step, cache = self.device, self.step, {"k_cache": self.caches[0], "v_cache": self.caches[1]}
        heads = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "bucket": 128}
        head = self.head
        assert head.scales is not None
        embed = {"step": step, "arena": step, "quants": head.quants, "scales": head.scales, "out": self.rows}
        norm = {"step": step, "x": self.rows, "weight": self.zeros(WIDTH), "out": self.wide}
        rope = {"step": step, "qkv": self.wide, "freqs": self.zeros(HEAD_DIM), "q": self.rows, **cache}
        attend = {"step": step, "q": self.rows, **cache, "out": self.wide}
        lanes = d.create_buffer(256, "lanes")
        program = greedy()
        words = lane_layout(program).pack(0, 0, [], [1], [])
        d.write(lanes, 0, b"".join(w.to_bytes(4, "little") for w in words))
        results = d.create_buffer(256, "results")
        pick = {"logits": self.logits, "arena": step, "lanes": lanes, "results": results}
        gate = {"step": step, "in0": self.wide, "in1": self.wide, "out": self.rows}
        return [
            Case("embed", template("embed", fmt="q8_0", vocab=VOCAB, width=WIDTH, bucket=128), 1, embed),
            Case("rms_norm", template("rms_norm", width=WIDTH, eps=1e-5, rows="tokens", bucket=128), 2 * LAYERS + 1, norm),
            Case("rope_append", template("rope_append", style="interleaved", **heads), LAYERS, rope),
            Case("attention", template("attention", scale=0.125, **heads), LAYERS, attend),
            Case("silu", MapSpec(silu(), FFN, ((2 * FFN, 0), (2 * FFN, FFN)), "tokens", 128), LAYERS, gate),
            Case("argmax", EpilogueSpec(program), 1, pick, lanes=1),
        ]


def silu() -> Program:
    """in0 * sigmoid(in0) * in1, as in0 / (1 + exp(-in0)) * in1."""
    n = (FFN,)
    one = int.from_bytes(b"\x00\x00\x80\x3f", "little")
    rows: list[tuple[str, tuple[int, ...], dict[str, int | str], tuple[int, ...]]] = [
        ("input", (), {"index": 0}, n), ("input", (), {"index": 1}, n), ("neg", (0,), {}, n), ("exp", (2,), {}, n),
        ("const", (), {"bits": one}, ()), ("add", (3, 4), {}, n), ("div", (0, 5), {}, n), ("mul", (6, 1), {}, n),
    ]  # fmt: skip
    return Program("map", [Node(name, args, attrs, "f32", shape) for name, args, attrs, shape in rows], [7]).verify()


def greedy() -> Program:
    """argmax over the vocabulary."""
    return trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(VOCAB, WIDTH)).program


class Clock:
    """Times plans by the CPU time of the device's thread, so that other work on the machine does not count."""

    def __init__(self, module: WasmtimeCpuModule) -> None:
        self.module = module
        self.bare = 0.0

    async def seconds(self, plan: Plan, lanes: int = 0, runs: int = RUNS) -> float:
        """Best CPU seconds of one run of the plan, less those of an empty one."""
        best = float("inf")
        for _ in range(runs):
            start = await self.module.thread_time()
            plan.run(lanes=lanes)
            best = min(best, await self.module.thread_time() - start)
        return best - self.bare


async def round_trip(device: CpuDevice, buffer: Buffer) -> float:
    """Wall seconds from the loop to the device's thread and back, the best of many."""
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter()
        await device.read(buffer, 0, 4)
        best = min(best, time.perf_counter() - start)
    return best


async def measure(report: Report, device: CpuDevice, module: WasmtimeCpuModule, context: int) -> None:
    """Fill the report; device and yardstick alternate, so that both see the same machine."""
    model, yardstick, clock = Model135M(device, context), Int16Products(time.thread_time), Clock(module)
    weights = sum(w.nbytes for layer in model.layers for w in layer) + model.head.nbytes
    report.add("weights, MB", weights / 1e6)
    report.add("upload and repack, MB/s", weights / 1e6 / model.upload_s)
    report.add("read-back round trip, us of wall time", await round_trip(device, model.step) * 1e6)
    products, head = model.products(), device.compile_plan([model.linear(model.head)])
    clock.bare = await clock.seconds(device.compile_plan([]), runs=50)

    model.set_rows(1)
    token, plain = float("inf"), float("inf")
    for _ in range(2):
        token = min(token, await clock.seconds(products) + await clock.seconds(head))
        plain = min(plain, yardstick.token())
    report.add("products of one token, ms", token * 1e3)
    report.add("yardstick: products of one token, ms", plain * 1e3)
    report.target("products of one token / yardstick", token / plain, "<=", 1.0)
    for i, name in enumerate(NAMES):
        plan = device.compile_plan([model.linear(layer[i]) for layer in model.layers])
        report.add(f"  {name}, ms a token", await clock.seconds(plan) * 1e3)
    report.add("  head, ms a token", await clock.seconds(head) * 1e3)

    total = token
    for case in model.others():
        plan = device.compile_plan([Launch(device.compile(case.spec), case.buffers)] * 20)
        spent = await clock.seconds(plan, case.lanes) / 20
        total += spent * case.times
        report.add(f"{case.name}, us a launch (x{case.times})", spent * 1e6)
    report.add("sum of kernels for one token, ms", total * 1e3)
    report.add("kernels only, tok/s", 1 / total)

    for rows in ROWS[1:]:
        model.set_rows(rows)
        own, plain = rows / await clock.seconds(products, runs=2), rows / yardstick.layers(rows, 2)
        report.add(f"layers' products at {rows} rows, tok/s", own)
        report.add(f"  yardstick at {rows} rows, tok/s", plain)
        report.target(f"  ratio at {rows} rows", own / plain, ">=", 1.0)
    for case in model.others():
        if case.times == LAYERS:
            plan = device.compile_plan([Launch(device.compile(case.spec), case.buffers)])
            report.add(f"{case.name} at 128 rows, us a row", await clock.seconds(plan) / 128 * 1e6)
    await measure_samplers(report, device, clock)


async def measure_samplers(report: Report, device: CpuDevice, clock: Clock) -> None:
    """Selection and sampling over one row, less what every epilogue costs, per bare maximum of that row; and first use of programs."""
    rng = random.Random(1)
    logits = [rng.gauss(0.0, 3.0) for _ in range(VOCAB)]
    total = sum(map(math.exp, logits))
    rows = {"logits": logits, "probabilities": [math.exp(x) / total for x in logits], "equal": [1.0 / VOCAB] * VOCAB}
    buffers = {name: device.create_buffer(4 * VOCAB, name) for name in rows}
    for name, row in rows.items():
        device.write(buffers[name], 0, struct.pack(f"<{VOCAB}f", *row))
    greatest = await _epilogue_seconds(device, clock, SAMPLER_OPS["max"][1], buffers["logits"])
    report.add("epilogue: max of 49,152 logits, us", greatest * 1e6)
    for name, (source, fn) in SAMPLER_OPS.items():
        for row in dict.fromkeys((source, "equal")):
            spent = await _epilogue_seconds(device, clock, fn, buffers[row])
            report.target(f"  {name} of {row}, ms", spent * 1e3, "<=", 2.0 if name == "typical" else 1.0)
            report.add(f"    {name} of {row} / max", spent / greatest)
    for name, fn in {"greedy": SAMPLER_OPS["argmax"][1], "mirostat": mirostat, "typical": typical}.items():
        times = []
        for _ in range(5):
            program = trace_epilogue(fn, Model(VOCAB, WIDTH)).program
            start = time.thread_time()
            kernel = device.compile(EpilogueSpec(program))
            times.append(time.thread_time() - start)
            del kernel  # the device forgets it with its last user
        report.target(f"first use of {name}: emit and upload, ms", max(times) * 1e3, "<=", 30.0)
        kernel = device.compile(EpilogueSpec(program))
        start = time.thread_time()
        assert device.compile(EpilogueSpec(program)) is kernel
        report.target(f"  {name} again, ms", (time.thread_time() - start) * 1e3, "<=", 2.0)


async def _epilogue_seconds(device: CpuDevice, clock: Clock, fn: Callable[[], object], row: Buffer) -> float:
    traced = trace_epilogue(fn, Model(VOCAB, WIDTH))
    layout = lane_layout(traced.program)
    arena, results = device.create_buffer(64, "arena"), device.create_buffer(4 * (layout.results_words + 4), "results")
    at, outs = 1, []
    for size in layout.out_sizes:
        outs.append(at)
        at += size
    words = layout.pack(0, 0, [(4 * c, 4 * c, NONE) for c in range(layout.channels)], outs, traced.params)
    lanes = device.create_buffer(4 * layout.words, "lanes")
    device.write(lanes, 0, struct.pack(f"<{len(words)}I", *words))
    bindings = {"logits": row, "arena": arena, "lanes": lanes, "results": results}
    plan = device.compile_plan([Launch(device.compile(EpilogueSpec(traced.program)), bindings)] * 20)
    spent = await clock.seconds(plan, lanes=1) / 20
    for buffer in (arena, results, lanes):
        buffer.destroy()
    return spent


def _row() -> Tensor:
    return intrinsics.output(0, "logits")


def _count(mask: Tensor) -> Tensor:
    return FUNCTIONS["reduce_sum"](mask.cast("u32"))


def _state() -> Tensor:
    return FUNCTIONS["iota"](2)


def mirostat() -> tuple[Tensor, Tensor]:
    """One step with a fixed mu."""
    token, mu = FUNCTIONS["mirostat"](_row(), FUNCTIONS["constant"](8.0, "f32"), _state())
    return token, mu


def typical() -> Tensor:
    """A sample of the typical set."""
    return FUNCTIONS["gumbel_max"](FUNCTIONS["masked"](_row(), FUNCTIONS["typical"](_row(), 0.95)), _state())


# name -> (row it is made for, epilogue)
SAMPLER_OPS: dict[str, tuple[str, Callable[[], object]]] = {
    "max": ("logits", lambda: FUNCTIONS["reduce_max"](_row())),
    "argmax": ("logits", lambda: reduce_argmax(_row())),
    "top_k 40": ("logits", lambda: FUNCTIONS["top_k"](_row(), 40)[1]),
    "pivot_rank 40": ("logits", lambda: _count(FUNCTIONS["pivot_threshold"](_row(), rank=40))),
    "pivot_rank 5000": ("logits", lambda: _count(FUNCTIONS["pivot_threshold"](_row(), rank=5000))),
    "pivot_mass 0.9": ("probabilities", lambda: _count(FUNCTIONS["pivot_threshold"](_row(), mass=0.9))),
    "sort_desc": ("logits", lambda: FUNCTIONS["sort_desc"](_row())[1]),
    "cumsum": ("logits", lambda: FUNCTIONS["cumsum"](_row())),
    "gumbel": ("logits", lambda: FUNCTIONS["gumbel_max"](_row() / 0.7, _state())),
    "top_p 0.9 and gumbel": (
        "logits",
        lambda: FUNCTIONS["gumbel_max"](FUNCTIONS["masked"](_row(), FUNCTIONS["top_p"](_row(), 0.9)), _state()),
    ),
    "typical": ("logits", typical),
    "mirostat": ("logits", mirostat),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when the targets hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--context", type=int, default=256, help="positions that attention sees")
    options = parser.parse_args(argv)
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    device = CpuDevice(module)
    report = Report("kernels_cpu", device.info.description)
    asyncio.run(measure(report, device, module, options.context))
    device.close()
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
