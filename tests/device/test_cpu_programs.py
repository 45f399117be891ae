"""Epilogue and map programs on the cpu device: bindings, lanes, offsets, against the NumPy oracle."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from pie_core.codegen import lane_layout, oracle
from pie_core.device.cpu import CpuBuffer, CpuDevice
from pie_core.device.protocol import NONE, DeviceOutOfMemory, EpilogueSpec, KernelError, Launch, LimitError, MapSpec, Plan
from pie_core.eta import FUNCTIONS, intrinsics, reduce_argmax, reduce_max
from pie_core.eta.dtypes import f32_bits
from pie_core.eta.program import Node, Program
from pie_core.eta.tensor import Tensor
from pie_core.eta.trace import Model
from pie_core.eta.tracing import trace_epilogue
from pie_server.adapters.cpu_module import WasmtimeCpuModule, open_cpu_device
from pie_server.build.cpu_module import cpu_module
from tests.device.oracles import Step, Token

VOCAB, HIDDEN = 1500, 32  # not a multiple of a chunk


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


def put(device: CpuDevice, array: np.ndarray) -> CpuBuffer:
    """A buffer with this content."""
    buffer = device.create_buffer(array.nbytes, "test")
    device.write(buffer, 0, np.ascontiguousarray(array).tobytes())
    return buffer


def program(read_hidden: bool = False) -> Program:
    """argmax of logits, and the largest value of a read-out."""

    def best() -> tuple[Tensor, Tensor]:
        logits = intrinsics.output(0, "logits")
        return reduce_argmax(logits), reduce_max(intrinsics.output(0, "hidden") if read_hidden else logits)

    return trace_epilogue(best, Model(VOCAB, HIDDEN)).program


async def run(device: CpuDevice, p: Program, logits: np.ndarray, hidden: np.ndarray, rows: list[int]) -> np.ndarray:
    """Results [lane, (status, argmax, max)] of one lane a row, the lane table behind 256 bytes of something else."""
    words = [w for i, row in enumerate(rows) for w in lane_layout(p).pack(row, 3 * i, [], [3 * i + 1, 3 * i + 2], [])]
    lanes = put(device, np.array([NONE] * 64 + words, np.uint32))
    results = device.create_buffer(12 * len(rows))
    bindings = {"logits": put(device, logits), "arena": device.create_buffer(64), "lanes": lanes, "results": results}
    if p.width("hidden"):
        bindings["hidden"] = put(device, hidden)
    plan = device.compile_plan([Launch(device.compile(EpilogueSpec(p)), bindings)])
    plan.run(lane_offset=256, lanes=len(rows))
    return np.frombuffer(await device.read(results, 0, results.size), np.uint32).reshape(-1, 3)


@pytest.mark.parametrize("read_hidden", [False, True])
async def test_epilogue_lanes_equal_the_oracle_and_their_solo_runs(device: CpuDevice, read_hidden: bool) -> None:
    rng = np.random.default_rng(0)
    logits, hidden = rng.standard_normal((5, VOCAB)).astype(np.float32), rng.standard_normal((5, HIDDEN)).astype(np.float32)
    logits[3, 700] = np.nan
    p, rows = program(read_hidden), [4, 0, 3, 0, 2]
    got = await run(device, p, logits, hidden, rows)
    for lane, row in enumerate(rows):
        (token, top), _, status = oracle.run_epilogue(p, [], logits, hidden, row, {})
        want = [status, int(token), int(np.float32(top).view(np.uint32))]
        assert got[lane].tolist() == want
        assert (await run(device, p, logits, hidden, [row]))[0].tolist() == want
    assert got[2, 0] == 1, "a NaN row is reported in its own lane"


async def test_epilogue_plans_check_lanes_and_bindings(device: CpuDevice) -> None:
    p = program()
    kernel = device.compile(EpilogueSpec(p))
    assert device.compile(EpilogueSpec(Program.parse(p.text))) is kernel
    sizes = {"logits": 4 * VOCAB, "arena": 64, "lanes": 512, "results": 64}
    bindings = {name: device.create_buffer(n, name) for name, n in sizes.items()}
    plan = device.compile_plan([Launch(kernel, bindings)])
    fit = 256 // (4 * lane_layout(p).words)
    for offset, lanes in ((0, 0), (4, 1), (-256, 1), (512, 1), (256, fit + 1)):
        with pytest.raises(LimitError, match=r"lanes"):
            plan.run(lane_offset=offset, lanes=lanes)
    plan.run(lane_offset=256, lanes=fit)
    with pytest.raises(LimitError, match="logits"):
        device.compile_plan([Launch(kernel, {**bindings, "logits": device.create_buffer(4 * VOCAB - 4, "logits")})])
    with pytest.raises(KernelError, match="binds logits, arena, lanes, results"):
        device.compile_plan([Launch(kernel, {**bindings, "hidden": bindings["arena"]})])
    assert len(await device.read(bindings["results"], 0, 4)) == 4


def gate() -> Program:
    """in0 * in1 + in0, elementwise."""
    n = (96,)
    ops = [Node("input", (), {"index": 0}, "f32", n), Node("input", (), {"index": 1}, "f32", n)]
    ops += [Node("mul", (0, 1), {}, "f32", n), Node("add", (2, 0), {}, "f32", n)]
    return Program("map", ops, [3]).verify()


@pytest.mark.parametrize("rows", ["tokens", "reads"])
@pytest.mark.parametrize("count", [1, 3, 8])
async def test_map_strides_offsets_and_padding(device: CpuDevice, rows: str, count: int) -> None:
    n, bucket = 96, 8
    joined = np.random.default_rng(count).standard_normal((bucket, 200)).astype(np.float32)
    joined[count:] = np.nan
    step = Step([Token(pos=i) for i in range(count)]) if rows == "tokens" else Step([Token()], tuple([0] * count))
    spec = MapSpec(gate(), n, ((200, 1), (200, 103)), rows, bucket)  # type: ignore[arg-type]
    source, out = put(device, joined), put(device, np.full((bucket, n), 7, np.float32))
    bindings = {"step": put(device, step.words()), "in0": source, "in1": source, "out": out}
    device.compile_plan([Launch(device.compile(spec), bindings)] * 2).run()
    got = np.frombuffer(await device.read(out, 0, out.size), np.float32).reshape(bucket, n)
    a, b = joined[:count, 1:97], joined[:count, 103:199]
    np.testing.assert_array_equal(got[:count], a * b + a)
    assert (got[count:] == 7).all()


BAD_MAPS = [
    ((0, ((96, 0), (96, 0)), "tokens", 8), "n=0"),
    ((96, ((96, 0), (96, 0)), "tokens", 0), "bucket=0"),
    ((96, ((96, 0), (96, 0)), "pages", 8), "rows='pages'"),
    ((96, ((96, 0), (96, 1)), "tokens", 8), "input 1: 96 elements at offset 1 leave its rows of 96"),
    ((96, ((96, -1), (96, 0)), "tokens", 8), "input 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_MAPS)
def test_map_specs_are_checked(device: CpuDevice, arguments: tuple, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        device.compile(MapSpec(gate(), *arguments))


def test_stages_are_not_mixed_up(device: CpuDevice) -> None:
    with pytest.raises(KernelError, match="stage is 'map'"):
        device.compile(EpilogueSpec(gate()))
    with pytest.raises(KernelError, match="stage is 'epilogue'"):
        device.compile(MapSpec(program(), 96, ((96, 0),), "tokens", 8))


def test_map_bindings_are_checked(device: CpuDevice) -> None:
    kernel = device.compile(MapSpec(gate(), 96, ((96, 0), (200, 104)), "tokens", 8))
    sizes = {"step": 64, "in0": 4 * 8 * 96, "in1": 4 * 8 * 200, "out": 4 * 8 * 96}
    device.compile_plan([Launch(kernel, {k: device.create_buffer(n, k) for k, n in sizes.items()})])
    for name in sizes:
        bindings = {k: device.create_buffer(n - 4 * (k == name), k) for k, n in sizes.items()}
        with pytest.raises(LimitError, match=f"binding {name} "):
            device.compile_plan([Launch(kernel, bindings)])


async def test_kernel_memory_is_given_back(device: CpuDevice) -> None:
    used = device.used_bytes
    kernel = device.compile(MapSpec(gate(), 96, ((97, 0), (97, 1)), "tokens", 3))
    assert device.used_bytes > used
    del kernel
    assert device.used_bytes == used


def selection(k: int, n: int = VOCAB) -> Program:
    """Indices of the top k, and how many tokens are as likely as p = 0.9 of the mass."""

    def fn() -> tuple[Tensor, Tensor]:
        logits = intrinsics.output(0)
        keep = FUNCTIONS["pivot_threshold"](FUNCTIONS["softmax"](logits), mass=0.9)
        return FUNCTIONS["top_k"](logits, k)[1], FUNCTIONS["reduce_sum"](keep.cast("u32"))

    return trace_epilogue(fn, Model(n, HIDDEN)).program


def selection_plan(device: CpuDevice, p: Program, logits: np.ndarray, rows: list[int]) -> tuple[Plan, CpuBuffer, int]:
    """A plan over lanes of one row each, its results, and the words of a lane's results."""
    layout = lane_layout(p)
    size = layout.results_words
    params = trace_params(p)
    words = [
        w for i, r in enumerate(rows) for w in layout.pack(r, size * i, [], [size * i + 1, size * i + 1 + layout.out_sizes[0]], params)
    ]
    lanes = put(device, np.array(words, np.uint32))
    results = device.create_buffer(4 * size * len(rows), "results")
    bindings = {"logits": put(device, logits), "arena": device.create_buffer(64), "lanes": lanes, "results": results}
    return device.compile_plan([Launch(device.compile(EpilogueSpec(p)), bindings)]), results, size


