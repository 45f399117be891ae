"""The library over rows that hold infinities and NaN: no filter leaves them empty, no NaN stays, and softmax says what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.eta.test_eta_library import INF, LOGITS, NAN, ONE_TOKEN, STATE, F, probabilities, run

FORCED: dict[str, tuple[list[float], set[int]]] = {  # logits, and tokens of which one or more stay while no others do
    "one +inf": ([0, 1, INF, 3, 2, 0], {2}),
    "+inf beside -inf": ([-INF, 1, -INF, 3, INF, 0], {4}),
    "several +inf": ([0, INF, 2, INF, INF, 1], {1, 3, 4}),
    "+inf and NaN": ([NAN, 1, INF, NAN, 2, 0], {2}),
    "-inf throughout": ([-INF] * 6, set(range(6))),
    "-inf and NaN": ([NAN, -INF, -INF, NAN, -INF, NAN], {1, 2, 4}),
}
FILTERS: dict[str, Callable[[Any], Any]] = dict(ONE_TOKEN) | {
    "top_p 0": lambda x: F["top_p"](x, 0), "top_p 1": lambda x: F["top_p"](x, 1), "min_p 1": lambda x: F["min_p"](x, 1),
    "top_a 1": lambda x: F["top_a"](x, 1), "epsilon 1": lambda x: F["epsilon_cutoff"](x, 1), "eta 1": lambda x: F["eta_cutoff"](x, 1),
    "typical 0": lambda x: F["typical"](x, 0), "typical 0.99": lambda x: F["typical"](x, 0.99),
    "tail_free 0": lambda x: F["tail_free"](x, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FORCED)
def test_filters_keep_the_likeliest_of_rows_that_are_not_finite(name: str) -> None:
    """A forced token stays, by every filter, and what is not as likely goes; a NaN never stays."""
    cells, likeliest = FORCED[name]
    for which, fn in FILTERS.items():
        (keep,) = run(fn, cells=[np.array(cells, np.float32)])
        assert keep.any() and set(np.flatnonzero(keep)) <= likeliest, (which, keep)
        if max(cells) == INF:
            assert keep[min(likeliest)], (which, "of several the first, which a sample draws, is kept")


@pytest.mark.parametrize("name", FORCED)
def test_samplers_of_rows_that_are_not_finite_draw_the_likeliest(name: str) -> None:
    cells, likeliest = FORCED[name]
    first = 0 if np.nanmax(cells) == -INF else min(likeliest)  # of a row that a mask leaves nothing of, token 0
    *tokens, mu = run(
        lambda x, s: (
            F["nucleus_sample"](x, 0.9, s), F["sample"](x, s, 0.7, top_p=0.9, min_p=0.1), F["sample"](x, s, 0.7, top_k=2),
            *F["mirostat"](x, 6.0, s),
        ),
        cells=[np.array(cells, np.float32), STATE],
    )  # fmt: skip
    assert tokens == [first] * 4
    assert mu == 6.5, "no surprise: mu moves by eta * tau"


def test_xtc_never_strikes_a_forced_token_and_never_keeps_a_nan() -> None:
    for cells, likeliest in FORCED.values():
        for threshold in (0.0, 0.1):
            (keep,) = run(lambda x, s, t=threshold: F["xtc"](x, t, 1.0, s), cells=[np.array(cells, np.float32), STATE])
            assert keep[min(likeliest)] and not keep[np.isnan(cells)].any(), (cells, threshold)


def test_a_row_of_nan_ends_up_empty_and_mu_stays_finite() -> None:
    row = np.full(6, NAN, np.float32)
    for which, fn in FILTERS.items():
        assert not run(fn, cells=[row])[0].any(), which
    token, mu = run(lambda x, s: F["mirostat"](x, 6.0, s), cells=[row, STATE])
    assert token == 0 and mu == 6.5


def test_a_nan_is_no_token_and_the_others_share() -> None:
    """What softmax, log_softmax, entropy and filters say of a row with a NaN is what they say of the row without it."""
    row = np.delete(LOGITS, 5)
    holed = np.insert(row, 5, np.float32(NAN))
    for which, fn in (FILTERS | {n: F[n] for n in ("softmax", "log_softmax")}).items():
        want, got = run(fn, cells=[row])[0], run(fn, cells=[holed])[0]
        assert not got[5] if got.dtype == bool else np.isnan(got[5]), which
        np.testing.assert_allclose(np.delete(got, 5).astype(float), want.astype(float), rtol=1e-5, err_msg=which)
    np.testing.assert_allclose(run(F["entropy"], cells=[holed])[0], run(F["entropy"], cells=[row])[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("cells", "p"),
    [((1.0, INF, 2.0), (0, 1, 0)), ((INF, 0.0, INF), (1, 0, 1)), ((NAN, INF, -INF), (NAN, 1, 0)), ((-INF, -INF), (0, 0)),
     ((NAN, NAN), (NAN, NAN)), ((-INF, NAN), (0, NAN)), ((4.0, -INF), (1, 0))],
)  # fmt: skip
def test_softmax_of_rows_that_are_not_finite(cells: tuple[float, ...], p: tuple[float, ...]) -> None:
    got, logs, spread = run(lambda x: (F["softmax"](x), F["log_softmax"](x), F["entropy"](x)), cells=[np.array(cells, np.float32)])
    np.testing.assert_array_equal(got, np.array(p, np.float32))
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(logs, np.log(np.array(p, np.float32)))
    assert spread == 0 and not np.signbit(spread), "0, and not -0"


def test_rows_of_a_matrix_are_told_apart() -> None:
    rows = np.array([[0, INF, 2, 1], [1, 2, 3, 9], [-INF] * 4, [NAN, 0, 9, NAN]], np.float32)
    for which in ("top_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff"):
        (keep,) = run(lambda x, which=which: F[which](x, 0.5), cells=[rows])  # type: ignore[misc]
        assert keep.tolist() == [[False, True, False, False], [False, False, False, True], keep[2].tolist(), [False, False, True, False]], (
            which
        )
        assert keep[2].any(), which
    p, logs, spread = run(lambda x: (F["softmax"](x), F["log_softmax"](x), F["entropy"](x)), cells=[rows])
    assert p[0].tolist() == [0, 1, 0, 0] and logs[0].tolist() == [-INF, 0, -INF, -INF] and p[2].tolist() == [0] * 4
    np.testing.assert_allclose(p[1], probabilities(rows[1]), rtol=1e-5)
    assert spread[0] == 0 == spread[2] and spread[1] > 0
