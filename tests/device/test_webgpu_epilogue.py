"""Epilogue plans on the webgpu device: shared scratch, lanes in several dispatches, split and fused forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pie_core.codegen import emit_epilogue_cpu, emit_epilogue_wgsl, lane_layout
from pie_core.codegen.schedule import schedule
from pie_core.codegen.wgsl_bounds import MAX_BARRIERS, MAX_TOTAL_ITERATIONS
from pie_core.device.protocol import DeviceError, EpilogueSpec, KernelError, Launch, LimitError
from pie_core.device.webgpu import WebGpuDevice
from pie_core.device.webgpu_epilogue import SPLIT_LANES
from pie_core.device.webgpu_forms import _fused, epilogue_forms
from pie_core.eta import Model, ProgramError, Traced, intrinsics, trace_epilogue
from tests.codegen.author import Chan, F, counter, greedy
from tests.codegen.batch import Answer, Batch, Lane, check, same_bits
from tests.support.lavapipe import as_gpu, lavapipe

WIDTH, ROWS, LANE_OFFSET = 700, 8, 512


def limited(size: int) -> WebGpuDevice:
    """lavapipe with bindings of at most `size` bytes."""
    device = lavapipe()
    limits = {**device.info.limits, "max-storage-buffer-binding-size": size}
    return WebGpuDevice(device.gpu, device.raw, replace(device.info, limits=limits), map_read=device.map_read)


@pytest.fixture
def device() -> Iterator[WebGpuDevice]:
    """The raw device of this process behind a WebGpuDevice with scratch of its own."""
    made = limited(1 << 20)
    yield made
    made.epilogue_scratch.close()


def traced(fn: Callable[[], Any], width: int = WIDTH, rows: int | None = None) -> Traced:
    return trace_epilogue(fn, Model(width, 16), rows)


def sorted_sample() -> Any:
    """Sorting and a running sum: some thousand words of scratch a lane."""
    values, order = F["sort_desc"](intrinsics.output(0))
    total = F["cumsum"](F["exp"](values - 10.0))
    return F["reduce_max"](total), F["gather"](order, 3)


def batch_of(result: Traced, rows: list[int], width: int = WIDTH) -> Batch:
    logits = np.random.default_rng(3).normal(0, 3, (ROWS, width)).astype(np.float32)
    return Batch(result.program, [Lane(row, result.params) for row in rows], logits)


class Run:
    """A plan over the buffers of a batch."""

    def __init__(self, device: WebGpuDevice, batch: Batch) -> None:
        self.device, self.batch = device, batch
        self.kernel = device.compile(EpilogueSpec(batch.program))
        arrays = {"logits": batch.logits, "arena": batch.arena, "results": batch.results}
        self.buffers = {name: device.create_buffer(array.nbytes, name) for name, array in arrays.items() if array is not None}
        self.buffers["lanes"] = device.create_buffer(LANE_OFFSET + batch.table.nbytes, "lanes")
        for name, array in arrays.items():
            if array is not None:
                device.write(self.buffers[name], 0, array.tobytes())
        device.write(self.buffers["lanes"], LANE_OFFSET, batch.table.tobytes())
        self.plan = device.compile_plan([Launch(self.kernel, self.buffers)])

    async def answers(self) -> list[Answer]:
        self.plan.run(lane_offset=LANE_OFFSET, lanes=len(self.batch.lanes))
        results = await self.device.read(self.buffers["results"], 0, self.batch.results.nbytes)
        return self.batch.answers(self.batch.arena, np.frombuffer(results, np.uint32))

    @property
    def scratch(self) -> int:
        """Bytes of a lane."""
        assert self.kernel.fused is not None
        return self.kernel.fused.scratch_bytes


async def test_scratch_is_shared_grows_and_is_freed(device: WebGpuDevice) -> None:
    plain = Run(device, batch_of(traced(greedy), [0, 1]))
    check(await plain.answers(), plain.batch.oracle())
    assert (plain.scratch, device.epilogue_scratch.size) == (0, 0)
    one, many = (Run(device, batch_of(traced(sorted_sample), rows)) for rows in ([2], [0, 1, 2, 3, 4]))
    sizes = []
    for run in (one, many, one, many):
        check(await run.answers(), run.batch.oracle(), 1e-5, 1e-5)
        sizes.append(device.epilogue_scratch.size)
    assert one.scratch <= sizes[0] < 5 * one.scratch <= sizes[1] == sizes[2] == sizes[3]
    device.epilogue_scratch.close()
    assert device.epilogue_scratch.size == 0
    check(await many.answers(), many.batch.oracle(), 1e-5, 1e-5)


def with_outputs(count: int) -> Callable[[], Any]:
    """The sampler with as many outputs: the lane's length decides which lanes lie at aligned offsets."""
    return lambda: (list(sorted_sample()) * count)[:count]


