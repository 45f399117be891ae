"""Identity: equal programs from different source text, in any process, have one text; equal subexpressions are one value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.eta import FUNCTIONS, Model, Program, Trace, intrinsics, trace_epilogue
from pie_core.eta.dtypes import f32_bits
from tests.eta.test_eta_trace import Chan, names

F = FUNCTIONS
MODEL = Model(12, 8)


def trace(fn: Callable[[], Any], rows: int | None = None) -> Any:
    traced = trace_epilogue(fn, MODEL, rows=rows)
    assert Program.parse(traced.program.text).text == traced.program.text
    return traced


def test_constants_are_slots_of_their_own() -> None:
    """0.7 written twice are two slots: the program with two is another one, which 0.7 and 0.8 share."""
    same, two = trace(lambda: intrinsics.output(0) * 0.7 + 0.7), trace(lambda: intrinsics.output(0) * 0.7 + 0.8)
    assert same.program == two.program and same.params == (f32_bits(0.7),) * 2 and two.params == (f32_bits(0.7), f32_bits(0.8))


def with_one_constant(build: Callable[[Any], Any]) -> Any:
    return trace(lambda: build(F["constant"](0.7, "f32")))


def best_first(t: Any) -> Any:
    best = F["reduce_argmax"](intrinsics.output(0) / t)
    unused = F["cumsum"](intrinsics.output(0, "hidden")) * 3.0
    assert unused.shape == (8,)
    return F["softmax"](intrinsics.output(0) / t), best


def second_row_first(t: Any) -> Any:
    b = intrinsics.output(1) < t
    a = intrinsics.output(0) < t
    return a & b


SAME: list[list[Callable[[Any], Any]]] = [
    [
        lambda t: (F["softmax"](intrinsics.output(0) / t), F["reduce_argmax"](intrinsics.output(0) / t)),
        best_first,
        lambda t: [f(intrinsics.output(0) / t) for f in (F["softmax"], F["reduce_argmax"])],
    ],
    [
        lambda t: F["top_k"](intrinsics.output(0) + t, 3)[1],
        lambda t: F["sort_desc"](intrinsics.output(0)) and F["top_k"](intrinsics.output(0) + t, 3)[1],
        lambda t: (F["top_k"](intrinsics.output(0) + t, 3), F["top_k"](intrinsics.output(0) + t, 3)[1])[1],
    ],
    [
        lambda t: (intrinsics.output(0) < t) & (intrinsics.output(1) < t),
        second_row_first,
    ],
]


@pytest.mark.parametrize("writings", SAME)
def test_the_order_of_statements_does_not_show(writings: list[Callable[[Any], Any]]) -> None:
    texts = {with_one_constant(build).program.text for build in writings}
    assert len(texts) == 1
    assert len({with_one_constant(build).program.hash for build in writings}) == 1


DIFFERENT: list[Callable[[], Any]] = [
    lambda: F["top_k"](intrinsics.output(0), 3)[1],
    lambda: F["top_k"](intrinsics.output(0), 4)[1],
    lambda: F["top_k"](intrinsics.output(1), 3)[1],
    lambda: F["top_k"](intrinsics.output(0), 3)[0],
    lambda: F["broadcast"](F["reduce_max"](intrinsics.output(0)), 3),
    lambda: F["broadcast"](F["reduce_max"](intrinsics.output(0)), (3, 1)),
    lambda: intrinsics.output(0) - intrinsics.output(1),
    lambda: intrinsics.output(1) - intrinsics.output(0),
    lambda: (intrinsics.output(0), intrinsics.output(1)),
    lambda: (intrinsics.output(1), intrinsics.output(0)),
    lambda: intrinsics.output(0).cast("i32").cast("f32"),
    lambda: intrinsics.output(0).cast("u32").cast("f32"),
]


def test_what_differs_in_one_attribute_type_or_operand_differs() -> None:
    assert len({trace(fn).program.hash for fn in DIFFERENT}) == len(DIFFERENT)


def test_equal_subexpressions_are_one_value_and_effects_are_not() -> None:
    chan, out = Chan("f32", (12,)), Chan("f32", (12,))

    def fn() -> Any:
        a = F["exp"](intrinsics.output(0) - F["reduce_max"](intrinsics.output(0)))
        b = F["exp"](intrinsics.output(0) - F["reduce_max"](intrinsics.output(0)))
        chan.put(a)
        first, second = chan.read(), chan.read()
        out.put(b)
        return a + b, first + second, F["iota"](3), F["iota"](3)

    program = trace(fn).program
    found = names(program)
    assert found.count("exp") == 1 and found.count("reduce_max") == 1 and found.count("iota") == 1 and found.count("read") == 2
    assert program.outs[2] == program.outs[3]


def test_draws_of_one_state_are_one_value_and_draws_of_two_are_two() -> None:
    rng = Chan("u32", (2,), is_counter=True)

    def fn() -> Any:
        state = rng.take()
        return F["uniform"](state, 3), F["uniform"](state, 3), F["uniform"](rng.take(), 3)

    program = trace(fn).program
    assert program.outs[0] == program.outs[1] != program.outs[2]


def test_effects_come_first_in_their_order_and_params_by_first_use() -> None:
    a, b = Chan("f32", (12,)), Chan("f32")

    def fn() -> Any:
        unused = F["constant"](9.0, "f32") * 2.0
        assert unused.shape == ()
        late = intrinsics.output(0) * 5.0
        b.put(F["reduce_max"](intrinsics.output(0)) * 7.0)
        a.put(intrinsics.output(0) + 3.0)
        return late

    traced = trace(fn)
    assert traced.channels == (b, a) and [n.attrs["chan"] for n in traced.program.ops if n.name == "put"] == [0, 1]
    assert traced.params == tuple(map(f32_bits, (7.0, 3.0, 5.0)))
    assert names(traced.program) == ["output", "reduce_max", "param", "mul", "put", "param", "add", "put", "param", "mul"]


def test_a_map_program_merges_constants_too() -> None:
    trace_ = Trace("map")
    x = trace_.input(0, 8)
    program = trace_.finish([(x + 1.0) * (x + 1.0)])
    assert names(program) == ["input", "const", "add", "mul"] and program.ops[3].args == (2, 2)


def test_a_deep_chain_needs_no_recursion() -> None:
    def fn() -> Any:
        x = intrinsics.output(0)
        for _ in range(1000):
            x = F["neg"](x)
        return x

    assert len(trace(fn).program.ops) == 1001


SCRIPT = """
import hashlib
from pie_core.eta import FUNCTIONS as F, Model, intrinsics, trace_epilogue
from tests.eta.test_eta_trace import Chan
def fn():
    rng = Chan("u32", (2,), is_counter=True)
    return F["sample"](intrinsics.output(0), rng.take(), 0.8, top_k=5, top_p=0.9), F["typical"](intrinsics.output(0), 0.5)
print(trace_epilogue(fn, Model(12, 8)).program.hash)
"""


def test_processes_agree() -> None:
    hashes = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".", "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 64
