"""Map programs: elementwise tails of models on all three machines, strided inputs, true row counts, padding untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pie_core.codegen import emit_epilogue_wgsl, emit_map_cpu, emit_map_wgsl
from pie_core.codegen.oracle import run_map
from pie_core.eta import ProgramError
from tests.codegen.author import F, greedy, map_program, traced
from tests.codegen.batch import MapLaunch
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import MACHINES, map_job

POISON = np.float32(-12345.0)


def silu_gate(gate: Any, up: Any) -> Any:
    return gate / (F["exp"](-gate) + 1.0) * up


def clipped(x: Any) -> Any:
    return F["select"](x > float("-inf"), F["minimum"](x, 0.5), float("inf"))


def run(machine: str, launch: MapLaunch) -> Any:
    return cpu_machine().run_map(launch) if machine == "cpu" else MACHINES[machine]([map_job(launch)])[0][-1]


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
@pytest.mark.parametrize(("n", "rows", "count"), [(96, "tokens", 5), (1025, "reads", 3), (7, "tokens", 8), (1536, "tokens", 0)])
def test_gated_tail(machine: str, n: int, rows: str, count: int) -> None:
    """Gate and up lie in one merged product [bucket, 2n + 3]; the output is contiguous."""
    bucket, stride = 8, 2 * n + 3
    product = np.random.default_rng(n).normal(0, 3, (bucket, stride)).astype(np.float32)
    product[count:] = np.nan  # padding
    step = np.zeros(16, np.uint32)
    step[0], step[1] = (count, bucket) if rows == "tokens" else (bucket, count)
    out = np.full((bucket, n), POISON)
    inputs = ((stride, 1), (stride, n + 2))
    launch = MapLaunch(map_program(silu_gate, 2, n), n, inputs, rows, bucket, step, (product, product), out)
    got = run(machine, launch)
    want = run_map(launch.program, [product[:count, 1 : n + 1], product[:count, n + 2 : 2 * n + 2]])
    np.testing.assert_allclose(got[:count], want, rtol=2e-6, atol=1e-6)
    assert (got[count:] == POISON).all(), "rows behind the count are not written"


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
def test_infinite_constants(machine: str) -> None:
    """WGSL refuses them in constant expressions; they are made at run time."""
    x = np.array([[-np.inf, 0.25, 3.0, np.nan, -7.0]], np.float32)
    step = np.zeros(16, np.uint32)
    step[0] = 1
    launch = MapLaunch(map_program(clipped, 1, 5), 5, ((5, 0),), "tokens", 1, step, (x,), np.zeros((1, 5), np.float32))
    assert np.array_equal(run(machine, launch), np.array([[np.inf, 0.25, 0.5, np.inf, -7.0]], np.float32))


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    x = np.random.default_rng(0).normal(0, 3, (8, 200)).astype(np.float32)
    program = map_program(silu_gate, 2, 100)
    step = np.zeros(16, np.uint32)

    def rows(first: int, count: int, machine: str) -> Any:
        step[0] = count
        inputs = ((200, 0), (200, 100))
        given = (x[first:], x[first:])
        return run(machine, MapLaunch(program, 100, inputs, "tokens", 8, step.copy(), given, np.zeros((8, 100), np.float32)))

    for machine in ("cpu", "lavapipe"):
        together = rows(0, 8, machine)
        for i in (0, 3, 7):
            assert np.array_equal(rows(i, 1, machine)[0].view(np.uint32), together[i].view(np.uint32)), (machine, i)


def test_what_does_not_fit_is_refused() -> None:
    program = map_program(silu_gate, 2, 8)
    pair = ((8, 0), (8, 0))
    for emit in (emit_map_wgsl, emit_map_cpu):
        with pytest.raises(ProgramError, match=r"2 inputs of \[\(8,\)\] elements; asked for 2 of 9"):
            emit(program, 9, pair, "tokens", 1)
        with pytest.raises(ProgramError, match="asked for 1 of 8"):
            emit(program, 8, pair[:1], "tokens", 1)
        with pytest.raises(ProgramError, match="rows must be tokens or reads, got 'lanes'"):
            emit(program, 8, pair, "lanes", 1)
        with pytest.raises(ProgramError, match="0 or more, got -8 and 0"):
            emit(program, 8, ((-8, 0), (8, 0)), "tokens", 1)
        with pytest.raises(ProgramError, match="the program's stage is 'epilogue'"):
            emit(traced(greedy).program, 8, pair, "tokens", 1)
    with pytest.raises(ProgramError, match="needs 65536 workgroups"):
        emit_map_wgsl(program, 8, pair, "tokens", 65535 * 32 + 1)
    with pytest.raises(ProgramError, match="the program's stage is 'map'"):
        emit_epilogue_wgsl(program)
