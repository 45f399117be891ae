"""The sampling library against formulas written independently, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pie_core.codegen.oracle import run_epilogue
from pie_core.eta import FUNCTIONS, LIBRARY, Model, intrinsics, trace_epilogue
from tests.eta.test_eta_trace import Chan

VOCAB = 300
LOGITS = np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)
P = np.exp(LOGITS.astype(np.float64) - LOGITS.max())
P /= P.sum()
F = FUNCTIONS


def run(fn: Callable[[], Any], logits: Any = LOGITS, cells: Any = ()) -> list[Any]:
    traced = trace_epilogue(fn, Model(VOCAB, 8))
    outs, _, status = run_epilogue(traced.program, traced.params, logits[None, :], None, 0, dict(enumerate(cells)))
    assert status == 0
    return outs


FORMULAS: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("softmax", F["softmax"], P),
    ("log_softmax", F["log_softmax"], np.log(P)),
    ("entropy", F["entropy"], -(P * np.log(P)).sum()),
    ("l2norm", F["l2norm"], LOGITS / np.sqrt((LOGITS.astype(np.float64) ** 2).sum())),
    ("min_p", lambda x: F["min_p"](x, 0.05), 0.05 * P.max() <= P),
]


@pytest.mark.parametrize(("name", "fn", "want"), FORMULAS)
def test_formulas(name: str, fn: Callable[[Any], Any], want: Any) -> None:
    (got,) = run(lambda: fn(intrinsics.output(0)))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=name)


def test_softmax_and_entropy_survive_extreme_logits() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[7] = 300.0
    (p, h) = run(lambda: (F["softmax"](intrinsics.output(0)), F["entropy"](intrinsics.output(0))), logits)
    assert p[7] == 1 and p.sum() == 1 and h == 0


def test_masked_argmax() -> None:
    mask, chan = np.zeros(VOCAB, bool), Chan("bool", (VOCAB,))
    mask[[5, 9, 200]] = True
    (best,) = run(lambda: F["masked_argmax"](intrinsics.output(0), chan.take()), cells=[mask])
    assert best == [5, 9, 200][int(np.argmax(LOGITS[[5, 9, 200]]))]
    (none,) = run(lambda: F["masked_argmax"](intrinsics.output(0), chan.take()), cells=[np.zeros(VOCAB, bool)])
    assert none == 0


def test_gumbel_max_samples_the_softmax() -> None:
    """4,000 counters: the observed counts of the likely tokens lie within five standard deviations."""
    logits = np.full(VOCAB, -30.0, np.float32)
    logits[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    rng = Chan("u32", (2,), is_counter=True)
    traced = trace_epilogue(lambda: F["gumbel_max"](intrinsics.output(0), rng.take()), Model(VOCAB, 8))
    counts = np.zeros(VOCAB, int)
    for i in range(4000):
        (token,), _, _ = run_epilogue(traced.program, traced.params, logits[None, :], None, 0, {0: np.array([9, i], np.uint32)})
        counts[int(token)] += 1
    want = np.array([0.5, 0.3, 0.15, 0.05])
    assert counts[4:].sum() == 0
    assert (np.abs(counts[:4] - 4000 * want) < 5 * np.sqrt(4000 * want * (1 - want))).all()


def test_the_library_is_the_whole_library() -> None:
    covered = {name for name, _, _ in FORMULAS} | {"masked_argmax", "gumbel_max", "uniform", "normal"}
    assert covered == set(LIBRARY)
