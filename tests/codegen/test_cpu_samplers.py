"""The sampling library as whole epilogues on the cpu virtual machine: the oracle's answers, in batches, one row and several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pie_core.eta import Model, intrinsics, trace_epilogue
from tests.codegen.author import Chan, F, counter, traced
from tests.codegen.batch import Batch, Lane, check, same_bits
from tests.codegen.cpu import cpu_machine

VOCAB = 5003
Make = Callable[[], Callable[[], Any]]


def logits_of(rows: int, n: int = VOCAB) -> Any:
    """Rows of different sharpness."""
    rng = np.random.default_rng(n)
    return np.stack([rng.normal(0, 1.0 + row, n) for row in range(rows)]).astype(np.float32)


def drawn(mask: Callable[[Any], Any]) -> Make:
    """A sample among the tokens that `mask` keeps, and how many there are."""

    def make() -> Callable[[], Any]:
        rng = counter()

        def fn() -> Any:
            logits = intrinsics.output(0)
            keep = mask(logits)
            return F["gumbel_max"](F["masked"](logits, keep), rng.take()), F["reduce_sum"](keep.cast("u32"))

        return fn

    return make


def penalised() -> Callable[[], Any]:
    rng, history = counter(), Chan("i32", (64,))

    def fn() -> Any:
        ids = history.take()
        counts = F["token_counts"](ids, VOCAB)
        x = F["repetition_penalty"](intrinsics.output(0), counts, 1.3)
        x = F["presence_penalty"](F["frequency_penalty"](x, counts, 0.2), counts, 0.4)
        token = F["gumbel_max"](x / 0.8, rng.take())
        history.put(F["scatter_set"](ids, F["reshape"](F["reduce_argmax"](ids), 1), F["reshape"](token, 1)))
        return token, F["reduce_sum"](counts)

    return fn


def dry() -> Callable[[], Any]:
    rng, history = counter(), Chan("i32", (96,))

    def fn() -> Any:
        ids = history.take() % 5  # runs that come again
        x = F["dry"](intrinsics.output(0), ids, 2.0, allowed=1, breakers=F["iota"](VOCAB) == 3)
        history.put(ids)
        return F["gumbel_max"](x, rng.take()), F["gather"](x, F["iota"](5))

    return fn


def mirostat() -> Callable[[], Any]:
    rng, mu = counter(), Chan("f32")

    def fn() -> Any:
        token, after = F["mirostat"](intrinsics.output(0), mu.take(), rng.take())
        mu.put(after)
        return token

    return fn


def beam() -> Callable[[], Any]:
    """Best continuations over two rows: the flat index gives beam and token."""

    def fn() -> Any:
        both = [F["log_softmax"](intrinsics.output(r)) for r in (0, 1)]
        tops = [F["top_k"](x, 4) for x in both]
        at = F["iota"](8)
        joined = F["scatter_set"](F["broadcast"](0.0, 8), at, F["gather"](tops[0][0], at))
        joined = F["select"](at < 4, joined, F["gather"](tops[1][0], at - 4))
        score, place = F["top_k"](joined, 4)
        return score, place, F["select"](place < 4, F["gather"](tops[0][1], place), F["gather"](tops[1][1], place - 4))

    return fn


SAMPLERS: dict[str, Make] = {
    "top_k": drawn(lambda x: F["top_k_mask"](x, 40)),
    "top_p": drawn(lambda x: F["top_p"](x, 0.9)),
    "min_p": drawn(lambda x: F["min_p"](x, 0.05)),
    "top_a": drawn(lambda x: F["top_a"](x, 0.3)),
    "epsilon": drawn(lambda x: F["epsilon_cutoff"](x, 3e-4)),
    "eta": drawn(lambda x: F["eta_cutoff"](x, 3e-4)),
    "typical": drawn(lambda x: F["typical"](x, 0.9)),
    "tail_free": drawn(lambda x: F["tail_free"](x, 0.9)),
    "xtc": drawn(lambda x: F["xtc"](x, 0.01, 0.5, F["iota"](2))),
    "all at once": drawn(lambda x: F["top_k_mask"](x, 400) & F["top_p"](x, 0.95) & F["typical"](x, 0.95) & F["min_p"](x, 0.001)),
    "penalties": penalised,
    "dry": dry,
    "mirostat": mirostat,
    "beam": beam,
}


def lanes_of(program: Any, params: Any) -> list[Lane]:
    lanes = []
    for row in (0, 2, 1, 0):
        cells = {}
        for chan, (_, dtype, shape) in enumerate(program.chans):
            rng = np.random.default_rng(row)
            values = {"u32": np.array([row, 77]), "f32": np.full(shape, 6.0), "i32": rng.integers(-1, 900, shape)}
            cells[chan] = values[dtype].astype(f"{dtype[0]}4")
        lanes.append(Lane(row, params, cells))
    return lanes


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    result = traced(SAMPLERS[name](), VOCAB)
    lanes, logits = lanes_of(result.program, result.params), logits_of(4)
    machine = cpu_machine()
    got = machine.run(Batch(result.program, lanes, logits))
    check(got, Batch(result.program, lanes, logits).oracle(), 1e-5, 1e-5, name)
    reverse = machine.run(Batch(result.program, lanes[::-1], logits))
    for i, answer in enumerate(got):
        assert same_bits(answer, reverse[-1 - i]) and same_bits(answer, machine.run(Batch(result.program, [lanes[i]], logits))[0])
    assert same_bits(got[0], got[3]), "copies of a lane agree"


def test_all_rows_of_a_pass_at_once() -> None:
    """outputs(): filters and samples row by row equal those of each row alone."""

    def fn(logits: Any) -> Any:
        keep = F["top_p"](logits, 0.9)
        return F["reduce_argmax"](F["masked"](logits, keep)), F["reduce_sum"](keep.cast("u32")), F["top_k"](logits, 5)[1]

    logits = logits_of(5, 1500)
    many = trace_epilogue(lambda: fn(intrinsics.outputs("logits")), Model(1500, 64), rows=3)
    one = traced(lambda: fn(intrinsics.output(0)), 1500)
    together = cpu_machine().run(Batch(many.program, [Lane(2, many.params)], logits))[0]
    check([together], Batch(many.program, [Lane(2, many.params)], logits).oracle())
    for row in range(3):
        alone = cpu_machine().run(Batch(one.program, [Lane(2 + row, one.params)], logits))[0]
        assert [np.asarray(a[row]).tolist() for a in together.outs] == [np.asarray(a).tolist() for a in alone.outs]


def test_a_nan_row_is_reported_and_samples_a_token() -> None:
    """Selection of a row with NaN ends, in bounds, and touches no other lane."""
    logits = logits_of(3)
    logits[1, ::2] = np.nan
    logits[2] = np.nan
    result = traced(SAMPLERS["all at once"](), VOCAB)
    batch = Batch(result.program, lanes_of(result.program, result.params)[:3], logits)
    got = cpu_machine().run(batch)
    assert [a.status for a in got] == [0, 1, 1]
    check(got, batch.oracle(), 1e-5, 1e-5)
