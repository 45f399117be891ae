"""Each WGSL kernel alone at SmolLM2-135M shapes, and their sum for one token: the bar for decode on a WebGPU adapter.

`--bucket N` times N rows a launch instead of one; `--context N` sets the positions that attention sees.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.report import Report
from pie_core.device.protocol import Buffer, KernelSpec, Launch, MapSpec
from pie_core.device.templates import template
from pie_core.device.webgpu import WebGpuDevice
from pie_core.eta.trace import Trace
from tests.support.lavapipe import lavapipe

LAYERS, WIDTH, QKV, FFN, VOCAB = 30, 576, 960, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
ROUNDS = 5
BLOCKS = {"q4_1": bytes.fromhex("1f210cac") + bytes(range(16)), "q8_0": bytes.fromhex("1f21") + bytes(range(32))}


@dataclass(frozen=True)
class Case:
    """A kernel, its launches in one token, its multiply-adds in one launch and row, its buffers by binding."""

    name: str
    spec: KernelSpec
    times: int
    macs: int
    buffers: Mapping[str, Buffer]


class Shapes:
    """Every kernel of a decode step over `bucket` sequences of `context` positions."""

    def __init__(self, device: WebGpuDevice, bucket: int, context: int) -> None:
        self.device, self.bucket = device, bucket
        pages = -(-context // 16)
        words = [bucket, bucket, bucket, 16, 16 + 8 * bucket, 16 + 9 * bucket, *[0] * 10]
        for i in range(bucket):
            words += [i, 0xFFFFFFFF, context - 1, i * pages * 16 + context - 1, 16 + 9 * bucket + i * pages, 0, 0, 0]
        words += [*range(bucket), *range(bucket * pages)]
        self.step = device.create_buffer(4 * len(words), "step")
        device.write(self.step, 0, b"".join(word.to_bytes(4, "little") for word in words))
        self.caches = [self.zeros(bucket * pages * 16 * KV_HEADS * HEAD_DIM) for _ in range(2)]

    def zeros(self, elements: int) -> Buffer:
        """An f32 buffer."""
        return self.device.create_buffer(4 * elements, "bench")

    def linear(self, name: str, m: int, k: int, *, times: int = LAYERS, fmt: str = "q4_1", add: bool = False) -> Case:
        """[m, k] weights times `bucket` rows."""
        raw = memoryview(BLOCKS[fmt] * (k // 32 * 64))
        weight = self.device.upload(fmt, m, k, (raw for _ in range(m // 64)), name)
        spec = template("linear", fmt=fmt, m=m, k=k, add=add, rows="tokens", bucket=self.bucket)
        buffers = {"step": self.step, "x": self.zeros(self.bucket * k), "quants": weight.quants, "out": self.zeros(self.bucket * m)}
        return Case(f"linear {m}x{k} {fmt}", spec, times, m * k, {**buffers, "scales": weight.scales or weight.quants})

    def silu(self) -> Case:
        """silu(gate) * up over merged [gate | up] rows."""
        trace = Trace("map")
        gate, up = trace.input(0, FFN), trace.input(1, FFN)
        program = trace.finish([gate / (trace.op("exp", -gate) + 1.0) * up])
        spec = MapSpec(program, FFN, ((2 * FFN, 0), (2 * FFN, FFN)), "tokens", self.bucket)
        both = self.zeros(self.bucket * 2 * FFN)
        return Case("map silu", spec, LAYERS, FFN, {"step": self.step, "in0": both, "in1": both, "out": self.zeros(self.bucket * FFN)})

    def all(self) -> list[Case]:
        """The cases of one token."""
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "bucket": self.bucket}
        q, rows = self.zeros(self.bucket * WIDTH), self.zeros(self.bucket * WIDTH)
        norm = {"step": self.step, "x": q, "weight": self.zeros(WIDTH), "out": rows}
        cache = {"k_cache": self.caches[0], "v_cache": self.caches[1]}
        rope = {"step": self.step, "qkv": self.zeros(self.bucket * QKV), "freqs": self.zeros(HEAD_DIM), "q": q, **cache}
        table = self.device.upload("q8_0", 64, WIDTH, [memoryview(BLOCKS["q8_0"] * (WIDTH // 32 * 64))], "table")
        embed = {"step": self.step, "arena": self.step, "quants": table.quants, "scales": table.scales or table.quants, "out": rows}
        return [
            Case("embed", template("embed", fmt="q8_0", vocab=64, width=WIDTH, bucket=self.bucket), 1, WIDTH, embed),
            Case("rms_norm", template("rms_norm", width=WIDTH, eps=1e-5, rows="tokens", bucket=self.bucket), 2 * LAYERS + 1, WIDTH, norm),
            self.linear("qkv", QKV, WIDTH),
            Case("rope_append", template("rope_append", style="interleaved", **sizes), LAYERS, QKV, rope),
            Case("attention", template("attention", scale=0.125, **sizes), LAYERS, 0, {"step": self.step, "q": q, **cache, "out": rows}),
            self.linear("o", WIDTH, WIDTH, add=True),
            self.linear("gate_up", 2 * FFN, WIDTH),
            self.silu(),
            self.linear("down", WIDTH, FFN, add=True),
            self.linear("head", VOCAB, WIDTH, times=1, fmt="q8_0"),
        ]


async def seconds(device: WebGpuDevice, case: Case, repeat: int) -> tuple[float, float]:
    """Best (wall, CPU) time of one launch: `repeat` launches and a 4-byte read-back, less a bare read-back.

    CPU time counts the threads of a software adapter, so it says what a kernel costs on a machine that is busy with other work.
    """
    plan = device.compile_plan([Launch(device.compile(case.spec), case.buffers)] * repeat)
    best = bare = cpu = float("inf")
    for _ in range(ROUNDS + 1):
        start, used = time.perf_counter(), time.process_time()
        plan.run()
        await device.read(case.buffers["out"] if "out" in case.buffers else case.buffers["q"], 0, 4)
        best, cpu = min(best, time.perf_counter() - start), min(cpu, time.process_time() - used)
        start = time.perf_counter()
        await device.read(case.buffers["step"], 0, 4)
        bare = min(bare, time.perf_counter() - start)
    return max(0.0, best - bare) / repeat, cpu / repeat


async def measure(report: Report, device: WebGpuDevice, bucket: int, context: int) -> None:
    """Fill the report."""
    total = total_cpu = 0.0
    for case in Shapes(device, bucket, context).all():
        spent, cpu = await seconds(device, case, 2 if case.times == 1 else 10)
        total += spent * case.times
        total_cpu += cpu * case.times
        report.add(f"{case.name}, ms a launch (x{case.times})", spent * 1e3)
        if case.name.startswith("linear"):
            report.add(f"{case.name}, GFLOP/s", 2e-9 * case.macs * bucket / spent)
    report.add("sum of kernels, ms a step", total * 1e3)
    report.add("sum of kernels, CPU ms a step", total_cpu * 1e3)
    report.add("kernels only, tok/s", bucket / total)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when the target holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--bucket", type=int, default=1, help="rows of a step")
    parser.add_argument("--context", type=int, default=256, help="positions that attention sees")
    options = parser.parse_args(argv)
    device = lavapipe()
    report = Report("kernels_webgpu", f"{device.info.name}, {device.info.description}")
    asyncio.run(measure(report, device, options.bucket, options.context))
    device.close()
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
