"""What emission promises without running: layouts, size caps, opcodes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from pie_core.codegen import emit_epilogue_cpu, emit_epilogue_wgsl, emit_epilogue_wgsl_split, lane_layout
from pie_core.codegen.cpu_source import FIXED, opcodes, vm_ops_header
from pie_core.codegen.wgsl_lib import HELPERS, helpers_for, iterations_of
from pie_core.codegen.wgsl_writer import Writer
from pie_core.eta import OPS, Program, ProgramError, intrinsics
from pie_core.eta.ops import Fold
from pie_core.eta.program import Node
from tests.codegen.author import Chan, F, counter, greedy, over_cells, traced
from tests.codegen.batch import Batch, Lane, check
from tests.codegen.gpu import run_batches


def test_lane_layout_positions() -> None:
    rng, best = counter(), Chan("i32", (3,))

    def fn() -> Any:
        token = F["gumbel_max"](intrinsics.output(0) / 0.7, rng.take())
        best.put(F["broadcast"](token, 3))
        return token, intrinsics.output(0) * 2.0

    layout = lane_layout(traced(fn, 50).program)
    assert (layout.words, layout.channels, layout.outs, layout.params) == (12, 2, 2, 2)
    assert (layout.take(0), layout.put(0), layout.copy(0), layout.take(1), layout.out(0), layout.out(1), layout.param(1)) == (
        2,
        3,
        4,
        5,
        8,
        9,
        11,
    )
    assert layout.cell_sizes == (2, 3) and layout.out_sizes == (1, 50) and layout.results_words == 52
    assert layout.pack(1, 2, [(3, 4, 5), (6, 7, 8)], [9, 10], [11, 12]) == list(range(1, 13))
    for wrong in ([(3, 4, 5)], [9, 10], [11, 12]), ([(3, 4, 5)] * 2, [9], [11, 12]), ([(3, 4, 5)] * 2, [9, 10], []):
        with pytest.raises(ValueError, match="2 channels, 2 outputs and 2 params"):
            layout.pack(1, 2, *wrong)


def gumbel() -> Any:
    rng = counter()
    return lambda: F["gumbel_max"](intrinsics.output(0) / 0.7, rng.take())


def test_emission_is_deterministic() -> None:
    program = traced(gumbel(), 500).program
    again = Program.parse(program.text)
    assert emit_epilogue_wgsl(program) == emit_epilogue_wgsl(again) and emit_epilogue_cpu(program) == emit_epilogue_cpu(again)


def dependent_chains(n: int) -> Program:
    """Each of n dependent reductions needs all ops before it again."""
    ops: list[Any] = [["output", [], {"index": 0, "name": "logits"}, "f32", [64]]]
    for _ in range(n):
        ops.append(["reduce_max", [len(ops) - 1], {}, "f32", []])
        for _ in range(15):
            ops.append(["sub", [max(0, len(ops) - 2), len(ops) - 1] if len(ops[-1][4]) == 0 else [len(ops) - 1, 0], {}, "f32", [64]])
    text = {"chans": [], "ops": ops, "outs": [len(ops) - 1], "params": [], "stage": "epilogue", "v": 1}
    return Program.parse(json.dumps(text))


def test_long_dependent_chains_stay_bounded_and_right() -> None:
    """What several phases need is stored, so the text does not explode."""
    program = dependent_chains(60)
    assert emit_epilogue_wgsl(program).source.count("\n") < 4 * len(program.ops)
    assert all(k.source.count("\n") < 200 for k in emit_epilogue_wgsl_split(program, 4))
    assert emit_epilogue_cpu(program).words
    batch = Batch(dependent_chains(6), [Lane(0)], np.random.default_rng(1).integers(-8, 9, (1, 64)).astype(np.float32))
    check(run_batches("lavapipe", [batch], 32)[0], batch.oracle(), 0, 0)


def test_transcendental_ops_weigh_what_they_inline_to() -> None:
    def chain_of(op: str, n: int, first: Any = intrinsics.output) -> Program:
        def fn() -> Any:
            x = first(0)
            for _ in range(n):
                x = F[op](x)
            return F["reduce_max"](F["broadcast"](x, 4) if not x.shape else x)

        return traced(fn).program

    def scalar(_: int) -> Any:
        return F["reduce_max"](intrinsics.output(0))

    for first in (intrinsics.output, scalar):
        assert emit_epilogue_wgsl(chain_of("exp", 200, first)).source and emit_epilogue_wgsl(chain_of("neg", 1000, first)).source
        with pytest.raises(ProgramError, match="fewer transcendental ops"):
            emit_epilogue_wgsl(chain_of("exp", 600, first))


def test_scratch_is_capped_and_temps_are_reused() -> None:
    def wide(n: int) -> Program:
        """n vectors alive at once: each is made from the one before, then all are added."""
        f32 = ("f32", (5000,))
        ops = [Node("output", (), {"index": 0, "name": "logits"}, *f32)]
        ops += [Node("mul", (k, k), {}, *f32) for k in range(n)]
        ops += [Node("add", (1 if k == 2 else len(ops) + k - 3, k), {}, *f32) for k in range(2, n + 1)]
        ops.append(Node("reduce_sum", (len(ops) - 1,), {}, "f32", ()))
        return Program("epilogue", ops, [len(ops) - 1]).verify()

    def deep() -> Any:
        x = intrinsics.output(0)
        for _ in range(200):
            x = -F["exp"](x)
        return F["reduce_max"](x)

    assert emit_epilogue_cpu(traced(deep, 5000).program).scratch_bytes < 2 * 4096 + 1024, "a chain needs one temp"
    assert emit_epilogue_cpu(wide(128)).scratch_bytes <= 1 << 20
    with pytest.raises(ProgramError, match="bytes of scratch on the cpu device for values alive at once, the cap is 1048576"):
        emit_epilogue_cpu(wide(256))


def test_bad_workgroups_are_refused() -> None:
    for workgroup in (0, 24, 512):
        with pytest.raises(ValueError, match="multiple of 16 from 16 to 256"):
            emit_epilogue_wgsl(traced(greedy).program, workgroup)


def test_the_header_holds_each_opcode_once() -> None:
    table, header = opcodes(), vm_ops_header()
    assert sorted(table.values()) == list(range(len(table)))
    functions = re.search(r"VM_FUNCTIONS\[\] = \{(.*?)\}", header, re.DOTALL)
    assert functions is not None
    names = [n.strip() for n in functions[1].split(",") if n.strip()]
    assert len(names) == len(table) and names[: len(FIXED)] == [f"vm_{n}" for n in FIXED]
    for (name, key), code in table.items():
        part = name.partition(".")[2]
        if code >= len(FIXED):
            assert names[code].endswith(part or str(code)), (name, key)


def test_every_helper_is_used_and_every_call_has_one() -> None:
    texts = []
    for row in OPS.values():
        for code in row.wgsl.values():
            texts += [code.lift, code.join, code.final] if isinstance(code, Fold) else [code]
    body = "\n".join([*texts, "f_nan(x)", "rng_seed(k, c)", "mask_apply(x, w, i)"])
    assert set(re.findall(r"^fn (\w+)", helpers_for(body), re.MULTILINE)) == set(HELPERS)


def test_names_are_taken_once_a_block() -> None:
    writer = Writer()
    assert [writer.let("1u", "add_3"), writer.let("2u", "add_3")] == ["add_3", "add_3x2"]
    for _ in range(2):
        with writer.loop("var i = 0u; i < 9u; i += 1u", 9):
            assert [writer.name("add_3"), writer.name("div_4"), writer.name("lane_row", outer=True)][:2] == ["add_3x3", "div_4"]
    assert [writer.name("div_4"), writer.name("lane_row")] == ["div_4", "lane_rowx3"]


def test_words_of_a_lane_have_names_of_their_own() -> None:
    result = over_cells(lambda x, y: (x / 0.5, y), ("f32", (4,)), ("i32", ()))
    layout = lane_layout(result.program)
    names = [layout.name(word) for word in range(layout.words)]
    assert names == ["row", "status", "take_0", "put_0", "copy_0", "take_1", "put_1", "copy_1", "out_0", "out_1", "param_0"]
    assert [names.index("take_1"), names.index("out_1"), names.index("param_0")] == [layout.take(1), layout.out(1), layout.param(0)]


def test_loops_of_helpers_count() -> None:
    """The bound of a kernel holds for what its ops loop inside of helpers: remainders of f32."""
    assert {name for name, text in HELPERS.items() if "for (" in text} == {"f_rem"} and iterations_of("f_rem(f_rem(a, b), c)") == 26
    kernel = emit_epilogue_wgsl(over_cells(lambda x: x % 0.3, ("f32", (1000,))).program)
    assert kernel.iterations == 4 + 4 * 13, "four elements a thread"
    assert "at most 52 iterations" in kernel.source