@pytest.mark.parametrize(("outputs", "lane_words", "lanes"), [(2, 6, 8), (28, 32, 7), (60, 64, 5), (2, 6, 1)])
async def test_lanes_beyond_the_scratch_run_in_several_dispatches(outputs: int, lane_words: int, lanes: int) -> None:
    """Three lanes fit: offsets of the next ones are aligned for lanes of 64 words, of every second for 32, else lanes are copied first."""
    result = traced(with_outputs(outputs))
    assert lane_layout(result.program).words == lane_words
    batch = batch_of(result, [i % ROWS for i in range(lanes)])
    need = Run(limited(1 << 20), batch).scratch
    device = limited(3 * need + 100)
    run = Run(device, batch)
    for _ in range(2):
        check(await run.answers(), batch.oracle(), 1e-5, 1e-5)
    assert device.epilogue_scratch.buffer is not None and device.epilogue_scratch.buffer.size <= 3 * need + 100
    device.epilogue_scratch.close()


def test_a_lane_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(LimitError, match=r"needs \d+ bytes of scratch, the device binds at most 4096"):
        limited(4096).compile(EpilogueSpec(traced(sorted_sample).program))


async def test_a_gpu_splits_few_long_lanes_and_the_bits_are_the_same() -> None:
    width = 20_000

    def sample() -> Any:
        p = F["softmax"](intrinsics.output(0) / 3.0)
        keep = F["pivot_threshold"](p, mass=0.7)
        return F["reduce_sum"](F["select"](keep, p, 0.0)), F["reduce_argmax"](p), F["reduce_sum"](keep.cast("u32"))

    result = traced(sample, width)
    rows = [3, 1, 0, 2, 5, 4, 7, 6][: SPLIT_LANES + 2]
    many, alone = (Run(as_gpu(), batch_of(result, r, width)) for r in (rows, rows[:1]))
    kernel = many.kernel
    assert kernel.fused is not None and len(kernel.fused.steps) == 1 and kernel.fused.steps[0][1] == (0, 1, 1)
    assert kernel.split is not None and [grid for _, grid in kernel.split.steps][-1] == (1, 0, 1)
    assert kernel.form(split=True) is kernel.split
    together, single = await many.answers(), await alone.answers()
    check(together, many.batch.oracle(), 1e-5, 1e-5)
    assert same_bits(together[0], single[0]), "a lane alone runs split, in a batch fused"
    as_gpu().epilogue_scratch.close()


def test_software_and_short_rows_stay_fused() -> None:
    assert as_gpu().compile(EpilogueSpec(traced(greedy, 1000).program)).split is None
    software = lavapipe().compile(EpilogueSpec(traced(greedy, 20_000).program))
    assert software.split is None and software.form(split=True) is software.fused


def test_a_kernel_over_the_iteration_bound_gets_a_larger_workgroup() -> None:
    def sorts() -> Any:
        order = F["sort_desc"](intrinsics.output(0))[1]
        for _ in range(2):
            order = F["sort_desc"](order)[1]
        return order

    program = traced(sorts, 49_152).program
    with pytest.raises(ProgramError, match="loop iterations"):
        emit_epilogue_wgsl(program, 32)
    assert [fused.workgroup for size in (32, 64, 256) if (fused := _fused(schedule(program), size, 1))] == [64, 64, 256]
    huge = traced(lambda: F["sort_desc"](intrinsics.output(0)), 1 << 20).program
    with pytest.raises(KernelError, match="loop iterations an invocation, the bound is 60000"):
        lavapipe().compile(EpilogueSpec(huge))


def logits() -> Any:
    return intrinsics.outputs("logits")


def sorted_rows(x: Any) -> Any:
    values, order = F["sort_desc"](x)
    return F["reduce_max"](F["cumsum"](values)), F["gather_row"](order, F["broadcast"](F["iota"](1), order.shape[:1]))


# Each has more iterations than one launch may run: (author's code, width, read-outs).
LONG: dict[str, tuple[Callable[[], Any], int, int | None]] = {
    "top_p of 32 rows": (lambda: F["reduce_argmax"](F["masked"](logits(), F["top_p"](logits(), 0.9))), 49_152, 32),
    "sample of 16 rows": (lambda: F["sample"](logits(), Chan("u32", (2,)).take(), top_k=40, top_p=0.9, min_p=0.05), 49_152, 16),
    "sort_desc of 16 rows": (lambda: sorted_rows(logits()), 49_152, 16),
    "sort_desc of short rows": (lambda: sorted_rows(Chan("f32", (64, 768)).take()), WIDTH, None),
    "top_k of rows": (lambda: F["top_k"](logits(), 300), 49_152, 32),
}


