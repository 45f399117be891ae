"""What changes logits or carries state from token to token: penalties, adaptive temperatures, mirostat."""

from __future__ import annotations

import math

from pie_core.eta.errors import TraceError
from pie_core.eta.filters import Number
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, constant, scatter_add
from pie_core.eta.probability import (
    TINY,
    along,
    entropy,
    exp,
    finite,
    floats,
    gumbel_max,
    log,
    masked,
    maximum,
    reduce_max,
    reduce_sum,
    scalar,
    select,
)
from pie_core.eta.tensor import Tensor

gather = TABLE_FUNCTIONS["gather"]

COLDEST = 0.01  # floor of an adaptive temperature: greedy in effect, and no division by 0
LN2 = math.log(2.0)


def token_counts(ids: Tensor, n: int) -> Tensor:
    """How often each of n tokens occurs in a history of ids (i32 or u32 [m]), u32 [n]; ids out of range, -1 say, are padding."""
    return scatter_add(broadcast(constant(0, "u32"), n), ids, 1)


def repetition_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits of tokens seen (counts > 0, a number of the logits' shape) divided by the penalty where positive, multiplied where negative
    (arXiv:1909.05858)."""
    by = scalar(floats(logits, "repetition_penalty"), penalty, "repetition_penalty: penalty")
    if not isinstance(penalty, Tensor) and penalty <= 0:
        raise TraceError(f"repetition_penalty: penalty is over 0 (1 changes nothing), got {penalty}")
    return select(counts > 0, select(logits > 0.0, logits / by, logits * by), logits)


def presence_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits of tokens seen (counts > 0, a number of the logits' shape) lowered by the penalty."""
    floats(logits, "presence_penalty")
    return select(counts > 0, logits - scalar(logits, penalty, "presence_penalty: penalty"), logits)


def frequency_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits lowered by the penalty for each time a token was seen (counts: a number of the logits' shape)."""
    floats(logits, "frequency_penalty")
    return logits - counts.cast("f32") * scalar(logits, penalty, "frequency_penalty: penalty")


def dynamic_temperature(logits: Tensor, low: Number, high: Number, exponent: Number = 1.0) -> Tensor:
    """Logits divided by a temperature, at least 0.01, that grows from low to high with (entropy / ln n)^exponent."""
    floats(logits, "dynamic_temperature")
    share = entropy(logits) / math.log(max(logits.shape[-1], 2))
    if isinstance(exponent, Tensor) or exponent != 1:
        share = exp(log(maximum(share, TINY)) * finite(logits, exponent, "dynamic_temperature: exponent"))
    floor = finite(logits, low, "dynamic_temperature: low")
    temperature = floor + (finite(logits, high, "dynamic_temperature: high") - floor) * share
    return logits / along(maximum(temperature, COLDEST), logits)


def entropy_temperature(logits: Tensor, temperature: Number, theta: Number, base: float = 0.8) -> Tensor:
    """Logits divided by temperature * base^(theta / entropy) (arXiv:2403.14541): cold where the model is sure; at least 0.01."""
    floats(logits, "entropy_temperature")
    if not 0 < base < 1:
        raise TraceError(f"entropy_temperature: base lies between 0 and 1, got {base}")
    power = finite(logits, theta, "entropy_temperature: theta") * math.log(base) / maximum(entropy(logits), TINY)
    return logits / along(maximum(finite(logits, temperature, "entropy_temperature: temperature") * exp(power), COLDEST), logits)


def mirostat(logits: Tensor, mu: Tensor, state: Tensor, tau: Number = 5.0, eta: Number = 0.1) -> tuple[Tensor, Tensor]:
    """One step of mirostat 2 (arXiv:2007.14966) over logits f32 [n]: (i32 token, next mu). A token whose surprise, in bits, is over mu (f32
    scalar; start with 2 * tau) goes, the likeliest stays; mu moves by eta times how far the sampled surprise lies from tau."""
    floats(logits, "mirostat", (1,))
    best = reduce_max(logits)
    shifted = logits - best
    weights = exp(shifted)
    keep = ((log(reduce_sum(weights)) - shifted) / LN2 <= mu) | (logits == best)
    token = gumbel_max(masked(logits, keep), state)
    observed = (log(reduce_sum(select(keep, weights, 0.0))) - (gather(logits, token) - best)) / LN2
    return token, mu - finite(logits, eta, "mirostat: eta") * (observed - finite(logits, tau, "mirostat: tau"))


FUNCTIONS = (
    token_counts, repetition_penalty, presence_penalty, frequency_penalty, dynamic_temperature, entropy_temperature, mirostat,
)  # fmt: skip
