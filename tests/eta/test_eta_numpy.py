"""NumPy where a Tensor belongs, and the other way round: told in the author's terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pie_core.eta import TraceError, intrinsics, is_tracing, trace_epilogue
from tests.eta.test_eta_trace import MODEL

MISTAKES = [
    (lambda: np.exp(intrinsics.output(0)), "NumPy computes with values, and a Tensor has none"),
    (lambda: np.asarray(intrinsics.output(0)), "NumPy computes with values"),
    (lambda: np.float32(2) * intrinsics.output(0), r"NumPy computes with values.*x\.item\(\) for a number that NumPy made"),
    (lambda: intrinsics.output(0) * np.float32(2), r"mul takes Tensors and Python numbers, got float32; x\.item\(\) makes a Python number"),
    (lambda: intrinsics.output(0) + np.ones(100), r"add takes Tensors and Python numbers, got ndarray; .*Channel\.of\(x\.tolist\(\)\)"),
]


@pytest.mark.parametrize(("fn", "message"), MISTAKES)
def test_numpy_does_not_compute_with_tensors(fn: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_epilogue(fn, MODEL)
    assert not is_tracing(), "a failed trace leaves nothing behind"
