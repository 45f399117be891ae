"""What the cpu emitter promises without running: tables, blocks, reuse of temps, bounds of scratch and of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pie_core.codegen import cpu, emit_epilogue_cpu
from pie_core.codegen.cpu_code import END, MAGIC, MAX_SCRATCH, ONCE, ROWS, Code
from pie_core.codegen.cpu_memory_ops import view_table
from pie_core.codegen.cpu_source import opcodes
from pie_core.codegen.schedule import schedule
from pie_core.eta import ProgramError, intrinsics
from pie_core.eta.program import Node
from tests.codegen.author import F, counter, over_cells, traced

VIEWS = [
    ("transpose", (3, 5), (5, 3), (1, 1, 5, 3), (0, 0, 1, 5)),
    ("broadcast", (4,), (4, 3), (1, 1, 4, 3), (0, 0, 1, 0)),
    ("broadcast", (4,), (4, 3, 7), (1, 1, 4, 21), (0, 0, 1, 0)),  # two axes that repeat are one
    ("broadcast", (1, 3), (4, 3), (1, 1, 4, 3), (0, 0, 0, 1)),
    ("broadcast", (4, 3), (4, 3, 7), (1, 1, 12, 7), (0, 0, 1, 0)),  # two axes that walk on are one
    ("broadcast", (1, 3, 1, 5), (4, 3, 7, 5), (4, 3, 7, 5), (0, 5, 0, 1)),
    ("broadcast", (2, 1, 1, 5), (2, 1, 3, 5), (1, 2, 3, 5), (0, 5, 0, 1)),
]


@pytest.mark.parametrize(("name", "source", "shape", "extents", "strides"), VIEWS)
def test_view_tables(name: str, source: Any, shape: Any, extents: Any, strides: Any) -> None:
    assert view_table(Node(name, (0,), {}, "f32", shape), source) == (*extents, *strides)


def blocks(words: tuple[int, ...]) -> list[int]:
    """Kinds of the blocks of an epilogue; the walk must end at the tables."""
    at, kinds = 8, []
    while True:
        kinds.append(words[at])
        if words[at] == ROWS:
            assert words[at + 1] == 4 + sum(words[at + 4 : at + 7])
        if words[at] == END:
            assert at + 3 == words[7]
            return kinds
        at += 3 + words[at + 1]


def everything(x: Any, m: Any) -> Any:
    values, order = F["sort_desc"](x)
    keep = F["pivot_threshold"](F["softmax"](x), mass=0.9)
    rows = F["reduce_sum"](m)
    return F["gather"](values, order), keep, rows, F["transpose"](m), F["cumsum"](rows), F["matmul"](m, F["transpose"](m))


def test_headers_blocks_and_tables_fit_together() -> None:
    program = over_cells(everything, ("f32", (5000,)), ("f32", (20, 30))).program
    emitted, plan = emit_epilogue_cpu(program), schedule(program)
    words = emitted.words
    assert words[0] == MAGIC and words[1] == len(words)
    assert emitted.scratch_bytes == 16 * words[5] + 4096 * words[6] + 4 * plan.scratch_words
    kinds = blocks(words)
    assert kinds.count(ROWS) == 1 and kinds[0] == kinds[-2] == ONCE
    assert all(0 <= w <= 0xFFFFFFFF for w in words)


def test_equal_tables_are_kept_once() -> None:
    code = Code()
    assert code.table(1, -2) == code.table(1, -2) != code.table(1, 2)
    assert code.tables == [1, 0xFFFFFFFE, 1, 2]


def test_a_broadcast_scalar_costs_no_temp() -> None:
    def fn(wide: bool) -> Callable[[Any], Any]:
        return lambda x: F["reduce_sum"](x * (F["broadcast"](F["reduce_max"](x), 5000) if wide else F["reduce_max"](x)))

    plain, repeated = (emit_epilogue_cpu(over_cells(fn(wide), ("f32", (5000,))).program) for wide in (False, True))
    assert plain.scratch_bytes == repeated.scratch_bytes and len(plain.words) == len(repeated.words)


def test_scratch_words_come_on_top_of_the_cap_of_temps() -> None:
    emitted = emit_epilogue_cpu(over_cells(lambda x: F["sort_desc"](x)[1], ("f32", (1 << 19,))).program)
    assert emitted.scratch_bytes > 4 * 6 * (1 << 19) > MAX_SCRATCH


def chain_of_exp(x: Any) -> Any:
    for _ in range(70):
        x = -F["exp"](x)
    return F["reduce_max"](x)


LONG: list[tuple[str, Callable[..., Any], list[tuple[str, tuple[int, ...]]]]] = [
    ("matmul", lambda a, b: F["matmul"](F["matmul"](a, b), b), [("f32", (1000, 1000))] * 2),
    ("selections", lambda x: [F["top_k"](x * float(k), 9)[1] for k in range(3, 10)], [("f32", (1 << 16, 16))]),
    ("chain", lambda x: chain_of_exp(F["broadcast"](x, (1 << 20, 4)) * 2.0), [("f32", (1 << 20,))]),
    ("masses of short rows", lambda o, x: F["pivot_threshold"](x, mass=0.5, order=o), [("f32", (1 << 18, 4))] * 2),
    ("short rows", lambda x: [F["reduce_max"](F["reshape"](x * float(k), (1 << 20, 1))) for k in range(9)], [("f32", (1 << 20,))]),
]


@pytest.mark.parametrize(("name", "fn", "cells"), LONG, ids=[name for name, *_ in LONG])
def test_work_is_bounded(name: str, fn: Any, cells: Any) -> None:
    program = over_cells(fn, *cells).program
    with pytest.raises(ProgramError, match=rf"would take some \d+ ms or more on the cpu device, the bound is {cpu.MAX_WORK // 10**6} ms"):
        emit_epilogue_cpu(program)


def test_samplers_stay_far_below_the_bound_of_work() -> None:
    """At the largest vocabulary; and the emitter's own work is small: few words, deterministic."""
    rng = counter()

    def fn() -> Any:
        logits = intrinsics.output(0)
        keep = F["top_p"](logits, 0.9) & F["typical"](logits, 0.95) & F["top_k_mask"](logits, 40)
        return F["gumbel_max"](F["masked"](logits, keep), rng.take())

    program = traced(fn, 262_144).program
    emitter = cpu._Epilogue(schedule(program))
    words = emitter.run().words
    assert emitter.work < cpu.MAX_WORK // 4 and len(words) < 2000
    assert emit_epilogue_cpu(program).words == words


def test_no_two_ops_share_an_opcode() -> None:
    table = opcodes()
    assert len(set(table.values())) == len(table)
