"""The library against formulas written independently, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pie_core.codegen.oracle import run_epilogue
from pie_core.eta import FUNCTIONS, LIBRARY, Model, TraceError, intrinsics, trace_epilogue
from pie_core.eta.numerics import uniform
from tests.eta.test_eta_trace import Chan

VOCAB = 300
RNG = np.random.default_rng(3)
ROWS = RNG.normal(0, 3, (3, VOCAB)).astype(np.float32)
LOGITS = ROWS[0]
COUNTS = RNG.integers(0, 3, VOCAB).astype(np.uint32)
STATE = np.array([9, 4], np.uint32)
F = FUNCTIONS
NAN, INF = float("nan"), float("inf")


def probabilities(x: Any) -> Any:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


P = probabilities(LOGITS)
H = -(P * np.log(P)).sum()


def run(fn: Callable[..., Any], logits: Any = ROWS, cells: Any = ()) -> list[Any]:
    """Outputs of fn over the values of channels that hold `cells`."""
    names = {"float32": "f32", "int32": "i32", "uint32": "u32", "bool": "bool"}
    channels = [Chan(names[str(np.asarray(c).dtype)], np.asarray(c).shape) for c in cells]
    logits = np.atleast_2d(logits)
    traced = trace_epilogue(lambda: fn(*[c.take() for c in channels]), Model(logits.shape[1], 8), rows=len(logits))
    assert traced.program.verify() == traced.program
    outs, _, status = run_epilogue(traced.program, traced.params, logits, None, 0, dict(enumerate(cells)))
    assert status == 0
    return outs


def row() -> Any:
    return intrinsics.output(0)


def top_p(p: Any, mass: float) -> Any:
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    before = 0.0
    for i in order:
        keep[i] = before < mass
        before += p[i]
    return keep


def typical(mass: float) -> Any:
    order = np.argsort(np.abs(-np.log(P) - H), kind="stable")
    keep = np.zeros(VOCAB, bool)
    keep[order[: np.searchsorted(np.cumsum(P[order]), mass) + 1]] = True
    keep[P.argmax()] = True
    return keep


def tail_free(z: float) -> Any:
    order = np.argsort(-P, kind="stable")
    curve = np.abs(np.diff(P[order], n=2))  # of tokens i, i + 1 and i + 2: that of i + 1
    total = np.cumsum(curve / curve.sum())
    keep = np.zeros(VOCAB, bool)
    keep[order[: 1 + int((total <= z).sum())]] = True
    return keep


def xtc(threshold: float) -> Any:
    keep = np.ones(VOCAB, bool)
    above = np.flatnonzero(threshold <= P)
    keep[above] = False
    keep[above[P[above].argmin()]] = True
    return keep


def dynamic(low: float, high: float, exponent: float) -> Any:
    return LOGITS / (low + (high - low) * (H / np.log(VOCAB)) ** exponent)


FORMULAS: list[tuple[str, Callable[[], Any], Any]] = [
    ("softmax", lambda: F["softmax"](row()), P),
    ("softmax", lambda: F["softmax"](intrinsics.outputs()), probabilities(ROWS)),
    ("log_softmax", lambda: F["log_softmax"](row()), np.log(P)),
    ("log_softmax", lambda: F["log_softmax"](intrinsics.outputs()), np.log(probabilities(ROWS))),
    ("entropy", lambda: F["entropy"](row()), H),
    ("entropy", lambda: F["entropy"](intrinsics.outputs()), -(probabilities(ROWS) * np.log(probabilities(ROWS))).sum(-1)),
    ("l2norm", lambda: F["l2norm"](row()), LOGITS / np.sqrt((LOGITS.astype(np.float64) ** 2).sum())),
    ("l2norm", lambda: F["l2norm"](intrinsics.outputs()), ROWS / np.sqrt((ROWS.astype(np.float64) ** 2).sum(-1, keepdims=True))),
    ("min_p", lambda: F["min_p"](row(), 0.05), P.max() * 0.05 <= P),
    ("min_p", lambda: F["min_p"](intrinsics.outputs(), 0.05), [p.max() * 0.05 <= p for p in probabilities(ROWS)]),
    ("top_k_mask", lambda: F["top_k_mask"](row(), 7), np.argsort(np.argsort(-P)) < 7),
    ("top_k_mask", lambda: F["top_k_mask"](intrinsics.outputs(), 7), np.argsort(np.argsort(-ROWS)) < 7),
    ("top_p", lambda: F["top_p"](row(), 0.7), top_p(P, 0.7)),
    ("top_p", lambda: F["top_p"](row(), 0.0), P.max() == P),
    ("top_p", lambda: F["top_p"](intrinsics.outputs(), 0.9), [top_p(p, 0.9) for p in probabilities(ROWS)]),
    ("top_a", lambda: F["top_a"](row(), 0.2), P.max() ** 2 * 0.2 <= P),
    ("top_a", lambda: F["top_a"](intrinsics.outputs(), 0.2), [p.max() ** 2 * 0.2 <= p for p in probabilities(ROWS)]),
    ("epsilon_cutoff", lambda: F["epsilon_cutoff"](row(), 0.004), P >= 0.004),
    ("epsilon_cutoff", lambda: F["epsilon_cutoff"](row(), 0.99), P.max() == P),
    ("eta_cutoff", lambda: F["eta_cutoff"](row(), 0.002), min(0.002, np.sqrt(0.002) * np.exp(-H)) <= P),
    ("eta_cutoff", lambda: F["eta_cutoff"](row(), 0.9), min(P.max(), np.sqrt(0.9) * np.exp(-H)) <= P),
    ("typical", lambda: F["typical"](row(), 0.6), typical(0.6)),
    ("typical", lambda: F["typical"](row(), 0.01), typical(0.01)),
    ("tail_free", lambda: F["tail_free"](row(), 0.9), tail_free(0.9)),
    ("tail_free", lambda: F["tail_free"](row(), 0.3), tail_free(0.3)),
    ("dynamic_temperature", lambda: F["dynamic_temperature"](row(), 0.5, 1.5), dynamic(0.5, 1.5, 1)),
    ("dynamic_temperature", lambda: F["dynamic_temperature"](row(), 0.5, 1.5, 2.5), dynamic(0.5, 1.5, 2.5)),
    ("entropy_temperature", lambda: F["entropy_temperature"](row(), 0.9, 1.2), LOGITS / (0.9 * 0.8 ** (1.2 / H))),
]


@pytest.mark.parametrize(("name", "fn", "want"), FORMULAS)
def test_formulas(name: str, fn: Callable[[], Any], want: Any) -> None:
    (got,) = run(fn)
    if np.asarray(want).dtype == bool:
        assert 0 < np.asarray(want).sum() < np.asarray(want).size, "a mask that keeps all or none tests nothing"
        np.testing.assert_array_equal(got, want, err_msg=name)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=name)


SEEN = COUNTS > 0
OVER_COUNTS: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("repetition_penalty", lambda c: F["repetition_penalty"](row(), c, 1.3),
     np.where(SEEN, np.where(LOGITS > 0, LOGITS / 1.3, LOGITS * 1.3), LOGITS)),
    ("presence_penalty", lambda c: F["presence_penalty"](row(), c, 1), LOGITS - SEEN),
    ("frequency_penalty", lambda c: F["frequency_penalty"](row(), c, 0.4), LOGITS - 0.4 * COUNTS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "want"), OVER_COUNTS)
@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.float32])
def test_penalties_over_counts(name: str, fn: Callable[[Any], Any], want: Any, dtype: Any) -> None:
    (got,) = run(fn, cells=[COUNTS.astype(dtype)])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("dtype", "padding"), [(np.int32, -1), (np.uint32, 0xFFFFFFFF)])
def test_token_counts_skip_padding(dtype: Any, padding: int) -> None:
    ids = np.array([5, 9, 5, padding, VOCAB, 5], dtype)
    (got,) = run(lambda history: F["token_counts"](history, VOCAB), cells=[ids])
    want = np.zeros(VOCAB)
    want[[5, 9]] = 3, 1
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("z", [0.3, 0.9, 0.99])
def test_tail_free_keeps_all_that_are_as_likely_as_its_last(z: float) -> None:
    ties = np.round(LOGITS)
    (keep,) = run(lambda: F["tail_free"](row(), z), ties)
    assert 0 < keep.sum() < VOCAB and keep.sum() == (ties >= ties[keep].min()).sum()


def runs(history: list[int], breakers: set[int]) -> dict[int, int]:
    """The longest run, of up to 32 tokens, that each token would make come again: by looking at every place."""
    longest: dict[int, int] = {}
    for i in range(len(history) - 1):
        run = 0
        while run < min(i + 1, 32) and history[i - run] == history[-1 - run] and history[i - run] >= 0 and history[i - run] not in breakers:
            run += 1
        longest[history[i + 1]] = max(run, longest.get(history[i + 1], 0))
    return longest


HISTORIES = {
    "random": RNG.integers(0, 4, 90).tolist(),
    "padded": [-1] * 40 + RNG.integers(0, 3, 50).tolist(),
    "one token": [7] * 60,
    "nothing": [-1] * 20,
    "token 0": [0, 0, 5, 0, 0],
    "period": [3, 1, 4, 1, 5] * 12,
    "one place": [2],
    "outside": [900, 4, 900, 4],
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize(("allowed", "stops"), [(1, set()), (2, {2}), (4, {1, 7})])
def test_dry_lowers_what_would_repeat(name: str, allowed: int, stops: set[int]) -> None:
    history = HISTORIES[name]
    want = LOGITS.astype(np.float64)
    for token, run_of in runs(history, stops).items():
        if run_of >= allowed and 0 <= token < VOCAB:
            want[token] -= 0.8 * 1.75 ** (run_of - allowed)
    flags = np.isin(np.arange(VOCAB), list(stops))
    cells = [np.array(history, np.int32), flags]
    (got,) = run(lambda h, b: F["dry"](row(), h, 0.8, 1.75, allowed, b), cells=cells)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert (got != LOGITS).any() == any(n >= allowed and t in range(VOCAB) for t, n in runs(history, stops).items())
    if not stops:
        np.testing.assert_array_equal(run(lambda h: F["dry"](row(), h, allowed=allowed), cells=cells[:1])[0], got)


@pytest.mark.parametrize("counter", range(8))
def test_xtc_strikes_by_one_draw(counter: int) -> None:
    state = np.array([9, counter], np.uint32)
    (got,) = run(lambda s: F["xtc"](row(), 0.05, 0.5, s), cells=[state])
    struck = uniform(np, state, 1)[0] < 0.5
    np.testing.assert_array_equal(got, xtc(0.05) if struck else np.ones(VOCAB, bool))
    assert not xtc(0.05).all()


def test_xtc_leaves_a_single_likely_token() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[4] = 20
    (got,) = run(lambda s: F["xtc"](row(), 0.5, 1.0, s), logits, [STATE])
    assert got.all()


def test_softmax_and_entropy_survive_extreme_logits() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[7] = 300.0
    (p, h) = run(lambda: (F["softmax"](row()), F["entropy"](row())), logits)
    assert p[7] == 1 and p.sum() == 1 and h == 0


ONE_TOKEN = [
    ("top_p", lambda x: F["top_p"](x, 0.9)), ("min_p", lambda x: F["min_p"](x, 0.1)), ("top_a", lambda x: F["top_a"](x, 0.3)),
    ("epsilon_cutoff", lambda x: F["epsilon_cutoff"](x, 0.1)), ("eta_cutoff", lambda x: F["eta_cutoff"](x, 0.1)),
    ("typical", lambda x: F["typical"](x, 0.5)), ("tail_free", lambda x: F["tail_free"](x, 0.5)),
    ("top_k_mask", lambda x: F["top_k_mask"](x, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn"), ONE_TOKEN)
def test_filters_survive_a_certain_distribution(name: str, fn: Callable[[Any], Any]) -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[7] = 300.0
    (keep,) = run(lambda: fn(row()), logits)
    assert keep[7] and keep.sum() == 1, name


@pytest.mark.parametrize("n", [1, 2, 3])
def test_filters_of_the_smallest_vocabularies_keep_the_likeliest(n: int) -> None:
    logits = np.arange(n, dtype=np.float32)
    for name, fn in ONE_TOKEN:
        (keep,) = run(lambda fn=fn: fn(row()), logits)  # type: ignore[misc]
        assert keep[n - 1], name


def test_masks() -> None:
    mask = np.zeros(VOCAB, bool)
    mask[[5, 9, 200]] = True
    best, kept = run(lambda m: (F["masked_argmax"](row(), m), F["masked"](row(), m)), cells=[mask])
    assert best == [5, 9, 200][int(np.argmax(LOGITS[[5, 9, 200]]))]
    np.testing.assert_array_equal(kept, np.where(mask, LOGITS, -np.inf))
    (none,) = run(lambda m: F["masked_argmax"](row(), m), cells=[np.zeros(VOCAB, bool)])
    assert none == 0


def counts_of(fn: Callable[[Any], Any], logits: Any, draws: int = 4000) -> Any:
    rng = Chan("u32", (2,), is_counter=True)
    traced = trace_epilogue(lambda: fn(rng.take()), Model(VOCAB, 8))
    counts = np.zeros(VOCAB, int)
    for i in range(draws):
        (token, *_), _, _ = run_epilogue(traced.program, traced.params, logits[None, :], None, 0, {0: np.array([9, i], np.uint32)})
        counts[int(token)] += 1
    return counts


SAMPLERS = [
    ("gumbel_max", lambda s: F["gumbel_max"](row(), s), [0.5, 0.3, 0.15, 0.05]),
    ("nucleus_sample", lambda s: F["nucleus_sample"](row(), 0.7, s), [0.625, 0.375, 0, 0]),
    ("sample", lambda s: F["sample"](row(), s, 0.5, top_k=3, min_p=0.2), [0.25 / 0.34, 0.09 / 0.34, 0, 0]),
    ("sample", lambda s: F["sample"](row(), s, top_p=0.9), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ("mirostat", lambda s: F["mirostat"](row(), F["constant"](2.0, "f32"), s), [0.625, 0.375, 0, 0]),
]


@pytest.mark.parametrize(("name", "fn", "want"), SAMPLERS)
def test_samplers_follow_their_distribution(name: str, fn: Callable[[Any], Any], want: Any) -> None:
    """4,000 counters: the observed counts of the likely tokens lie within five standard deviations."""
    logits = np.full(VOCAB, -30.0, np.float32)
    logits[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    counts, want = counts_of(fn, logits), np.array(want)
    assert counts[4:].sum() == 0, name
    assert (np.abs(counts[:4] - 4000 * want) <= 5 * np.sqrt(4000 * want * (1 - want))).all(), (name, counts[:4])


def test_a_matrix_is_sampled_row_by_row_with_noise_of_its_own() -> None:
    same = np.tile(np.zeros(VOCAB, np.float32), (3, 1))
    tokens, one = run(lambda s: (F["gumbel_max"](intrinsics.outputs(), s), F["gumbel_max"](row(), s)), same, [STATE])
    assert tokens.shape == (3,) and len(set(tokens.tolist())) == 3 and tokens[0] == one
    greedy, masked = run(lambda s: (F["sample"](intrinsics.outputs(), s, 0), F["sample"](intrinsics.outputs(), s, top_k=1)), ROWS, [STATE])
    np.testing.assert_array_equal(greedy, ROWS.argmax(-1))
    np.testing.assert_array_equal(masked, ROWS.argmax(-1))


def test_mirostat_moves_mu_by_the_surprise_of_the_kept() -> None:
    mu = np.float32(6.0)
    token, after = run(lambda m, s: F["mirostat"](row(), m, s, tau=3.0, eta=0.2), cells=[mu, STATE])
    kept = np.where(-np.log2(P) <= mu, P, 0)
    assert 0 < (kept > 0).sum() < VOCAB and kept[token] > 0
    np.testing.assert_allclose(after, mu - 0.2 * (-np.log2(kept[token] / kept.sum()) - 3.0), rtol=1e-5)
    token, after = run(lambda m, s: F["mirostat"](row(), m, s), cells=[np.float32(-1.0), STATE])
    assert token == LOGITS.argmax() and np.isclose(after, -1.0 + 0.5), "the likeliest token stays at any mu"


POSITIONS = np.array([0, 3, 7, 8], np.uint32), np.arange(10, dtype=np.uint32)
Q, K = POSITIONS[0][:, None].astype(int), POSITIONS[1][None, :].astype(int)
ATTENTION = [
    ("causal_mask", F["causal_mask"], K <= Q),
    ("sliding_mask", lambda q, k: F["sliding_mask"](q, k, 3), (K <= Q) & (K > Q - 3)),
    ("sink_mask", lambda q, k: F["sink_mask"](q, k, 3, 2), (K <= Q) & ((K > Q - 3) | (K < 2))),
]


@pytest.mark.parametrize(("name", "fn", "want"), ATTENTION)
def test_attention_masks(name: str, fn: Callable[..., Any], want: Any) -> None:
    (got,) = run(fn, cells=POSITIONS)
    np.testing.assert_array_equal(got, want, err_msg=name)


REFUSED = [
    (lambda: F["top_p"](row(), 1.5), "top_p: p lies between 0 and 1, got 1.5"),
    (lambda: F["min_p"](row(), -0.1), "min_p: p lies between 0 and 1"),
    (lambda: F["top_k_mask"](row(), 0), "k is an int of 1 or more, got 0"),
    (lambda: F["top_k_mask"](row(), 2.0), "k is an int of 1 or more, got 2.0"),
    (lambda: F["typical"](intrinsics.outputs(), 0.9), r"typical takes f32 \[n\], got f32\[3, 300\]"),
    (lambda: F["sample"](row(), F["iota"](2), -1), r"sample: temperature is 0 \(greedy\) or 1e-30 or more, got -1"),
    (lambda: F["sample"](row(), F["iota"](2), 1e-45), r"sample: temperature is 0 \(greedy\) or 1e-30 or more, got 1e-45"),
    (lambda: F["sample"](row(), F["iota"](2), NAN), "sample: temperature is a finite number, got nan"),
    (lambda: F["sample"](row(), F["iota"](2), INF), "sample: temperature is a finite number, got inf"),
    (lambda: F["dynamic_temperature"](row(), NAN, 1.0), "dynamic_temperature: low is a finite number, got nan"),
    (lambda: F["dynamic_temperature"](row(), 0.5, INF), "dynamic_temperature: high is a finite number, got inf"),
    (lambda: F["dynamic_temperature"](row(), 0.5, 1.0, NAN), "dynamic_temperature: exponent is a finite number, got nan"),
    (lambda: F["entropy_temperature"](row(), INF, 1.0), "entropy_temperature: temperature is a finite number, got inf"),
    (lambda: F["entropy_temperature"](row(), 1.0, NAN), "entropy_temperature: theta is a finite number, got nan"),
    (lambda: F["mirostat"](row(), row()[0], F["iota"](2), tau=NAN), "mirostat: tau is a finite number, got nan"),
    (lambda: F["mirostat"](row(), row()[0], F["iota"](2), eta=-INF), "mirostat: eta is a finite number, got -inf"),
    (lambda: F["top_p"](row(), NAN), "top_p: p lies between 0 and 1, got nan"),
    (lambda: F["epsilon_cutoff"](row(), NAN), "epsilon_cutoff: epsilon lies between 0 and 1, got nan"),
    (lambda: F["eta_cutoff"](row(), NAN), "eta_cutoff: epsilon lies between 0 and 1, got nan"),
    (lambda: F["typical"](row(), NAN), "typical: mass is 0 or more, got nan"),
    (lambda: F["tail_free"](row(), NAN), "tail_free: z is 0 or more, got nan"),
    (lambda: F["xtc"](row(), NAN, 0.5, F["iota"](2)), "xtc: threshold is 0 or more, got nan"),
    (lambda: F["xtc"](row(), 0.5, NAN, F["iota"](2)), "xtc: probability lies between 0 and 1, got nan"),
    (lambda: F["repetition_penalty"](row(), F["iota"](VOCAB), NAN), "repetition_penalty: penalty is a finite number, got nan"),
    (lambda: F["repetition_penalty"](row(), F["iota"](VOCAB), 0.0), "repetition_penalty: penalty is over 0"),
    (lambda: F["presence_penalty"](row(), F["iota"](VOCAB), NAN), "presence_penalty: penalty is a number, got nan"),
    (lambda: F["frequency_penalty"](row(), F["iota"](VOCAB), NAN), "frequency_penalty: penalty is a finite number, got nan"),
    (lambda: F["l2norm"](row(), NAN), "l2norm: eps is a number, got nan"),
    (lambda: F["entropy_temperature"](row(), 1.0, 1.0, 2.0), "base lies between 0 and 1"),
    (lambda: F["dry"](row(), F["iota"](5)), r"dry takes the history as i32 \[m\], got u32\[5\]"),
    (lambda: F["dry"](row(), [1, 2]), r"dry takes the history as i32 \[m\], got list"),
    (lambda: F["dry"](row(), F["iota"](2049).cast("i32")), "dry: a history holds up to 2048 tokens, got 2049"),
    (lambda: F["dry"](intrinsics.outputs(), F["iota"](5).cast("i32")), r"dry takes f32 \[n\], got f32\[3, 300\]"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), NAN), "dry: multiplier is a finite number, got nan"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), base=0.5), "dry: base is a Python number from 1 to 10, got 0.5"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), base="2"), "dry: base is a Python number from 1 to 10, got 2"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), allowed=0), "dry: allowed is an int from 1 to 32, got 0"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), allowed=2.0), "dry: allowed is an int from 1 to 32, got 2.0"),
    (lambda: F["dry"](row(), F["iota"](5).cast("i32"), breakers=row()), r"dry: breakers are bool \[300\], a flag .* got f32\[300\]"),
    (lambda: F["causal_mask"](F["iota"](3), row()), r"causal_mask takes keys as positions u32 \[n\], got f32\[300\]"),
    (lambda: F["causal_mask"](3, F["iota"](3)), r"takes queries as positions u32 \[n\], got int"),
    (lambda: F["rng_state"](row(), 3), r"rng_state takes two u32 scalars, got f32\[300\]"),
    (lambda: F["rng_state"](-1, 3), "constant -1 does not fit u32"),
    (lambda: F["softmax"]([1.0]), "softmax takes a Tensor, got list"),
    (lambda: F["top_p"](row(), "0.9"), "top_p: p is a number or a Tensor of f32, got str"),
    (lambda: F["top_p"](row(), F["iota"](2)), r"top_p: p is a number or a Tensor f32\[\], got u32\[2\]"),
    (lambda: F["min_p"](row(), row()), r"min_p: p is a number or a Tensor f32\[\], got f32\[300\]"),
    (lambda: F["min_p"](row(), F["constant"](1, "i32")), r"min_p: p is .* got i32\[\]; cast\(x, 'f32'\) first"),
    (lambda: F["min_p"](intrinsics.outputs(), row()), r"a Tensor f32\[\], or f32\[3\], one a row, got f32\[300\]"),
    (lambda: F["epsilon_cutoff"](row(), 2), "epsilon_cutoff: epsilon lies between 0 and 1, got 2"),
    (lambda: F["epsilon_cutoff"](row(), -0.1), "epsilon_cutoff: epsilon lies between 0 and 1, got -0.1"),
    (lambda: F["eta_cutoff"](row(), 1.1), "eta_cutoff: epsilon lies between 0 and 1, got 1.1"),
    (lambda: F["eta_cutoff"](row(), -1), "eta_cutoff: epsilon lies between 0 and 1, got -1"),
    (lambda: F["typical"](row(), -0.5), "typical: mass is 0 or more, got -0.5"),
    (lambda: F["tail_free"](row(), -1), "tail_free: z is 0 or more, got -1"),
    (lambda: F["xtc"](row(), -0.1, 0.5, F["iota"](2)), "xtc: threshold is 0 or more, got -0.1"),
    (lambda: F["xtc"](row(), 0.1, 2.0, F["iota"](2)), "xtc: probability lies between 0 and 1, got 2.0"),
    (lambda: F["xtc"](row(), 0.1, -1, F["iota"](2)), "xtc: probability lies between 0 and 1, got -1"),
    (lambda: F["nucleus_sample"](row(), F["iota"](2), 0.9), r"nucleus_sample\(logits, p, state\) takes a state u32\[2\] last, got float"),
    (lambda: F["nucleus_sample"](row(), 0.9, row()), r"takes a state u32\[2\] last, got f32\[300\]"),
    (lambda: F["sample"](row(), F["iota"](2), row()), r"sample: temperature is a number or a Tensor f32\[\], got f32\[300\]"),
    (lambda: F["sample"](row(), F["iota"](2), "1"), "sample: temperature is a number or a Tensor of f32, got str"),
    (lambda: F["sample"](row(), F["iota"](2), None), "sample: temperature is a number or a Tensor of f32, got nothing"),
    (lambda: F["mirostat"](row(), NAN, F["iota"](2)), "mirostat: mu is a finite number, got nan"),
    (lambda: F["mirostat"](row(), row(), F["iota"](2)), r"mirostat: mu is a number or a Tensor f32\[\], got f32\[300\]"),
    (lambda: F["mirostat"](row(), 6.0, F["iota"](2), -1), "mirostat: tau is 0 or more, got -1"),
    (lambda: F["mirostat"](row(), 6.0, F["iota"](2), 5.0, -0.1), "mirostat: eta is 0 or more, got -0.1"),
    (lambda: F["repetition_penalty"](row(), F["iota"](VOCAB), -1.2), "repetition_penalty: penalty is over 0 .* got -1.2"),
    (
        lambda: F["repetition_penalty"](row(), F["iota"](5), 1.2),
        r"repetition_penalty takes counts of the logits' shape \[300\], got u32\[5\]",
    ),
    (lambda: F["frequency_penalty"](row(), [1, 2], 1.0), "frequency_penalty takes counts .* got list; token_counts"),
    (lambda: F["presence_penalty"](row(), None, 1.0), "presence_penalty takes counts .* got NoneType"),
    (lambda: F["token_counts"](VOCAB, F["iota"](5)), r"token_counts\(ids, n\) takes ids .* got int 300 and u32\[5\]"),
    (lambda: F["token_counts"](F["iota"](5), 0), r"token_counts\(ids, n\) takes ids .* got u32\[5\] and int 0"),
    (lambda: F["token_counts"]([1, 2], 5), r"got list \[1, 2\] and int 5; values enter through Channel.of"),
    (lambda: F["sliding_mask"](F["iota"](3), F["iota"](3), 0), r"sliding_mask: window is an int of 1 or more, or a Tensor u32\[\], got 0"),
    (lambda: F["sink_mask"](F["iota"](3), F["iota"](3), 2.0, 1), "sink_mask: window is an int of 1 or more, .* got 2.0"),
    (lambda: F["sink_mask"](F["iota"](3), F["iota"](3), 2, -1), "sink_mask: sinks is an int of 0 or more, .* got -1"),
    (lambda: F["entropy_temperature"](row(), 1.0, 1.0, "a"), "entropy_temperature: base is a number .* got str"),
    (lambda: F["entropy_temperature"](row(), 1.0, 1.0, row()[0]), "entropy_temperature: base is a Python number, got a Tensor"),
    (lambda: row() / 1e40, r"div: constant 1e\+40 does not fit f32"),
    (lambda: F["reshape"](row(), (-1, -1)), r"reshape: a shape has at most 4 extents of 1 or more .* got \(-1, -1\)"),
    (lambda: F["reshape"](row(), (7, -1)), r"reshape .*\[300\].*\[7, 42\]"),
    (lambda: F["iota"](F["reduce_argmax"](row())), "iota: shapes are fixed while a program is traced"),
    (lambda: F["gather"](row(), [1, 2]), r"values enter through Channel.of\(values\) and .take\(\)"),
    (lambda: F["masked"](row(), row() > 0.0) + F["masked"](row(), row()), "select takes a bool condition"),
]


@pytest.mark.parametrize(("fn", "message"), REFUSED)
def test_arguments_that_make_no_sense_are_refused(fn: Callable[[], Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_epilogue(fn, Model(VOCAB, 8), rows=3)


@pytest.mark.parametrize("cold", [0.0, 1e-45, -1.0, NAN])
def test_a_temperature_that_only_the_device_knows_is_greedy_where_it_is_too_small(cold: float) -> None:
    (token,) = run(lambda t, s: F["sample"](row(), s, t), cells=[np.float32(cold), STATE])
    assert token == LOGITS.argmax()


@pytest.mark.parametrize(("cells", "token"), [((NAN, NAN, NAN), 0), ((-INF, -INF, -INF), 0), ((NAN, -INF, -INF), 1), ((NAN, 3.0, 9.0), 2)])
def test_what_a_row_of_nan_or_nothing_gives(cells: tuple[float, ...], token: int) -> None:
    """As the reference says: no error, and the lowest index of the largest that is no NaN."""
    row = np.array(cells, np.float32)
    assert run(lambda x, s: (F["gumbel_max"](x * 1e6, s), F["reduce_argmax"](x)), cells=[row, STATE]) == [token, token]


def test_a_temperature_a_row() -> None:
    (tokens,) = run(lambda t, s: F["sample"](intrinsics.outputs(), s, t), cells=[np.array([1e-30, 1e-30, 1e-30], np.float32), STATE])
    np.testing.assert_array_equal(tokens, ROWS.argmax(-1))


def test_what_two_functions_compute_of_a_row_is_computed_once() -> None:
    program = trace_epilogue(lambda: (F["softmax"](row()), F["entropy"](row()), F["top_p"](row(), 0.9)), Model(VOCAB, 8)).program
    names = [node.name for node in program.ops]
    assert names.count("exp") == 1 and names.count("reduce_max") == 1 and names.count("reduce_sum") == 2


def test_one_extent_of_a_shape_may_be_left_open() -> None:
    got = run(lambda: (F["reshape"](row(), (-1, 100)), F["reshape"](intrinsics.outputs(), -1), F["reshape"](row(), [3, -1, 10])))
    assert [x.shape for x in got] == [(3, 100), (3 * VOCAB,), (3, 10, 10)]
    np.testing.assert_array_equal(got[1], ROWS.ravel())


def test_penalties_take_flags() -> None:
    got = run(lambda c: (F["presence_penalty"](row(), c, 1), F["repetition_penalty"](row(), c, 1.3)), cells=[SEEN])
    for mask, want in zip(got, (OVER_COUNTS[1][2], OVER_COUNTS[0][2]), strict=True):
        np.testing.assert_allclose(mask, want, rtol=1e-6, atol=1e-6)


def test_tensors_as_arguments() -> None:
    """Thresholds that come from a channel, over the range: cut off, so that no row goes empty."""
    (one, most, some, k) = run(
        lambda p, n: (F["top_p"](row(), p - 0.5), F["min_p"](row(), p + 2.0), F["top_p"](row(), p), F["top_k_mask"](row(), n)),
        cells=[np.float32(0.4), np.int32(-3)],
    )
    for mask in (one, most, k):
        np.testing.assert_array_equal(mask, P.max() == P)
    np.testing.assert_array_equal(some, top_p(P, 0.4))


def test_a_green_list_by_the_token_before() -> None:
    """rng_state: the draw depends on a token and a key, the same on every device, and any other token has another list."""
    model = F["rng_state"]
    (state, green, other) = run(
        lambda t: (model(17, t.cast("u32")), F["uniform"](model(17, t.cast("u32")), VOCAB) < 0.5, F["uniform"](model(17, 8), VOCAB) < 0.5),
        cells=[np.int32(7)],
    )
    np.testing.assert_array_equal(state, np.array([17, 7], np.uint32))
    np.testing.assert_array_equal(green, uniform(np, np.array([17, 7], np.uint32), VOCAB) < 0.5)
    assert (green != other).any()


def test_the_library_is_the_whole_library() -> None:
    covered = {name for table in (FORMULAS, OVER_COUNTS, SAMPLERS, ATTENTION) for name, _, _ in table}
    covered |= {"masked", "masked_argmax", "token_counts", "dry", "xtc", "uniform", "normal", "rng_state"}
    assert covered == set(LIBRARY)
