"""The cpu device around its kernels: memory, order, plans, uploads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pie_core.device import selftest
from pie_core.device.cpu import MEMORY_LIMIT, CpuDevice
from pie_core.device.cpu_memory import Allocator
from pie_core.device.protocol import (
    DeviceError,
    DeviceOutOfMemory,
    KernelError,
    Launch,
    LimitError,
    ParamValue,
    TemplateSpec,
)
from pie_core.device.templates import template
from pie_server.adapters.cpu_module import COPIED_WRITE_BYTES, WasmtimeCpuModule, open_cpu_device
from pie_server.build.cpu_module import cpu_module
from tests.device import oracles
from tests.device.cpu_support import NORM, norm
from tests.device.oracles import Step, Token


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


async def test_passes_the_self_test(device: CpuDevice) -> None:
    assert await selftest.self_test(device) is None  # type: ignore[func-returns-value]


class Swapped:
    """The device, whose `name` is compiled as the template `other`."""

    def __init__(self, device: CpuDevice, name: str, other: str) -> None:
        self.device, self.name, self.other = device, name, other

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def compile(self, spec: TemplateSpec) -> Any:
        return self.device.compile(template(self.other, **dict(spec.params)) if spec.name == self.name else spec)


@pytest.mark.parametrize(("name", "other"), [("shift", "gate"), ("gate", "shift")])
async def test_the_self_test_names_a_wrong_kernel_of_tables(device: CpuDevice, name: str, other: str) -> None:
    wrong: Any = Swapped(device, name, other)
    with pytest.raises(DeviceError, match=f"self-test: kernel {name} is wrong on cpu device 'cpu'.*use another device"):
        await selftest.self_test(wrong)


async def test_says_what_it_is(device: CpuDevice) -> None:
    assert (device.info.kind, device.info.software) == ("cpu", False)
    assert "wasmtime" in device.info.description and "int16" in device.info.description
    assert device.info.limits["memory_bytes"] == MEMORY_LIMIT
    assert list(device.token_buckets) == sorted(device.token_buckets)


# Memory


def test_allocator_reuses_merges_and_aligns() -> None:
    memory = Allocator(100, 100 + 64 * 10)
    a, b, c = (memory.allocate(n, "x") for n in (1, 65, 64))
    assert (a, b, c) == (128, 192, 320)
    memory.free(b)
    assert memory.allocate(64, "first fit") == 192
    memory.free(192)
    memory.free(a)
    assert memory.allocate(192, "merged") == 128
    memory.free(128)
    memory.free(c)
    assert memory.used == 0 and memory.allocate(64 * 9, "all of it") == 128


@pytest.mark.parametrize("seed", range(3))
def test_allocator_never_overlaps_and_returns_to_empty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory, held = Allocator(64, 1 << 16), {}
    for _ in range(400):
        if held and rng.random() < 0.5:
            address = int(rng.choice(list(held)))
            memory.free(address)
            del held[address]
        else:
            size = int(rng.integers(1, 2000))
            try:
                address = memory.allocate(size, "x")
            except DeviceOutOfMemory:
                continue
            assert address % 64 == 0 and address + size <= 1 << 16
            assert all(address + size <= other or other + n <= address for other, n in held.items())
            held[address] = size
    for address in held:
        memory.free(address)
    assert memory.used == 0 and memory.allocate((1 << 16) - 64, "all") == 64


def test_allocation_over_the_limit_names_the_numbers(device: CpuDevice) -> None:
    device.create_buffer(3 << 20, "weights")
    with pytest.raises(DeviceOutOfMemory, match=r"'kv' needs 4294901760 bytes.*bytes free"):
        device.create_buffer(MEMORY_LIMIT, "kv")
    with pytest.raises(LimitError, match="size is 0 bytes"):
        device.create_buffer(0, "nothing")


async def test_memory_limit_is_kept_and_destroy_really_frees() -> None:
    device = open_cpu_device(memory_limit=32 << 20)
    for _ in range(20):  # 400 MB in all
        buffer = device.create_buffer(20 << 20, "big")
        with pytest.raises(DeviceOutOfMemory):
            device.create_buffer(20 << 20, "one too many")
        device.write(buffer, (20 << 20) - 4, b"abcd")
        assert await device.read(buffer, (20 << 20) - 4, 4) == b"abcd"
        buffer.destroy()
        buffer.destroy()
    assert device.used_bytes == 0
    device.close()


@pytest.mark.parametrize("limit", [0, 1000, MEMORY_LIMIT + 1])
def test_memory_limit_out_of_range(limit: int) -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    with pytest.raises(LimitError, match="memory_limit"):
        CpuDevice(module, limit)
    module.close()


async def test_memory_near_four_gibibytes(device: CpuDevice) -> None:
    """Addresses beyond 2^31 go through every kind of call (the pages in between stay untouched)."""
    device.create_buffer(3 << 30, "a hole")
    high, other = device.create_buffer(64, "high"), device.create_buffer(64, "other")
    assert high.address > 1 << 31
    device.write(high, 0, bytes(range(64)))
    device.copy(high, 0, other, 32, 32)
    assert await device.read(other, 0, 64) == bytes(32) + bytes(range(32))


async def test_buffers_are_zeroed_also_when_reused(device: CpuDevice) -> None:
    first = device.create_buffer(1000, "a")
    device.write(first, 0, b"\xff" * 1000)
    address = first.address
    first.destroy()
    second = device.create_buffer(5000, "b")
    assert second.address == address
    assert await device.read(second, 0, 5000) == bytes(5000)


# Order


async def test_reads_see_what_was_enqueued_before_them_and_nothing_later(device: CpuDevice) -> None:
    a, b = device.create_buffer(4, "a"), device.create_buffer(4, "b")
    reads: list[Any] = []
    for i in range(50):
        device.write(a, 0, i.to_bytes(4, "little"))
        device.copy(a, 0, b, 0, 4)
        reads.append(device.read(b, 0, 4))
    device.write(a, 0, b"\xff" * 4)
    device.copy(a, 0, b, 0, 4)
    assert [int.from_bytes(await r, "little") for r in reads] == list(range(50))


@pytest.mark.parametrize("size", [4, COPIED_WRITE_BYTES, COPIED_WRITE_BYTES + 4, 1 << 22])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_written_data_may_change_afterwards(device: CpuDevice, kind: type, size: int) -> None:
    source = bytearray(os.urandom(size))
    kept = bytes(source)
    buffer = device.create_buffer(size + 8, "x")
    device.write(buffer, 8, memoryview(source).cast("I") if kind is memoryview else kind(source))
    source[:] = bytes(size)
    assert await device.read(buffer, 8, size) == kept


async def test_copies_may_overlap(device: CpuDevice) -> None:
    buffer = device.create_buffer(64, "x")
    device.write(buffer, 0, bytes(range(64)))
    device.copy(buffer, 0, buffer, 8, 32)
    assert (await device.read(buffer, 0, 64))[8:40] == bytes(range(32))


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 65), (61, 4), (64, 1)])
async def test_ranges_are_checked(device: CpuDevice, offset: int, size: int) -> None:
    buffer, other = device.create_buffer(64, "small"), device.create_buffer(256, "other")
    for act in (
        lambda: device.write(buffer, offset, bytes(size)),
        lambda: device.read(buffer, offset, size),
        lambda: device.copy(buffer, offset, other, 0, size),
        lambda: device.copy(other, 0, buffer, offset, size),
    ):
        with pytest.raises(LimitError, match=rf"{size} bytes at {offset} leaves buffer 'small' of 64 bytes"):
            act()
    assert await device.read(buffer, 0, 0) == b""


# Plans


BAD_SPECS: list[tuple[str, dict[str, ParamValue], str]] = [
    ("linear", {"fmt": "q9_9"}, "fmt is 'q9_9'"),
    ("linear", {"k": 33}, "k is 33"),
    ("linear", {"m": 0}, "m is 0"),
    ("linear", {"m": True}, "m is True"),
    ("linear", {"add": "yes"}, "add is 'yes'"),
    ("linear", {"rows": "all"}, "rows is 'all'"),
    ("linear", {"bucket": 1 << 20}, "bucket is"),
    ("embed", {"width": 33}, "width is 33"),
    ("rms_norm", {"eps": "small"}, "eps is 'small'"),
    ("rope_append", {"style": "spiral"}, "style is 'spiral'"),
    ("rope_append", {"head_dim": 6}, "head_dim is 6"),
    ("attention", {"heads": 5}, "not a multiple of kv_heads"),
    ("attention", {"head_dim": 516}, "head_dim is 516"),
]
GOOD: dict[str, dict[str, ParamValue]] = {
    "linear": {"fmt": "q4_1", "m": 8, "k": 32, "add": False, "rows": "tokens", "bucket": 2},
    "embed": {"fmt": "q8_0", "vocab": 8, "width": 32, "bucket": 2},
    "rms_norm": {"width": 8, "eps": 1e-5, "rows": "tokens", "bucket": 2},
    "rope_append": {"heads": 4, "kv_heads": 2, "head_dim": 8, "style": "half", "bucket": 2},
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 8, "scale": 1.0, "bucket": 2},
}


@pytest.mark.parametrize(("name", "change", "message"), BAD_SPECS)
def test_specs_are_checked(device: CpuDevice, name: str, change: dict[str, ParamValue], message: str) -> None:
    device.compile(template(name, **GOOD[name]))
    with pytest.raises(KernelError, match=message):
        device.compile(template(name, **{**GOOD[name], **change}))


def test_unknown_specs(device: CpuDevice) -> None:
    for spec in (TemplateSpec("conv"), TemplateSpec("linear", (("fmt", "f32"),)), "linear"):
        with pytest.raises(KernelError):
            device.compile(spec)  # type: ignore[arg-type]


def test_kernels_are_cached_while_somebody_holds_them(device: CpuDevice) -> None:
    kernel = device.compile(template("rms_norm", **NORM))
    assert device.compile(template("rms_norm", **NORM)) is kernel


@pytest.mark.parametrize("name", ["step", "x", "weight", "out"])
def test_a_binding_that_is_too_small_is_an_error_of_the_plan(device: CpuDevice, name: str) -> None:
    kernel = device.compile(template("rms_norm", **NORM))
    device.compile_plan([Launch(kernel, norm(device))])
    with pytest.raises(LimitError, match=f"binding {name} .* has 28 bytes"):
        device.compile_plan([Launch(kernel, norm(device, **{name: 28}))])


def test_caches_need_a_page(device: CpuDevice) -> None:
    sizes = {"step": 512, "q": 256, "k_cache": 1024, "v_cache": 1023, "out": 256}
    bindings = {name: device.create_buffer(n, name) for name, n in sizes.items()}
    with pytest.raises(LimitError, match="v_cache"):
        device.compile_plan([Launch(device.compile(template("attention", **GOOD["attention"])), bindings)])


def test_binding_names_and_owners_are_checked(device: CpuDevice) -> None:
    kernel, bindings = device.compile(template("rms_norm", **NORM)), norm(device)
    with pytest.raises(KernelError, match="binds step, x, weight, out; got step, x"):
        device.compile_plan([Launch(kernel, {name: bindings[name] for name in ("step", "x")})])
    other = open_cpu_device()
    with pytest.raises(DeviceError, match="another device"):
        other.compile_plan([Launch(kernel, bindings)])
    other.close()
    with pytest.raises(KernelError, match="did not compile"):
        device.compile_plan([Launch("kernel", bindings)])  # type: ignore[arg-type]


async def test_plans_give_their_memory_back(device: CpuDevice) -> None:
    kernel, bindings = device.compile(template("rms_norm", **NORM)), norm(device)
    used = device.used_bytes
    for _ in range(3):
        plan = device.compile_plan([Launch(kernel, bindings)] * 100)
        assert device.used_bytes > used
        plan.run()
        del plan
        gc.collect()
        assert device.used_bytes == used


async def test_an_empty_plan_runs(device: CpuDevice) -> None:
    device.compile_plan([]).run()
    assert await device.read(device.create_buffer(4), 0, 4) == bytes(4)


def test_a_plan_is_dead_once_its_buffer_is_destroyed(device: CpuDevice) -> None:
    bindings = norm(device)
    plan = device.compile_plan([Launch(device.compile(template("rms_norm", **NORM)), bindings)])
    bindings["x"].destroy()
    for act in (plan.run, lambda: device.write(bindings["x"], 0, b"")):
        with pytest.raises(DeviceError, match="'x' was destroyed"):
            act()


def test_lanes_belong_to_epilogues(device: CpuDevice) -> None:
    plan = device.compile_plan([Launch(device.compile(template("rms_norm", **NORM)), norm(device))])
    with pytest.raises(LimitError, match="no epilogue"):
        plan.run(lanes=1)


# Uploads


@pytest.mark.parametrize("fmt", ["f32", "f16", "q4_1", "q8_0"])
async def test_upload_takes_any_chunks_and_a_buffer_that_is_used_again(device: CpuDevice, fmt: str) -> None:
    rows, cols = 3001, 1056  # several stagings, a last group of one row
    raw = oracles.raw_weight(np.random.default_rng(3), fmt, rows, cols)
    row_bytes = len(raw.data) // rows

    def chunks() -> Iterator[memoryview]:
        reused = bytearray(1700 * row_bytes)
        first = 0
        for count in (1, 2, 1700, 0, 1298):
            part = raw.data[first * row_bytes : (first + count) * row_bytes]
            reused[: len(part)] = part
            yield memoryview(reused)[: len(part)]
            first += count

    weight = device.upload(fmt, rows, cols, chunks(), "w")
    assert (weight.rows, weight.cols, weight.fmt) == (rows, cols, fmt)
    chosen = [0, 1, 2, 3, 4, 1702, 1703, 2999, 3000]
    step = device.create_buffer(4 * 256, "step")
    device.write(step, 0, Step([Token(r) for r in chosen]).words().tobytes())
    out = device.create_buffer(4 * 9 * cols, "out")
    bindings = {"step": step, "arena": device.create_buffer(4), "quants": weight.quants, "out": out}
    bindings["scales"] = weight.scales or weight.quants
    kernel = device.compile(template("embed", fmt=fmt, vocab=rows, width=cols, bucket=9))
    device.compile_plan([Launch(kernel, bindings)]).run()  # type: ignore[dict-item]
    got = np.frombuffer(await device.read(out, 0, out.size), np.float32).reshape(9, cols)
    np.testing.assert_array_equal(got, raw.matrix[chosen].astype(np.float32))


def test_weights_stay_quantised(device: CpuDevice) -> None:
    for fmt, bits in (("q4_1", 6), ("q8_0", 9)):
        raw = oracles.raw_weight(np.random.default_rng(3), fmt, 64, 576)
        assert device.upload(fmt, 64, 576, [memoryview(raw.data)]).nbytes == 64 * 576 * bits // 8


BAD_UPLOADS: list[tuple[tuple[str, int, int], list[int], type[DeviceError], str]] = [
    (("q5_k", 4, 32), [], KernelError, "'q5_k' is unknown"),
    (("q4_1", 4, 40), [], KernelError, "40 columns"),
    (("q4_1", 0, 32), [], LimitError, r"\[0, 32\]"),
    (("q4_1", 4, 32), [20, 20, 20], LimitError, "hold 3 rows of 20 bytes, the weight has 4"),
    (("q4_1", 4, 32), [60, 40], LimitError, "more than its 4 rows"),
    (("q8_0", 4, 32), [34, 35], LimitError, "chunk of 35 bytes"),
    (("f32", 2, 3), [24, 12], LimitError, "more than its 2 rows"),
]


@pytest.mark.parametrize(("what", "sizes", "error", "message"), BAD_UPLOADS)
def test_upload_checks_and_leaves_nothing_behind(
    device: CpuDevice, what: tuple[str, int, int], sizes: list[int], error: type[DeviceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        device.upload(*what, [memoryview(bytes(n)) for n in sizes], "w")
    assert device.used_bytes == 0


def test_upload_passes_the_errors_of_its_source_on(device: CpuDevice) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(20))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        device.upload("q4_1", 4, 32, broken(), "w")
    assert device.used_bytes == 0
