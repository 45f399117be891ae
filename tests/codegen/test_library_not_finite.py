"""The library over rows that hold infinities and NaN, on both devices: the oracle's answers, so that no compiler's short cut shows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from pie_core.eta import Traced
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Answer, Batch, Lane, check
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches

NAN, INF, N = np.nan, np.inf, 600
FILTERS = {
    "top_p": 0.9, "min_p": 0.1, "top_a": 0.3, "epsilon_cutoff": 1.0, "eta_cutoff": 0.01, "typical": 0.5, "tail_free": 0.9, "top_k_mask": 2,
}  # fmt: skip
PUT = {
    "one +inf": [INF],
    "several +inf": [INF] * 3,
    "+inf and NaN": [NAN, INF, NAN],
    "NaN": [NAN, NAN],
    "-inf": [-INF] * N,
    "all NaN": [NAN] * N,
}


def row(name: str) -> Any:
    rng = np.random.default_rng(5)
    x = rng.normal(0, 3, N).astype(np.float32)
    x[rng.permutation(N)[: len(PUT[name])]] = PUT[name]
    return x


def program() -> Traced:
    def fn(x: Any, state: Any) -> Any:
        masks = [F[name](x, number) for name, number in FILTERS.items()] + [F["xtc"](x, 0.1, 1.0, state)]
        return *masks, *F["mirostat"](x, 6.0, state), F["softmax"](x), F["log_softmax"](x), F["entropy"](x)

    return over_cells(fn, ("f32", (N,)), ("u32", (2,)))


@lru_cache(maxsize=1)
def batch() -> Batch:
    traced = program()
    return Batch(traced.program, [Lane(0, traced.params, {0: row(name), 1: np.array([3, 4], np.uint32)}) for name in PUT])


@lru_cache(maxsize=2)
def answers(device: str) -> list[Answer]:
    return cpu_machine().run(batch()) if device == "cpu" else run_batches("lavapipe", [batch()])[0]


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_against_the_oracle(device: str) -> None:
    check(answers(device), batch().oracle(), 1e-5, 1e-5, device)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_masks_keep_the_likeliest_and_no_nan(device: str) -> None:
    for name, answer in zip(PUT, answers(device), strict=True):
        x = row(name)
        for which, keep in zip([*FILTERS, "xtc"], answer.outs, strict=False):
            kept = np.asarray(keep).astype(bool)
            assert not kept[np.isnan(x)].any() and (kept.any() or name == "all NaN"), (name, which)
            if INF in x:
                assert kept[np.flatnonzero(x == INF)[0]], (name, which)
        assert np.isfinite(answer.outs[len(FILTERS) + 2]), (name, "mu")
