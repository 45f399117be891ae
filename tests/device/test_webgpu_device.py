"""The webgpu device on lavapipe: order of the queue, reads in flight, plans, programs, uploads, and every error it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from pie_core import eta
from pie_core.codegen import lane_layout
from pie_core.device.protocol import (
    DeviceError,
    DeviceLost,
    DeviceOutOfMemory,
    EpilogueSpec,
    KernelError,
    Launch,
    LimitError,
    MapSpec,
)
from pie_core.device.templates import template
from pie_core.device.webgpu import WebGpuDevice
from pie_core.device.webgpu_errors import translate
from pie_core.device.webgpu_upload import Uploader
from pie_core.eta import Model, Program, trace_epilogue
from pie_core.eta.trace import Trace
from pie_server.adapters.wgpu_native import open_webgpu, open_webgpu_sync
from tests.device.oracles import Step, Token, raw_weight
from tests.support.lavapipe import lavapipe


@pytest.fixture
def device() -> WebGpuDevice:
    return lavapipe()


@pytest.fixture
def doomed() -> Iterator[WebGpuDevice]:
    """A device of its own, to be lost or closed."""
    made = open_webgpu_sync(allow_software=True)
    yield made
    made.close()


def words(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def busy_for_milliseconds(device: WebGpuDevice) -> None:
    """Enqueue work that is long enough to be overtaken by the host."""
    width = 100_000
    norm = device.compile(template("rms_norm", width=width, eps=0.0, rows="tokens", bucket=1))
    step, x, weight, out = (device.create_buffer(4 * width) for _ in range(4))
    device.write(step, 0, Step([Token()]).words().tobytes())
    device.compile_plan([Launch(norm, {"step": step, "x": x, "weight": weight, "out": out})] * 10).run()


# The queue


async def test_a_new_buffer_is_zero_and_keeps_the_size_asked_for(device: WebGpuDevice) -> None:
    buffer = device.create_buffer(20, "twenty")
    assert (buffer.size, buffer.label) == (20, "twenty")
    assert await device.read(buffer, 0, 20) == bytes(20)


async def test_reads_see_what_was_enqueued_before_the_call_and_nothing_later(device: WebGpuDevice) -> None:
    a, b = device.create_buffer(16), device.create_buffer(16)
    device.write(a, 0, words(1, 2, 3, 4))
    device.copy(a, 4, b, 8, 8)
    first = device.read(b, 8, 8)
    device.write(a, 0, words(9, 9, 9, 9))
    device.copy(a, 0, b, 0, 16)
    second = device.read(b, 0, 16)
    assert await second == words(9, 9, 9, 9)
    assert await first == words(2, 3)


async def test_many_reads_in_flight(device: WebGpuDevice) -> None:
    buffer = device.create_buffer(400)
    device.write(buffer, 0, words(*range(100)))
    sizes = [4, 256, 400, 0, 12] * 6
    answers = await asyncio.gather(*(device.read(buffer, 0, size) for size in sizes))
    assert [answer == words(*range(size // 4)) for answer, size in zip(answers, sizes, strict=True)] == [True] * len(sizes)


async def test_copy_inside_one_buffer_of_growing_sizes(device: WebGpuDevice) -> None:
    buffer = device.create_buffer(80_000)
    device.write(buffer, 0, words(*range(10_000)))
    for size in (16, 20_000, 8):
        device.copy(buffer, 0, buffer, 40_000, size)
        device.copy(buffer, 0, buffer, 60_000, size)
    answer = np.frombuffer(await device.read(buffer, 40_000, 40_000), np.uint32)
    assert (answer[:5000] == np.arange(5000)).all() and (answer[5000:] == np.arange(5000)).all()


async def test_work_is_submitted_when_the_loop_turns(device: WebGpuDevice) -> None:
    a, b = device.create_buffer(4), device.create_buffer(4)
    device.write(a, 0, words(7))
    device.copy(a, 0, b, 0, 4)
    assert device._encoder is not None
    await asyncio.sleep(0)
    assert device._encoder is None
    assert await device.read(b, 0, 4) == words(7)


async def test_a_cancelled_read_leaves_the_pool_usable(device: WebGpuDevice) -> None:
    buffer = device.create_buffer(16)
    device.write(buffer, 0, words(1, 2, 3, 4))
    busy_for_milliseconds(device)
    task = asyncio.ensure_future(device.read(buffer, 0, 16))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await device.read(buffer, 0, 16) == words(1, 2, 3, 4)


async def test_reads_arrive_while_the_loop_is_busy_and_do_not_hold_it(device: WebGpuDevice) -> None:
    """The map is signalled by wgpu-py's poll thread: the loop turns freely until it arrives."""
    buffer, turns = device.create_buffer(64), 0

    async def busy() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(busy())
    for value in range(30):
        device.write(buffer, 0, words(value))
        before = turns
        assert await asyncio.wait_for(device.read(buffer, 0, 4), 10) == words(value)
        assert turns > before
    task.cancel()