def trace_params(p: Program) -> list[int]:
    """The one lifted constant of `selection`, 0.9."""
    assert p.params == ("f32",)
    return [f32_bits(0.9)]


async def test_plans_share_scratch_that_grows(device: CpuDevice) -> None:
    """A small program, then one with far more scratch, then the small one again: each alone and as a batch of lanes equals the oracle."""
    logits = np.random.default_rng(1).normal(0, 3, (3, VOCAB)).astype(np.float32)
    rows = [2, 0, 1, 0]
    plans = [(p, *selection_plan(device, p, logits, rows)) for p in (selection(7), selection(1200), selection(2))]
    for p, plan, results, size in [*plans, *plans[::-1]]:
        plan.run(lanes=len(rows))
        got = np.frombuffer(await device.read(results, 0, results.size), np.uint32).reshape(len(rows), size)
        for lane, row in enumerate(rows):
            (best, kept), _, status = oracle.run_epilogue(p, trace_params(p), logits, None, row, {})
            assert got[lane].tolist() == [status, *best.tolist(), int(kept)]


async def test_scratch_beyond_memory_refuses_that_program_only() -> None:
    """The numbers are named, nothing leaks, and plans made before still run on the scratch they had."""
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    limit = 4 << 20
    device = CpuDevice(module, limit)
    logits = np.random.default_rng(2).normal(0, 3, (1, VOCAB)).astype(np.float32)
    small = selection(5)
    plan, results, _ = selection_plan(device, small, logits, [0])
    used = device.used_bytes
    wide = trace_epilogue(lambda: FUNCTIONS["sort_desc"](FUNCTIONS["iota"](1 << 18))[1], Model(VOCAB, HIDDEN)).program
    kernel = device.compile(EpilogueSpec(wide))
    bindings = {name: device.create_buffer(64, name) for name in ("arena", "lanes", "results")}
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match=r"buffer 'scratch' needs \d+ bytes"):
            device.compile_plan([Launch(kernel, bindings)])
    del kernel
    for buffer in bindings.values():
        buffer.destroy()
    gc.collect()
    assert device.used_bytes == used
    plan.run(lanes=1)
    got = np.frombuffer(await device.read(results, 0, results.size), np.uint32)
    (best, kept), _, status = oracle.run_epilogue(small, trace_params(small), logits, None, 0, {})
    assert got.tolist() == [status, *best.tolist(), int(kept)]
    device.close()


def test_too_much_work_is_a_kernel_error(device: CpuDevice) -> None:
    def fn() -> Tensor:
        a = FUNCTIONS["reshape"](FUNCTIONS["iota"](1400 * 1400).cast("f32"), (1400, 1400))
        return reduce_max(FUNCTIONS["reshape"](FUNCTIONS["matmul"](a, a), 1400 * 1400))

    with pytest.raises(KernelError, match=r"epilogue [0-9a-f]{12}: a pass of the program would take some \d+ ms or more on the cpu device"):
        device.compile(EpilogueSpec(trace_epilogue(fn, Model(VOCAB, HIDDEN)).program))