@pytest.mark.parametrize("name", LONG)
async def test_what_one_launch_has_no_room_for_runs_in_several(name: str) -> None:
    fn, width, rows = LONG[name]
    result = traced(fn, width, rows)
    rng = np.random.default_rng(5)
    x = rng.normal(0, 3, (rows, width)).astype(np.float32) if rows else None
    emit_epilogue_cpu(result.program)  # which the cpu device takes too
    shapes = [(c.dtype, c.shape) for c in result.program.chans]
    cells = {k: np.array([7, 3], np.uint32) if t == "u32" else rng.normal(0, 3, s).astype(np.float32) for k, (t, s) in enumerate(shapes)}
    run = Run(lavapipe(), Batch(result.program, [Lane(0, result.params, cells)], x))
    assert run.kernel.fused is not None and len(run.kernel.fused.steps) > 2
    assert run.kernel.split is run.kernel.fused
    check(await run.answers(), run.batch.oracle(), 1e-3, 1e-3)
    lavapipe().epilogue_scratch.close()


def test_all_samplers_in_one_epilogue_stay_within_the_bounds_of_code_and_time() -> None:
    def everything() -> Any:
        ids, state = Chan("i32", (64,)).take(), counter().take()
        x, counts = intrinsics.output(0), F["token_counts"](ids, 49_152)
        x = F["frequency_penalty"](F["presence_penalty"](F["repetition_penalty"](x, counts, 1.1), counts, 0.2), counts, 0.1)
        x = F["dynamic_temperature"](F["dry"](x, ids, 0.8, 1.75, 2), 0.5, 1.5)
        keep = F["top_k_mask"](x, 40) & F["top_p"](x, 0.9) & F["typical"](x, 0.95) & F["tail_free"](x, 0.9) & F["min_p"](x, 0.05)
        x = F["masked"](x, keep & F["top_a"](x, 0.1) & F["eta_cutoff"](x, 1e-3) & F["epsilon_cutoff"](x, 1e-4))
        return F["mirostat"](F["masked"](x, F["xtc"](x, 0.1, 0.5, state)), Chan("f32", ()).take(), state)

    program = traced(everything, 49_152).program
    for kind in ("software", "gpu"):
        made = epilogue_forms(program, kind)  # type: ignore[arg-type]
        for form in (made.fused, made.split):
            assert sum(k.barriers for k in form) < MAX_BARRIERS and sum(k.iterations for k in form) < MAX_TOTAL_ITERATIONS / 10


def short_sorts(x: Any) -> list[Any]:
    return [F["reduce_max"](F["sort_desc"](x * float(k))[0]) for k in range(2, 8)]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "iterations": (lambda: short_sorts(Chan("f32", (64, 768)).take()), r"\d+ or more loop iterations .* is 500000"),
    "code": (
        lambda: [F["reduce_max"](F["sort_desc"](intrinsics.output(0) * float(k))[0]) for k in range(2, 40)],
        r"\d+ or more barriers .* is 100",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_drivers_too_long_is_refused_with_what_to_split(name: str) -> None:
    fn, message = REFUSED[name]
    program = traced(fn, 20_000).program
    with pytest.raises(KernelError, match=f"{message}.*split it over several passes"):
        lavapipe().compile(EpilogueSpec(program))


def test_work_of_a_software_adapter_is_bounded_as_on_cpu() -> None:
    def sines() -> Any:
        x = F["broadcast"](intrinsics.output(0), (WIDTH, 5_000))
        for _ in range(100):
            x = F["sin"](x)
        return F["reduce_max"](F["reduce_max"](x))

    program = traced(sines).program
    with pytest.raises(KernelError, match=r"would take some \d+ ms or more on this webgpu device, the bound is 400 ms"):
        lavapipe().compile(EpilogueSpec(program))
    assert 0 < epilogue_forms(program, "gpu").work < 10**8


def test_one_dependent_reduction_is_two_launches_on_a_gpu() -> None:
    kernel = as_gpu().compile(EpilogueSpec(traced(greedy, 49_152).program))
    assert kernel.split is not None and [grid for _, grid in kernel.split.steps] == [(32, 0, 1), (1, 0, 1)]


def test_a_kernel_that_is_no_epilogue_has_no_form() -> None:
    from pie_core.device.templates import template

    norm = lavapipe().compile(template("rms_norm", width=4, eps=0.0, rows="tokens", bucket=1))
    with pytest.raises(DeviceError, match="is no epilogue"):
        norm.form(split=False)


def test_scratch_is_not_the_callers_to_bind(device: WebGpuDevice) -> None:
    run = Run(device, batch_of(traced(sorted_sample), [0]))
    assert "scratch" in dict(run.kernel.bindings) and run.kernel.buffers == ("logits", "lanes", "results")