async def test_a_second_step_may_be_enqueued_before_the_first_is_read(device: WebGpuDevice) -> None:
    buffer = device.create_buffer(16)
    answers = []
    for value in range(6):
        device.write(buffer, 0, words(value))
        busy_for_milliseconds(device)
        answers.append(asyncio.ensure_future(device.read(buffer, 0, 4)))
    assert await asyncio.gather(*answers) == [words(value) for value in range(6)]


# Ranges and limits

BAD_RANGES = [(2, 4, "multiples of 4"), (0, 6, "multiples of 4"), (-4, 4, "outside"), (12, 8, "outside its 16 bytes")]


@pytest.mark.parametrize(("offset", "size", "message"), BAD_RANGES)
def test_bad_ranges_are_refused_by_name(device: WebGpuDevice, offset: int, size: int, message: str) -> None:
    buffer, other = device.create_buffer(16, "sixteen"), device.create_buffer(64)
    for call in (
        lambda: device.read(buffer, offset, size),
        lambda: device.write(buffer, offset, bytes(size)),
        lambda: device.copy(buffer, offset, other, 0, size),
        lambda: device.copy(other, 0, buffer, offset, size),
    ):
        with pytest.raises(DeviceError, match=message):
            call()


def test_sizes_over_a_limit_say_the_numbers(device: WebGpuDevice) -> None:
    most = device.info.limits["max-storage-buffer-binding-size"]
    with pytest.raises(LimitError, match=f"'logits' needs {most + 4} bytes.*max-storage-buffer-binding-size of {most}"):
        device.create_buffer(most + 4, "logits")
    with pytest.raises(LimitError, match=r"'lm_head'.*smaller quantisation.*cpu device"):
        device.upload("f32", 1 << 16, 1 << 12, [], "lm_head")
    with pytest.raises(DeviceError, match="'none' of 0 bytes"):
        device.create_buffer(0, "none")


def test_foreign_objects_are_refused(device: WebGpuDevice) -> None:
    class Other:
        size, label = 16, "other"

        def destroy(self) -> None: ...

    with pytest.raises(DeviceError, match="not a buffer of this WebGPU device"):
        device.write(Other(), 0, bytes(4))
    with pytest.raises(DeviceError, match="was not compiled by this WebGPU device"):
        device.compile_plan([Launch(object(), {})])  # type: ignore[arg-type]


# Errors


class GPUOutOfMemoryError(Exception):
    """wgpu-py's name."""


