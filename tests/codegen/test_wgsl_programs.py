"""Samplers of several phases on lavapipe, in every form: against the oracle, lanes mixed, the same bits split and fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from pie_core.codegen import emit_epilogue_wgsl
from pie_core.eta import Model, Traced, intrinsics, trace_epilogue
from tests.codegen.author import Chan, F, counter
from tests.codegen.batch import Answer, Batch, Lane, check, same_bits
from tests.codegen.gpu import run_batches

VOCAB, HIDDEN, ROWS = 3001, 40, 6
FORMS = {"software": (32, 1, False), "fused": (256, 4, False), "split": (256, 4, True)}


def nucleus() -> Callable[[], Any]:
    rng = counter()
    return lambda: F["nucleus_sample"](intrinsics.output(0) / 0.8, 0.9, rng.take())


def top_k_sample() -> Callable[[], Any]:
    rng = counter()

    def fn() -> Any:
        values, ids = F["top_k"](intrinsics.output(0), 40)
        at = F["gumbel_max"](values / 0.7, rng.take())
        return F["gather"](ids, at), values

    return fn


def mirostat() -> Callable[[], Any]:
    """Surprise below mu, mu follows the surprise of the token: a chain stored for three phases, a lookup at a sampled index."""
    rng, mu = counter(), Chan("f32")

    def fn() -> Any:
        logits, most = intrinsics.output(0), mu.take()
        surprise = -F["log"](F["maximum"](F["softmax"](logits), 1e-30)) * 1.442695
        token = F["gumbel_max"](F["select"](surprise < most, logits, float("-inf")), rng.take())
        mu.put(most - 0.1 * (F["gather"](surprise, token) - 5.0))
        return token

    return fn


def penalties() -> Callable[[], Any]:
    counts = Chan("f32", (VOCAB,))

    def fn() -> Any:
        seen = counts.take()
        token = F["reduce_argmax"](intrinsics.output(0) - 2.0 * seen)
        counts.put(F["scatter_add"](seen, F["reshape"](token, 1), 1.0))
        return token

    return fn


def dry() -> Any:
    """A search by pairs of places, and a scatter into the logits; the tokens are drawn here, with runs that come again."""
    tokens = F["cast"](F["uniform"](F["iota"](2) + F["reduce_argmax"](intrinsics.output(0)).cast("u32"), 80) * 4.0, "i32")
    return F["dry"](intrinsics.output(0), tokens, 2.0, allowed=1)


def beams() -> Any:
    """The best of all rows of the pass together: a reduction of each row, a flat top-k, indices taken apart."""
    logp = F["log_softmax"](intrinsics.outputs())
    values, flat = F["top_k"](F["reshape"](logp, 3 * VOCAB), 4)
    return values, flat // VOCAB, flat % VOCAB, F["reduce_max"](logp)


def both() -> Any:
    """Folds of logits and hidden rows side by side, and a vector that two phases read from memory."""
    hidden = F["l2norm"](intrinsics.output(1, "hidden"))
    order = F["sort_desc"](hidden)[1]
    return F["gather"](hidden, order), F["cumsum"](hidden), F["reduce_max"](intrinsics.output(0)) + F["reduce_sum"](hidden)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "nucleus": nucleus(),
    "top_k": top_k_sample(),
    "mirostat": mirostat(),
    "penalties": penalties(),
    "typical": lambda: F["typical"](intrinsics.output(0), 0.9),
    "tail_free": lambda: F["tail_free"](intrinsics.output(0), 0.95),
    "dry": dry,
    "one_element": lambda: F["softmax"](intrinsics.output(0))[5],
    "kept": lambda: (F["top_p"](intrinsics.output(0), 0.9)[7], F["reduce_max"](intrinsics.output(0))),
    "beams": beams,
    "both": both,
}


@lru_cache(maxsize=1)
def batches() -> dict[str, list[Batch]]:
    """Of each program: four lanes, the same in reverse order, the first alone."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    hidden = rng.normal(0, 1, (ROWS, HIDDEN)).astype(np.float32)
    made = {}
    for name, fn in PROGRAMS.items():
        result: Traced = trace_epilogue(fn, Model(VOCAB, HIDDEN), rows=3)
        lanes = []
        for i in range(4):
            cells = {}
            for chan, (_, dtype, shape) in enumerate(result.program.chans):
                cells[chan] = np.array([9, i], np.uint32) if dtype == "u32" else np.full(shape, 6.0 if shape == () else i % 2, np.float32)
            lanes.append(Lane(i % (ROWS - result.program.reads + 1), result.params, cells))
        made[name] = [Batch(result.program, order, logits, hidden) for order in (lanes, lanes[::-1], lanes[:1])]
    return made


@lru_cache(maxsize=64)
def answers(name: str, form: str) -> list[list[Answer]]:
    workgroup, groups, split = FORMS[form]
    return run_batches("lavapipe", batches()[name], workgroup, groups, split=split)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_the_oracle(name: str, form: str) -> None:
    check(answers(name, form)[0], batches()[name][0].oracle(), 1e-5, 1e-5, f"{name} {form}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lanes_equal_their_solo_runs_bit_for_bit(name: str, form: str) -> None:
    together, reverse, alone = answers(name, form)
    for i, lane in enumerate(together):
        assert same_bits(lane, reverse[-1 - i]), f"lane {i} depends on the order of lanes"
    assert same_bits(together[0], alone[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_split_and_fused_have_the_same_bits(name: str) -> None:
    """A device chooses by the number of lanes, so nothing may depend on it."""
    for fused, split in zip(answers(name, "fused"), answers(name, "split"), strict=True):
        assert all(same_bits(a, b) for a, b in zip(fused, split, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_row_sets_the_status_of_its_lane_only(form: str) -> None:
    batch = batches()["nucleus"][0]
    assert batch.logits is not None
    logits = batch.logits.copy()
    logits[1, 2999] = np.nan
    workgroup, groups, split = FORMS[form]
    got = run_batches("lavapipe", [Batch(batch.program, batch.lanes, logits, batch.hidden)], workgroup, groups, split=split)[0]
    assert [a.status for a in got] == [int(lane.row == 1) for lane in batch.lanes]


@pytest.mark.parametrize("name", ["top_k", "pivot_rank"])
def test_a_vocabulary_of_262144(name: str) -> None:
    """Selection of 40, run: ties at the threshold, and the whole width in play."""
    n = 262_144
    programs = {
        "top_k": lambda: F["top_k"](intrinsics.output(0), 40),
        "pivot_rank": lambda: F["reduce_sum"](F["pivot_threshold"](intrinsics.output(0), rank=40).cast("u32")),
    }
    result = trace_epilogue(programs[name], Model(n, 1))
    logits = np.round(np.random.default_rng(2).normal(0, 4, (1, n)), 1).astype(np.float32)
    logits[0, [0, n - 1]] = 50.0
    batch = Batch(result.program, [Lane(0, result.params)], logits)
    check(run_batches("lavapipe", [batch], 64)[0], batch.oracle(), 0, 0)
    assert emit_epilogue_wgsl(result.program, 64).iterations > 4 * n // 64
