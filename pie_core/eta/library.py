"""The sampling library: one fixed expansion each, in one table. A faster kernel may replace an expansion only where it proves it equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pie_core.eta.errors import TraceError
from pie_core.eta.functions import TABLE_FUNCTIONS, rng_gumbel, rng_normal, rng_uniform
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor

exp, log, sqrt, maximum, select, reduce_sum, reduce_max, reduce_argmax = (
    TABLE_FUNCTIONS[name] for name in ("exp", "log", "sqrt", "maximum", "select", "reduce_sum", "reduce_max", "reduce_argmax")
)

TINY = 2.0**-126  # floor of a probability before its logarithm
NEG_INF = float("-inf")


def _vector(x: Any, what: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TraceError(f"{what} takes a Tensor, got {type(x).__name__}")
    if x.dtype != "f32" or len(x.shape) != 1:
        raise TraceError(f"{what} takes logits f32 [n], got {show(x.type)}")
    return x


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of logits f32 [n]: exp(x - max) / sum."""
    weights = exp(_vector(logits, "softmax") - reduce_max(logits))
    return weights / reduce_sum(weights)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of logits f32 [n]: x - max - ln sum exp(x - max)."""
    shifted = _vector(logits, "log_softmax") - reduce_max(logits)
    return shifted - log(reduce_sum(exp(shifted)))


def l2norm(x: Tensor, eps: Scalar = 1e-12) -> Tensor:
    """x f32 [n] scaled to unit length: x / sqrt(sum x^2 + eps)."""
    return _vector(x, "l2norm") / sqrt(reduce_sum(x * x) + eps)


def masked_argmax(logits: Tensor, mask: Tensor) -> Tensor:
    """i32 index of the largest logit where mask (bool [n]) is true; 0 when none is."""
    return reduce_argmax(select(mask, _vector(logits, "masked_argmax"), NEG_INF))


def gumbel_max(logits: Tensor, state: Tensor) -> Tensor:
    """i32 sample from softmax(logits): argmax(logits + Gumbel noise of `state`). Divide the logits by the temperature first."""
    return reduce_argmax(_vector(logits, "gumbel_max") + rng_gumbel(state, logits.shape))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), f32 scalar; probabilities are floored at 2^-126 inside the logarithm."""
    p = softmax(_vector(logits, "entropy"))
    return -reduce_sum(p * log(maximum(p, TINY)))


def min_p(logits: Tensor, p: Scalar | Tensor) -> Tensor:
    """bool [n]: tokens at least `p` times as likely as the likeliest one."""
    return _vector(logits, "min_p") >= reduce_max(logits) + log(_scalar(logits, p))


def uniform(state: Tensor, *shape: int) -> Tensor:
    """Uniform f32 in (0, 1) of `shape` from a state u32[2]."""
    return rng_uniform(state, shape)


def normal(state: Tensor, *shape: int) -> Tensor:
    """Standard normal f32 of `shape` from a state u32[2]."""
    return rng_normal(state, shape)


def _scalar(like: Tensor, value: Scalar | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.trace.constant(value, "f32")


LIBRARY: dict[str, Callable[..., Tensor]] = {
    fn.__name__: fn for fn in (softmax, log_softmax, l2norm, masked_argmax, gumbel_max, entropy, min_p, uniform, normal)
}