ERRORS = [
    (RuntimeError("Could not map buffer (4 : Device lost)."), DeviceLost, "the WebGPU device was lost"),
    (ValueError("Validation Error\n\nCaused by:\n  In wgpuQueueSubmit\n    Parent device is lost\n"), DeviceLost, "Parent device is lost"),
    (GPUOutOfMemoryError("no"), DeviceOutOfMemory, "could not do it: no"),
    (RuntimeError("Not enough memory left."), DeviceOutOfMemory, "Not enough memory"),
    (RuntimeError("something"), DeviceError, "could not do it: something"),
    (LimitError("as it is"), LimitError, "^as it is$"),
]


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_translation(error: Exception, kind: type[DeviceError], message: str) -> None:
    made = translate(error, "do it")
    assert type(made) is kind
    with pytest.raises(kind, match=message):
        raise made


def test_wgsl_that_does_not_compile_is_a_kernel_error(device: WebGpuDevice) -> None:
    with pytest.raises(KernelError, match="could not compile the broken kernel"):
        device.kernels._pipeline("fn main( {", (), "broken kernel")
    assert device.create_buffer(4).size == 4  # the device survives


async def test_destroyed_buffers_never_reach_a_submission(device: WebGpuDevice) -> None:
    """wgpu-native ends the process on such a submission, so each use is refused before it."""
    names = ("step", "x", "weight", "out")
    buffers = {name: device.create_buffer(128, name) for name in names}
    norm = device.compile(template("rms_norm", width=4, eps=0.0, rows="tokens", bucket=1))
    plan = device.compile_plan([Launch(norm, buffers)])
    plan.run()
    device.copy(buffers["x"], 0, buffers["out"], 0, 16)  # recorded before the destruction: still completes
    buffers["x"].destroy()
    buffers["x"].destroy()
    other = device.create_buffer(128)
    for call in (
        lambda: device.read(buffers["x"], 0, 16),
        lambda: device.write(buffers["x"], 0, bytes(4)),
        lambda: device.copy(buffers["x"], 0, other, 0, 16),
        plan.run,
        lambda: device.compile_plan([Launch(norm, buffers)]),
    ):
        with pytest.raises(DeviceError, match=r"buffer 'x'.*destroyed"):
            call()
    assert await device.read(buffers["out"], 0, 4) == bytes(4)


