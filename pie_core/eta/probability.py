"""Distributions over the last axis of logits f32 [n] or [m, n]: softmax, entropy, sampling by Gumbel noise; the base of the library.

A logit of +inf is certain: beside it nothing else comes. A NaN is no token, the others share as if it were not there. Of a row of -inf
throughout nothing comes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pie_core.eta.advice import operand_advice
from pie_core.eta.dtypes import F32_MAX, f32_bits
from pie_core.eta.errors import TraceError
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, iota, rng_gumbel, rng_normal, rng_uniform
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor
from pie_core.eta.tracing import active_trace

exp, log, sqrt, absolute, maximum, minimum, select, reduce_sum, reduce_max, reduce_argmax = (
    TABLE_FUNCTIONS[name]
    for name in ("exp", "log", "sqrt", "absolute", "maximum", "minimum", "select", "reduce_sum", "reduce_max", "reduce_argmax")
)

TINY = 2.0**-126  # floor of what is divided by or has its logarithm taken
INF, NEG_INF = float("inf"), float("-inf")


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


def _cast(value: Tensor) -> str:
    return "; cast(x, 'f32') first" if value.dtype != "f32" and not value.shape else ""


def scalar(like: Tensor, value: Scalar | Tensor, what: str) -> Tensor:
    """A number as an f32 value of the trace of `like`; a Tensor, f32 and one number or one a row of `like`, as it is. Raises TraceError
    naming `what` for a NaN, for what is no number, and for Tensors of another type."""
    if isinstance(value, Tensor):
        rows = like.shape[:-1]
        if value.dtype != "f32" or value.shape not in ((), rows):
            several = f", or f32{list(rows)}, one a row" if rows else ""
            raise TraceError(f"{what} is a number or a Tensor f32[]{several}, got {show(value.type)}{_cast(value)}")
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


def within(like: Tensor, value: Scalar | Tensor, low: float, high: float, what: str) -> Tensor:
    """As `scalar`, for a number from `low` to `high` (inf: no bound). A Tensor is cut off there, and a NaN in it is `high`."""
    if isinstance(value, Tensor):
        value = scalar(like, value, what)
        return maximum(minimum(value, fixed(like, high)), fixed(like, low))
    number(value, what)
    if not low <= value <= high:
        bounds = f"lies between {low:g} and {high:g}" if high < INF else f"is {low:g} or more"
        raise TraceError(f"{what} {bounds}, got {value}")
    return scalar(like, value, what)


def fixed(like: Tensor, value: float) -> Tensor:
    """A number that belongs to an expansion: the same value each time, so that what two functions compute of a row is computed once."""
    return like.trace.add("const", (), {"bits": f32_bits(value)}, ("f32", ()))


def along(value: Tensor, x: Tensor) -> Tensor:
    """One value a row of x, over x's shape."""
    return broadcast(value, x.shape) if value.shape else value


class Weights(NamedTuple):
    """`best`: the largest logit of each row, -inf where there is none; `shift`: the finite number next to it. `shifted`: logits less that,
    +inf for a logit of +inf. `weights`: e to that. `total`: the sum of a row's, 1 or more: 1 where a weight is infinite, and where there
    is none."""

    best: Tensor
    shift: Tensor
    shifted: Tensor
    weights: Tensor
    total: Tensor


def weigh(logits: Tensor) -> Weights:
    """What softmax and the filters are made of. NaN stay NaN; the total leaves them out. Infinities cost work on one number a row alone."""
    best = reduce_max(logits)
    shift = minimum(maximum(best, fixed(logits, -F32_MAX)), fixed(logits, F32_MAX))  # inf - inf would be NaN
    shifted = logits - along(shift, logits)
    weights = exp(shifted)
    one, total = fixed(logits, 1.0), reduce_sum(maximum(weights, fixed(logits, 0.0)))
    return Weights(best, shift, shifted, weights, select(total <= fixed(logits, F32_MAX), maximum(total, one), one))


def shares(logits: Tensor) -> Tensor:
    """softmax, but +inf where a logit is +inf: above any threshold and any mass, as the filters want it."""
    _, _, _, weights, total = weigh(logits)
    return weights / along(total, logits)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of logits f32 [n] or [m, n], along the last axis: exp(x - max) / sum. A logit of +inf has 1 (each of several), all
    others of its row 0; a row of -inf throughout has 0 everywhere; a NaN stays one, and the others share as if it were not there."""
    p, one = shares(floats(logits, "softmax")), fixed(logits, 1.0)
    return select(p > one, one, p)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of logits f32 [n] or [m, n], along the last axis: x - max - ln sum exp(x - max); the logarithm of what softmax says
    of infinities and NaN."""
    best, _, _, _, total = weigh(floats(logits, "log_softmax"))
    spread, none = log(total), fixed(logits, NEG_INF)
    top = select(best > none, -spread, none)
    return select(logits == along(best, logits), along(top, logits), logits - along(best, logits) - along(spread, logits))


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
    +inf is drawn for certain, of several the first, and a NaN never. A row of nothing but NaN (a temperature that only the device knows),
    or of -inf throughout (a mask without a true), gives 0, and no error: reduce_max(logits), -inf then, tells."""
    return reduce_argmax(floats(logits, "gumbel_max") + rng_gumbel(state, logits.shape))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), f32, one a row, 0 or more; probabilities are floored at 2^-126 inside the logarithm. It is 0
    where a logit is +inf, and of a row of -inf throughout; a NaN counts for nothing."""
    p = shares(floats(logits, "entropy"))
    nats = p * log(maximum(p, fixed(logits, TINY)))
    return absolute(reduce_sum(minimum(nats, fixed(logits, 0.0))))  # the minimum takes 0 for inf and NaN


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
