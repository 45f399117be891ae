"""Distributions over the last axis of logits f32 [n] or [m, n]: softmax, entropy, sampling by Gumbel noise; the base of the library."""

from __future__ import annotations

import math
from typing import Any

from pie_core.eta.advice import operand_advice
from pie_core.eta.errors import TraceError
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, iota, rng_gumbel, rng_normal, rng_uniform
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor
from pie_core.eta.trace import active_trace

exp, log, sqrt, maximum, select, reduce_sum, reduce_max, reduce_argmax = (
    TABLE_FUNCTIONS[name] for name in ("exp", "log", "sqrt", "maximum", "select", "reduce_sum", "reduce_max", "reduce_argmax")
)

TINY = 2.0**-126  # floor of a probability before its logarithm
NEG_INF = float("-inf")


def floats(x: Any, what: str, ranks: tuple[int, ...] = (1, 2)) -> Tensor:
    """x, if it is f32 of one of these ranks. Raises TraceError naming the function."""
    if not isinstance(x, Tensor):
        raise TraceError(f"{what} takes a Tensor, got {type(x).__name__}{operand_advice(x)}")
    if x.dtype != "f32" or len(x.shape) not in ranks:
        raise TraceError(f"{what} takes f32 {'[n]' if 2 not in ranks else '[n] or [m, n]'}, got {show(x.type)}")
    return x


def number(value: Any, what: str) -> None:
    """Raises TraceError naming `what` where value is no Python number (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        got = "nothing" if value is None else type(value).__name__
        raise TraceError(f"{what} is a number or a Tensor of f32, got {got}{operand_advice(value)}")


def scalar(like: Tensor, value: Scalar | Tensor, what: str) -> Tensor:
    """A number as an f32 value of the trace of `like`; a Tensor as it is. Raises TraceError naming `what` for a NaN and for what is no
    number."""
    if isinstance(value, Tensor):
        return value
    number(value, what)
    if isinstance(value, float) and math.isnan(value):
        raise TraceError(f"{what} is a number, got nan")
    return like.trace.constant(value, "f32")


def finite(like: Tensor, value: Scalar | Tensor, what: str) -> Tensor:
    """As `scalar`, for what an infinity has no meaning for either."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TraceError(f"{what} is a finite number, got {value}")
    return scalar(like, value, what)


def along(value: Tensor, x: Tensor) -> Tensor:
    """One value a row of x, over x's shape."""
    return broadcast(value, x.shape) if value.shape else value


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of logits f32 [n] or [m, n], along the last axis: exp(x - max) / sum. A row with +inf, and one of -inf throughout, has
    none: it is NaN. To force a token, give all others -inf."""
    floats(logits, "softmax")
    weights = exp(logits - along(reduce_max(logits), logits))
    return weights / along(reduce_sum(weights), logits)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of logits f32 [n] or [m, n], along the last axis: x - max - ln sum exp(x - max)."""
    floats(logits, "log_softmax")
    shifted = logits - along(reduce_max(logits), logits)
    return shifted - along(log(reduce_sum(exp(shifted))), logits)


def l2norm(x: Tensor, eps: Scalar = 1e-12) -> Tensor:
    """x f32 [n] or [m, n] with rows of unit length: x / sqrt(sum x^2 + eps)."""
    floats(x, "l2norm")
    return x / along(sqrt(reduce_sum(x * x) + scalar(x, eps, "l2norm: eps")), x)


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """logits where mask (bool, the same shape) is true, else -inf: how the masks of the filters are applied. A row where none is true
    is -inf throughout, and a sample of it is token 0."""
    return select(mask, floats(logits, "masked"), NEG_INF)


def masked_argmax(logits: Tensor, mask: Tensor) -> Tensor:
    """i32 index of the largest logit of each row where mask (bool, the same shape) is true; 0 when none is."""
    return reduce_argmax(select(mask, floats(logits, "masked_argmax"), NEG_INF))


def gumbel_max(logits: Tensor, state: Tensor) -> Tensor:
    """i32 sample from softmax(logits), one a row: argmax(logits + Gumbel noise of `state`). Divide the logits by the temperature first.
    A NaN is never drawn; a row of nothing but NaN (a temperature that only the device knows) or of -inf throughout (a mask without a true)
    gives 0, and no error: reduce_max(logits), -inf then, tells. Of several +inf the first is drawn."""
    return reduce_argmax(floats(logits, "gumbel_max") + rng_gumbel(state, logits.shape))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), f32, one a row; probabilities are floored at 2^-126 inside the logarithm."""
    p = softmax(floats(logits, "entropy"))
    return -reduce_sum(p * log(maximum(p, TINY)))


def uniform(state: Tensor, *shape: int) -> Tensor:
    """Uniform f32 in (0, 1) of `shape` from a state u32[2]."""
    return rng_uniform(state, shape)


def normal(state: Tensor, *shape: int) -> Tensor:
    """Standard normal f32 of `shape` from a state u32[2]."""
    return rng_normal(state, shape)


def rng_state(key: Tensor | int, counter: Tensor | int) -> Tensor:
    """The state u32[2] = [key, counter] of two u32 scalars: random numbers that depend on a token or a position, as a watermark needs."""
    trace = active_trace("rng_state")
    parts = [x if isinstance(x, Tensor) else trace.constant(x, "u32") for x in (key, counter)]
    for x in parts:
        if x.type != ("u32", ()):
            raise TraceError(f"rng_state takes two u32 scalars, got {show(x.type)}; x.cast('u32') first")
    return select(iota(2) == 0, *parts)


FUNCTIONS = (softmax, log_softmax, l2norm, masked, masked_argmax, gumbel_max, entropy, uniform, normal, rng_state)