async def test_a_failure_in_the_loops_own_submission_is_raised_by_the_next_call(
    device: WebGpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = device.create_buffer(16)

    def refuse() -> None:
        raise DeviceError("could not submit commands")

    device.encoder()
    with monkeypatch.context() as patch:
        patch.setattr(device, "flush", refuse)
        await asyncio.sleep(0)
    with pytest.raises(DeviceError, match="could not submit"):
        device.write(buffer, 0, words(1))
    device.write(buffer, 0, words(5))
    assert await device.read(buffer, 0, 4) == words(5)


async def test_device_loss_is_typed_everywhere(doomed: WebGpuDevice) -> None:
    buffer = doomed.create_buffer(16)
    doomed.raw.destroy()
    with pytest.raises(DeviceLost, match="device was lost"):
        doomed.write(buffer, 0, bytes(4))
    norm = template("rms_norm", width=4, eps=0.0, rows="tokens", bucket=1)
    for call in (
        lambda: doomed.read(buffer, 0, 4),
        lambda: doomed.create_buffer(4),
        lambda: doomed.compile(norm),
        lambda: doomed.copy(buffer, 0, buffer, 4, 4),
        lambda: doomed.upload("f32", 1, 1, [memoryview(bytes(4))]),
        doomed.flush,
    ):
        with pytest.raises(DeviceLost, match="the WebGPU device is gone: lost by the driver or destroyed"):
            call()


async def test_close_is_final_and_may_be_repeated(doomed: WebGpuDevice) -> None:
    buffer = doomed.create_buffer(16)
    await doomed.read(buffer, 0, 4)
    doomed.close()
    doomed.close()
    with pytest.raises(DeviceLost, match="it was closed"):
        doomed.write(buffer, 0, bytes(4))


# Uploads


async def dequantised(device: WebGpuDevice, fmt: str, rows: int, cols: int, chunks: list[memoryview]) -> np.ndarray:  # type: ignore[type-arg]
    """The matrix that arrived, through `embed`."""
    weight = device.upload(fmt, rows, cols, chunks, "w")
    out = device.create_buffer(4 * rows * cols)
    step = Step([Token(i) for i in range(rows)])
    table = device.create_buffer(step.words().nbytes)
    device.write(table, 0, step.words().tobytes())
    kernel = device.compile(template("embed", fmt=fmt, vocab=rows, width=cols, bucket=rows))
    bindings = {"step": table, "arena": table, "quants": weight.quants, "scales": weight.scales or weight.quants, "out": out}
    device.compile_plan([Launch(kernel, bindings)]).run()
    return np.frombuffer(await device.read(out, 0, out.size), np.float32).reshape(rows, cols)


CHUNKINGS = [[9], [1] * 9, [4, 5], [8, 1]]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize(("fmt", "cols"), [("f32", 3), ("f16", 3), ("f16", 64), ("q4_1", 96), ("q8_0", 32), ("q8_0", 96)])
async def test_upload_in_any_chunks(
    device: WebGpuDevice, monkeypatch: pytest.MonkeyPatch, fmt: str, cols: int, chunking: list[int]
) -> None:
    monkeypatch.setattr(device, "_uploads", Uploader(device))
    monkeypatch.setattr("pie_core.device.webgpu_upload.STAGING_BYTES", 170)  # several pieces a chunk, odd numbers of blocks
    monkeypatch.setattr("pie_core.device.webgpu_upload.DRAIN_BYTES", 200)
    raw = raw_weight(np.random.default_rng(1), fmt, 9, cols)
    row, chunks, at = len(raw.data) // 9, [], 0
    for rows in chunking:
        chunks.append(memoryview(raw.data)[at : at + rows * row])
        at += rows * row
    np.testing.assert_array_equal(await dequantised(device, fmt, 9, cols, chunks), raw.matrix.astype(np.float32))


BAD_UPLOADS = [
    ("q5_k", 1, 32, 0, KernelError, "format 'q5_k'; this device takes f32, f16, q4_1, q8_0"),
    ("q4_1", 1, 33, 0, KernelError, "33 columns; format q4_1 packs blocks of 32"),
    ("f32", 0, 1, 0, DeviceError, r"shape \[0, 1\]"),
    ("q8_0", 2, 32, 34, DeviceError, "34 bytes of 68; the file is truncated"),
    ("q8_0", 1, 32, 68, DeviceError, "brings 68 of 34 bytes"),
    ("q8_0", 1, 32, 33, DeviceError, "a chunk of 33 bytes"),
]


@pytest.mark.parametrize(("fmt", "rows", "cols", "size", "kind", "message"), BAD_UPLOADS)
def test_bad_uploads(device: WebGpuDevice, fmt: str, *, rows: int, cols: int, size: int, kind: type[DeviceError], message: str) -> None:
    with pytest.raises(kind, match=f"'w'.*{message}"):
        device.upload(fmt, rows, cols, [memoryview(bytes(size))], "w")


async def test_upload_keeps_weights_quantised_and_no_second_copy(device: WebGpuDevice) -> None:
    """33 MB of Q4_1: lavapipe's device memory is host memory, so RSS may grow by the weights once plus staging."""
    rows, cols = 1024 * 16, 3200
    raw = bytes(512 * cols // 32 * 20)

    process = psutil.Process()
    await dequantised(device, "q4_1", 2, 32, [memoryview(bytes(40))])  # staging and kernels exist now
    before = process.memory_info().rss
    weight = device.upload("q4_1", rows, cols, (memoryview(raw) for _ in range(rows // 512)), "large")
    await device.read(weight.quants, 0, 4)
    grown = process.memory_info().rss - before
    assert weight.nbytes == rows * cols * 5 // 8
    assert grown < weight.nbytes + (48 << 20)
    weight.quants.destroy()
    assert weight.scales is not None
    weight.scales.destroy()


# Programs


def silu_product() -> Program:
    """silu(a) * b, as a model's tail."""
    trace = Trace("map")
    a, b = trace.input(0, 6), trace.input(1, 6)
    return trace.finish([a / (1.0 + trace.op("exp", -a)) * b])


async def test_a_map_program_runs_over_the_true_rows(device: WebGpuDevice) -> None:
    values = np.random.default_rng(2).standard_normal((4, 12)).astype(np.float32)
    x, out, step = device.create_buffer(values.nbytes), device.create_buffer(4 * 24), device.create_buffer(1024)
    device.write(x, 0, values.tobytes())
    device.write(step, 0, Step([Token()] * 3).words().tobytes())
    device.write(out, 0, np.full(24, np.nan, np.float32).tobytes())
    kernel = device.compile(MapSpec(silu_product(), 6, ((12, 0), (12, 6)), "tokens", 4))
    device.compile_plan([Launch(kernel, {"step": step, "in0": x, "in1": x, "out": out})]).run()
    got = np.frombuffer(await device.read(out, 0, out.size), np.float32).reshape(4, 6)
    a, b = values[:3, :6].astype(np.float64), values[:3, 6:].astype(np.float64)
    np.testing.assert_allclose(got[:3], a / (1 + np.exp(-a)) * b, rtol=1e-5, atol=1e-7)
    assert np.isnan(got[3]).all()


class Greedy:
    """An argmax epilogue with its buffers: `lanes` are (first row, status word, result word)."""

    def __init__(self, device: WebGpuDevice, vocab: int = 1000, rows: int = 8) -> None:
        self.device = device
        self.traced = trace_epilogue(lambda: eta.reduce_argmax(eta.intrinsics.output(0, "logits")), Model(vocab, 16))
        self.logits = np.random.default_rng(3).standard_normal((rows, vocab)).astype(np.float32)
        self.buffers = {
            "logits": device.create_buffer(self.logits.nbytes, "logits"),
            "lanes": device.create_buffer(1024, "lanes"),
            "results": device.create_buffer(256, "results"),
        }
        device.write(self.buffers["logits"], 0, self.logits.tobytes())
        self.plan = device.compile_plan([Launch(device.compile(EpilogueSpec(self.traced.program)), self.buffers)])

    async def run(self, first_rows: list[int], lane_offset: int) -> tuple[list[int], list[int]]:
        """(ids, statuses), a lane each."""
        layout = lane_layout(self.traced.program)
        table = []
        for i, row in enumerate(first_rows):
            table += layout.pack(row, 2 * i, [], [2 * i + 1], list(self.traced.params))
        self.device.write(self.buffers["lanes"], lane_offset, words(*table))
        self.plan.run(lane_offset=lane_offset, lanes=len(first_rows))
        results = np.frombuffer(await self.device.read(self.buffers["results"], 0, 8 * len(first_rows)), np.uint32).reshape(-1, 2)
        return [int(v) for v in results[:, 1]], [int(v) for v in results[:, 0]]


async def test_epilogue_lanes_at_any_offset(device: WebGpuDevice) -> None:
    greedy = Greedy(device)
    best = greedy.logits.argmax(1)
    for rows, offset in (([0, 1, 2], 0), ([5], 256), ([3, 0, 7, 6, 1], 768), ([4], 768)):
        ids, statuses = await greedy.run(rows, offset)
        assert ids == [int(best[r]) for r in rows] and statuses == [0] * len(rows)


async def test_epilogue_refuses_bad_lanes(device: WebGpuDevice) -> None:
    plan = Greedy(device).plan
    for offset, lanes, message in ((0, 0, "lanes >= 1"), (128, 1, "multiple of 256"), (-256, 1, "multiple of 256")):
        with pytest.raises(DeviceError, match=message):
            plan.run(lane_offset=offset, lanes=lanes)
    with pytest.raises(LimitError, match="do not fit the lane buffer of 1024 bytes"):
        plan.run(lane_offset=768, lanes=60)


async def test_epilogue_kernels_are_a_bounded_cache(device: WebGpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.kernels._epilogues, "most", 2)
    specs = [
        EpilogueSpec(trace_epilogue(lambda n=n: eta.reduce_argmax(eta.intrinsics.output(0, "logits")), Model(100 + n, 16)).program)
        for n in range(4)
    ]
    kernels = [device.compile(spec) for spec in specs]
    assert device.compile(specs[3]) is kernels[3]
    assert device.compile(specs[0]) is not kernels[0]
    assert len(device.kernels._epilogues) <= 2


def test_plans_are_checked(device: WebGpuDevice) -> None:
    norm = device.compile(template("rms_norm", width=4, eps=0.0, rows="tokens", bucket=1))
    buffer = device.create_buffer(64, "only")
    with pytest.raises(DeviceError, match="at least one launch"):
        device.compile_plan([])
    with pytest.raises(DeviceError, match="binding 'x'; given: step"):
        device.compile_plan([Launch(norm, {"step": buffer})])
    with pytest.raises(DeviceError, match="a grid of its own"):
        greedy = Greedy(device)
        device.compile_plan([Launch(device.compile(EpilogueSpec(greedy.traced.program)), greedy.buffers)] * 2)
    others = [device.create_buffer(64) for _ in range(3)]
    plan = device.compile_plan([Launch(norm, dict(zip(("step", "x", "weight", "out"), [buffer, *others], strict=True)))])
    with pytest.raises(DeviceError, match="belong to an epilogue plan"):
        plan.run(lanes=1)


async def test_an_injected_replayer_runs_the_plan(device: WebGpuDevice) -> None:
    """The browser's shim brings `compile_plan`; the plan must hand it every step and keep the queue's order."""
    replays: list[int] = []

    class WithReplayer:
        def __init__(self, raw: object) -> None:
            self.raw = raw

        def __getattr__(self, name: str) -> object:
            return getattr(self.raw, name)

        def compile_plan(self, steps: list[tuple[object, object, tuple[int, int, int]]]) -> object:
            def replay(encoder: Any) -> None:
                replays.append(len(steps))
                compute = encoder.begin_compute_pass()
                for pipeline, group, grid in steps:
                    compute.set_pipeline(pipeline)
                    compute.set_bind_group(0, group)
                    compute.dispatch_workgroups(*grid)
                compute.end()

            return replay

    shimmed = WebGpuDevice(device.gpu, WithReplayer(device.raw), replace(device.info), map_read=device.map_read)
    norm = shimmed.compile(template("rms_norm", width=4, eps=0.0, rows="tokens", bucket=1))
    step, x, staged, weight, out = (shimmed.create_buffer(128) for _ in range(5))
    shimmed.write(step, 0, Step([Token()]).words().tobytes())
    shimmed.write(staged, 0, np.full(4, 2, np.float32).tobytes())
    shimmed.write(weight, 0, np.arange(4, dtype=np.float32).tobytes())
    plan = shimmed.compile_plan([Launch(norm, {"step": step, "x": x, "weight": weight, "out": out})])
    shimmed.copy(staged, 0, x, 0, 16)  # recorded before the replay, so it must run before it
    plan.run()
    assert np.frombuffer(await shimmed.read(out, 0, 16), np.float32).tolist() == [0, 1, 2, 3]
    assert replays == [1]


async def test_open_says_what_really_runs() -> None:
    opened = await open_webgpu(allow_software=True)
    assert opened.info.kind == "webgpu" and opened.info.software and "llvmpipe" in opened.info.name
    assert opened.info.limits["max-storage-buffer-binding-size"] >= 128 << 20
    assert list(opened.token_buckets) == sorted(opened.token_buckets)
    opened.close()
