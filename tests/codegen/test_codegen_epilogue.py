"""Whole epilogues on all three machines: samplers, channels, lanes of a batch, NaN status, several rows and lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from pie_core.codegen.layout import NONE, lane_layout
from pie_core.eta import Traced, intrinsics
from pie_core.eta.dtypes import f32_bits
from tests.codegen.author import Chan, F, counter, greedy, traced
from tests.codegen.batch import Answer, Batch, Lane, check, same_bits
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches

MACHINES = ["cpu", "lavapipe", "swiftshader"]
VOCAB, HIDDEN, ROWS = 5003, 96, 6  # an odd width: rows start at every alignment


@lru_cache(maxsize=1)
def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 4, (ROWS, VOCAB)).astype(np.float32)
    logits[4] = -np.inf
    logits[4, 4999] = 1.0
    return logits, rng.normal(0, 1, (ROWS, HIDDEN)).astype(np.float32)


def gumbel(temperature: float = 0.7) -> Traced:
    rng = counter()
    return traced(lambda: F["gumbel_max"](intrinsics.output(0) / temperature, rng.take()), VOCAB, HIDDEN)


def penalised() -> Traced:
    """Counts in a channel, a masked row, an entropy, a probability: loops of two phases and more, five channel effects."""
    rng, counts, allowed, best, sure = counter(), Chan("f32", (VOCAB,)), Chan("bool", (VOCAB,)), Chan("i32"), Chan("bool")

    def fn() -> Any:
        seen, mask = counts.take(), allowed.read()
        logits = F["select"](mask, intrinsics.output(1) - 0.5 * seen, float("-inf"))
        token = F["gumbel_max"](logits, rng.take())
        counts.put(seen + F["select"](F["iota"](VOCAB).cast("i32") == token, 1.0, 0.0))
        best.put(token)
        p = F["reduce_max"](F["softmax"](logits))
        sure.put(p > 0.5)
        return token, p, F["entropy"](logits), F["reduce_sum"](mask.cast("u32"))

    return traced(fn, VOCAB, HIDDEN)


def mixed() -> Traced:
    """Both kinds of rows, several lengths in one phase, vectors as outputs, random scalars."""
    rng = counter()

    def fn() -> Any:
        hidden = F["l2norm"](intrinsics.output(0, "hidden"))
        state = rng.take()
        noise = F["normal"](state, 7)
        return (
            hidden,
            F["reduce_max"](intrinsics.output(1)) + F["reduce_sum"](hidden),
            noise,
            F["uniform"](state),
            F["rng_gumbel"](state, (2, 3)),
        )

    return traced(fn, VOCAB, HIDDEN)


def lanes_for(result: Traced, count: int) -> list[Lane]:
    rng = np.random.default_rng(5)
    made = []
    for i in range(count):
        cells = {}
        for chan, (_, dtype, shape) in enumerate(result.program.chans):
            if dtype == "u32":
                cells[chan] = np.array([i, 0xFFFFFFFF - i], np.uint32)
            elif dtype == "bool":
                cells[chan] = rng.integers(0, 2, shape).astype(bool)
            else:
                cells[chan] = rng.integers(0, 3, shape).astype(np.float32)
        params = tuple(f32_bits(0.5 + i / 8) if i % 2 and len(result.params) == 1 else p for p in result.params)
        made.append(Lane((3 * i) % (ROWS - result.program.reads + 1), params, cells))
    return made


PROGRAMS: dict[str, Callable[[], Traced]] = {
    "greedy": lambda: traced(greedy, VOCAB, HIDDEN),
    "gumbel": gumbel,
    "penalised": penalised,
    "mixed": mixed,
    "log_softmax": lambda: traced(lambda: F["log_softmax"](intrinsics.output(0)), VOCAB, HIDDEN),
    "min_p": lambda: traced(lambda: F["masked_argmax"](-intrinsics.output(0), F["min_p"](intrinsics.output(0), 0.02)), VOCAB, HIDDEN),
}


@lru_cache(maxsize=1)
def launches() -> dict[str, list[Batch]]:
    """Of each program: six lanes in one launch, the same in reverse order, and each alone."""
    made = {}
    for name, program in PROGRAMS.items():
        result = program()
        lanes = lanes_for(result, 6)
        made[name] = [Batch(result.program, order, *rows()) for order in (lanes, lanes[::-1], *[[lane] for lane in lanes])]
    return made


@lru_cache(maxsize=3)
def answers(machine: str) -> dict[str, list[list[Answer]]]:
    flat = [batch for batches in launches().values() for batch in batches]
    got = iter([cpu_machine().run(b) for b in flat] if machine == "cpu" else run_batches(machine, flat))
    return {name: [next(got) for _ in batches] for name, batches in launches().items()}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_the_oracle(name: str, machine: str) -> None:
    check(answers(machine)[name][0], launches()[name][0].oracle(), 1e-5, 1e-5, f"{name} on {machine}")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lanes_equal_their_solo_runs_bit_for_bit(name: str, machine: str) -> None:
    together, reverse, *alone = answers(machine)[name]
    for i, lane in enumerate(together):
        assert same_bits(lane, reverse[-1 - i]), f"{name} on {machine}: lane {i} depends on the order of lanes"
        assert same_bits(lane, alone[i][0]), f"{name} on {machine}: lane {i} differs from its solo run"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("place", [0, 1023, 1024, VOCAB - 2, VOCAB - 1])
def test_a_nan_row_sets_the_status_of_its_lane_only(machine: str, place: int) -> None:
    logits, hidden = rows()[0][:3].copy(), rows()[1][:3]
    logits[1, place] = np.nan
    result = gumbel()
    batch = Batch(result.program, [Lane(r, result.params, {0: np.array([1, r], np.uint32)}) for r in (0, 1, 2)], logits, hidden)
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    assert [a.status for a in got] == [0, 1, 0]
    check(got, batch.oracle(), 0, 0)


@pytest.mark.parametrize("machine", MACHINES)
def test_nan_in_rows_the_program_does_not_read(machine: str) -> None:
    """Row 0 of the pass is traced but unused, the hidden row is read: only the latter counts."""
    logits, hidden = rows()[0][:3].copy(), rows()[1][:3].copy()
    logits[0], hidden[2, 5] = np.nan, np.nan
    result = traced(lambda: (greedy_of(1), F["reduce_max"](intrinsics.output(1, "hidden"))), VOCAB, HIDDEN)
    batch = Batch(result.program, [Lane(0), Lane(1)], logits, hidden)
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    assert [a.status for a in got] == [0, 1]


def greedy_of(row: int) -> Any:
    return F["reduce_argmax"](intrinsics.output(row))


@pytest.mark.parametrize("machine", MACHINES)
def test_dropped_outputs_and_cells_write_nothing(machine: str) -> None:
    """NONE in a lane drops the output, the cell and its copy; the status still arrives."""
    result = penalised()
    layout = lane_layout(result.program)
    batch = Batch(result.program, lanes_for(result, 2), *rows())
    words = batch.table.reshape(2, layout.words)
    for chan in range(layout.channels):
        words[0, layout.put(chan)] = words[0, layout.copy(chan)] = NONE
    for out in range(layout.outs):
        words[0, layout.out(out)] = NONE
    before = batch.results.copy()
    if machine == "cpu":
        cpu = cpu_machine()
        at, arrays = cpu.prepare(batch)
        cpu.epilogue(cpu.store, *at[:5], 1, at[5], at[6])  # the first lane alone
        arena, results = cpu.fetch(at[3], arrays[3]), cpu.fetch(at[5], arrays[5])
    else:
        from tests.codegen.gpu import MACHINES as RUN
        from tests.codegen.gpu import epilogue_job

        job, kernel = epilogue_job(batch)
        after = dict(zip([n for n, _ in kernel.bindings], RUN[machine]([job._replace(groups=1)])[0], strict=True))
        arena, results = after["arena"], after["results"]
    changed = np.flatnonzero(results != before).tolist()
    assert changed == [batch.places[0][0]] and results[changed[0]] == 0
    assert np.array_equal(arena, batch.arena)


@pytest.mark.parametrize("workgroup", [16, 64, 256])
def test_workgroup_size_changes_no_token(workgroup: int) -> None:
    batch = launches()["gumbel"][0]
    check(run_batches("lavapipe", [batch], workgroup)[0], batch.oracle(), 1e-5, 1e-5)


@pytest.mark.parametrize("machine", MACHINES)
def test_more_reductions_than_slots(machine: str) -> None:
    """Twelve reductions in one phase share eight workgroup arrays in turns."""

    def fn() -> Any:
        x = intrinsics.output(0)
        return [F["reduce_argmax"](x * float(k)) for k in (1, -1, 2, -2, 3, -3)] + [
            F["reduce_max"](x * float(k)) for k in (1, -1, 2, -2, 3, -3)
        ]

    result = traced(fn, VOCAB, HIDDEN)
    batch = Batch(result.program, [Lane(0, result.params)], *rows())
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    check(got, batch.oracle(), 0, 0)


def test_long_scalar_chains_do_not_recurse() -> None:
    """A thousand dependent scalar ops: emitters walk, they do not recurse."""

    def fn() -> Any:
        x = F["reduce_argmax"](intrinsics.output(0))
        for _ in range(900):
            x = -x
        return x

    result = traced(fn, VOCAB, HIDDEN)
    batch = Batch(result.program, [Lane(1)], *rows())
    check(cpu_machine().run(batch), batch.oracle())
    check(run_batches("lavapipe", [batch])[0], batch.oracle())
