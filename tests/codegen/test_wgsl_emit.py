"""What the WGSL emitter promises without running: golden text, both compilers, iteration bounds, launches, refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import pie_core.eta.program as program_module
from pie_core.codegen import emit_epilogue_wgsl, emit_epilogue_wgsl_split, wgsl_text
from pie_core.codegen.wgsl import MAX_ITERATIONS
from pie_core.eta import OPS, Program, ProgramError, intrinsics
from tests.codegen.author import F, counter, map_program, over_cells, traced
from tests.codegen.gpu import lavapipe_gpu
from tests.codegen.wgsl_families import GOLDEN, VOCAB, all_kernels, families, golden_texts, gumbel
from tests.support.tint import compile_wgsl


@pytest.mark.parametrize("name", golden_texts())
def test_golden_wgsl(name: str) -> None:
    """The text itself: a change of the emitter shows as a diff. `python -m tests.codegen.wgsl_families` accepts it."""
    assert golden_texts()[name] == (GOLDEN / f"{name}.wgsl").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.wgsl")} == set(golden_texts())


def test_every_op_has_a_golden_text() -> None:
    written = {node.name for program in families().values() for node in program.ops}
    assert written >= {row.name for row in OPS.values() if row.kind != "source"} | {"output", "outputs", "param"}


def test_all_forms_compile_with_tint_and_naga() -> None:
    kernels = all_kernels()
    assert compile_wgsl({name: kernel.source for name, kernel in kernels.items()}) == {}
    device = lavapipe_gpu().device
    for kernel in kernels.values():
        device.create_shader_module(code=kernel.source)  # raises what naga refuses


def test_bindings_and_workgroup_memory_fit_every_device() -> None:
    for name, kernel in all_kernels().items():
        assert len(kernel.bindings) <= 8 and kernel.workgroup <= 256, name
        words = sum(int(n) for n in re.findall(r"var<workgroup> \w+: array<(?:u32|atomic<u32>), (\d+)>", kernel.source))
        assert 4 * words + 4 <= 16_384, f"{name}: {4 * words} bytes of workgroup memory"


def test_softmax_temperature_and_gumbel_over_a_vocabulary_is_one_dispatch() -> None:
    """On software adapters and for wide batches; split, a launch a phase: one dependent reduction is two."""
    noise = counter()

    def sample() -> Any:
        p = F["softmax"](intrinsics.output(0) / 0.7)
        return F["gumbel_max"](F["log"](p), noise.take())

    for workgroup in (32, 256):
        assert emit_epilogue_wgsl(traced(sample, VOCAB).program, workgroup).grid == (0, 1, 1)
    grids = {name: [k.grid for k in emit_epilogue_wgsl_split(families()[name], 16)] for name in ("greedy", "gumbel", "pivot_rank")}
    assert grids == {
        "greedy": [(16, 0, 1), (1, 0, 1)],
        "gumbel": [(16, 0, 1), (1, 0, 1)],
        "pivot_rank": [(16, 0, 1), (1, 0, 1), (16, 0, 1)],
    }


def chain(n: int, width: int) -> Program:
    ops: list[Any] = [["output", [], {"index": 0, "name": "logits"}, "f32", [width]]]
    for i in range(n):
        ops.append(["reduce_max", [0 if i == 0 else len(ops) - 1], {}, "f32", []])
        ops.append(["sub", [0, len(ops) - 1], {}, "f32", [width]])
    text = {"chans": [], "ops": ops, "outs": [len(ops) - 1], "params": [], "stage": "epilogue", "v": 1}
    return Program.parse(json.dumps(text))


@pytest.mark.parametrize("name", [*families(), "chain"])
def test_the_bound_is_the_sum_of_what_the_loops_state(name: str) -> None:
    program = chain(30, 200_000) if name == "chain" else families()[name]
    for kernel in (emit_epilogue_wgsl(program), emit_epilogue_wgsl(program, 256, 8), *emit_epilogue_wgsl_split(program, 8)):
        stated = sum(int(n) for n in re.findall(r"at most (\d+) iterations$", kernel.source, re.MULTILINE))
        assert stated == kernel.iterations <= MAX_ITERATIONS


WIDE = 262_144
LARGE = {
    "top_k 40": lambda: F["top_k"](intrinsics.output(0), 40),
    "pivot_rank": lambda: F["pivot_threshold"](intrinsics.output(0), rank=40),
    "pivot_mass of softmax": lambda: F["pivot_threshold"](F["softmax"](intrinsics.output(0)), mass=0.9),
    "sort_desc": lambda: F["sort_desc"](intrinsics.output(0)),
    "cumsum of sorted": lambda: F["cumsum"](F["sort_desc"](intrinsics.output(0))[0]),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_vocabulary_of_262144_stays_within_the_bound(name: str) -> None:
    program = traced(LARGE[name], WIDE).program
    assert emit_epilogue_wgsl(program).iterations < MAX_ITERATIONS / 2
    assert max(k.iterations for k in emit_epilogue_wgsl_split(program, 32)) < MAX_ITERATIONS / 2


def many(op: Any, count: int, width: int) -> Program:
    """`op` of as many different vectors, added up."""

    def fn(x: Any) -> Any:
        total = op(x)
        for k in range(1, count):
            total = total + op(x + float(k))
        return total

    return over_cells(fn, ("f32", (width,))).program


REFUSED = {
    "dependent reductions": (lambda: chain(64, 262_144), r"would run \d+ or more loop iterations an invocation, the bound is 60000"),
    "a sort of a million": (lambda: over_cells(F["sort_desc"], ("f32", (1 << 20,))).program, r"would run \d+ or more loop iterations"),
    "many sorts": (lambda: many(lambda x: F["sort_desc"](x)[0], 12, 9000), r"would run \d+ or more loop iterations"),
    "many updates": (
        lambda: over_cells(F["scatter_add"], ("f32", (9,)), ("i32", (70_000,)), ("f32", (70_000,))).program,
        r"would run \d+ or more loop iterations",
    ),
    "code of routines": (lambda: many(F["cumsum"], 100, 2000), r"would hold \d+ or more barriers on webgpu, the bound is 100"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_exceeds_a_bound_is_refused_with_numbers(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ProgramError, match=message):
        emit_epilogue_wgsl(make(), 32)


def test_bad_groups_are_refused() -> None:
    for groups in (0, 65):
        with pytest.raises(ValueError, match=f"groups must be from 1 to 64, got {groups}"):
            emit_epilogue_wgsl_split(families()["greedy"], groups)


def test_wgsl_for_people_names_every_op_in_order() -> None:
    program = traced(gumbel(), VOCAB).program
    text = program.wgsl()
    assert text == wgsl_text(program)
    lines = [line.removeprefix("//   ") for line in text.splitlines() if line.startswith("//   ")]
    assert lines == program.listing().splitlines()
    assert re.findall(r"^  // phase (\d+): a loop over 49152 elements", text, re.MULTILINE) == ["0"] and "  // scalar results\n" in text
    doubled = map_program(lambda x: x + x, 1, 16)
    assert "= in0[" in doubled.wgsl() and "//   %1 = add(%0, %0) : f32[16]" in doubled.wgsl()


def test_wgsl_for_people_needs_a_kernel_and_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProgramError, match="'prologue' has no kernel"):
        wgsl_text(Program("prologue", (), ()))
    monkeypatch.setattr(program_module, "RENDERERS", {})
    with pytest.raises(ProgramError, match=r"import pie_core\.codegen"):
        families()["greedy"].wgsl()
