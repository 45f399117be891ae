"""What changes logits or carries state from token to token: penalties, adaptive temperatures, mirostat."""

from __future__ import annotations

import math

from pie_core.eta.advice import operand_advice
from pie_core.eta.dtypes import INTEGER
from pie_core.eta.errors import TraceError
from pie_core.eta.filters import Number
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, constant, scatter_add
from pie_core.eta.probability import (
    TINY,
    along,
    entropy,
    exp,
    finite,
    fixed,
    floats,
    gumbel_max,
    log,
    masked,
    maximum,
    number,
    reduce_sum,
    scalar,
    select,
    weigh,
)
from pie_core.eta.rules import show
from pie_core.eta.tensor import Tensor

gather = TABLE_FUNCTIONS["gather"]

COLDEST = 0.01  # floor of an adaptive temperature: greedy in effect, and no division by 0
LN2 = math.log(2.0)


def token_counts(ids: Tensor, n: int) -> Tensor:
    """How often each of n tokens occurs in a history of ids (i32 or u32 [m]), u32 [n]; ids out of range, -1 say, are padding."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGER or len(ids.shape) != 1 or type(n) is not int or n < 1:
        got, of = (show(x.type) if isinstance(x, Tensor) else f"{type(x).__name__} {x!r:.40}" for x in (ids, n))
        advice = "" if isinstance(ids, Tensor) else operand_advice(ids)
        raise TraceError(f"token_counts(ids, n) takes ids i32 or u32 [m] and how many tokens there are, got {got} and {of}{advice}")
    return scatter_add(broadcast(constant(0, "u32"), n), ids, 1)


def repetition_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits of tokens seen (counts > 0, a number of the logits' shape) divided by the penalty, over 0, where positive, multiplied where
    negative (arXiv:1909.05858); 1 changes nothing."""
    by = finite(floats(logits, "repetition_penalty"), penalty, "repetition_penalty: penalty")
    if not isinstance(penalty, Tensor) and penalty <= 0:
        raise TraceError(f"repetition_penalty: penalty is over 0 (1 changes nothing), got {penalty}")
    by = along(by, logits)
    return select(_seen(logits, counts, "repetition_penalty"), select(logits > 0.0, logits / by, logits * by), logits)


def presence_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits of tokens seen (counts > 0, a number of the logits' shape) lowered by the penalty; below 0 it raises them."""
    by = scalar(floats(logits, "presence_penalty"), penalty, "presence_penalty: penalty")
    return select(_seen(logits, counts, "presence_penalty"), logits - along(by, logits), logits)


def frequency_penalty(logits: Tensor, counts: Tensor, penalty: Number) -> Tensor:
    """Logits lowered by the penalty for each time a token was seen (counts: a number of the logits' shape); below 0 it raises them."""
    by = finite(floats(logits, "frequency_penalty"), penalty, "frequency_penalty: penalty")
    return logits - _counts(logits, counts, "frequency_penalty").cast("f32") * along(by, logits)


def _counts(logits: Tensor, counts: Tensor, what: str) -> Tensor:
    """Counts, or flags, of the logits' shape (or one for all). Raises TraceError naming the function."""
    if not isinstance(counts, Tensor) or counts.shape not in (logits.shape, ()):
        got = show(counts.type) if isinstance(counts, Tensor) else type(counts).__name__
        raise TraceError(f"{what} takes counts of the logits' shape {list(logits.shape)}, got {got}; token_counts(ids, n) makes them")
    return counts


def _seen(logits: Tensor, counts: Tensor, what: str) -> Tensor:
    counts = _counts(logits, counts, what)
    return counts if counts.dtype == "bool" else counts > 0


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
    """Logits divided by temperature * base^(theta / entropy) (arXiv:2403.14541): cold where the model is sure; at least 0.01. base is a
    Python number between 0 and 1."""
    floats(logits, "entropy_temperature")
    if isinstance(base, Tensor):
        raise TraceError("entropy_temperature: base is a Python number, got a Tensor; theta may be one")
    number(base, "entropy_temperature: base")
    if not 0 < base < 1:
        raise TraceError(f"entropy_temperature: base lies between 0 and 1, got {base}")
    power = finite(logits, theta, "entropy_temperature: theta") * math.log(base) / maximum(entropy(logits), TINY)
    return logits / along(maximum(finite(logits, temperature, "entropy_temperature: temperature") * exp(power), COLDEST), logits)


def mirostat(logits: Tensor, mu: Number, state: Tensor, tau: Number = 5.0, eta: Number = 0.1) -> tuple[Tensor, Tensor]:
    """One step of mirostat 2 (arXiv:2007.14966) over logits f32 [n]: (i32 token, next mu). A token whose surprise, in bits, is over mu (f32
    scalar; start with 2 * tau) goes, the likeliest stays; mu moves by eta times how far the sampled surprise lies from tau, both 0 or
    more. The surprise of a logit of +inf is 0, and so is that of a row of nothing but -inf and NaN: a finite mu stays finite."""
    floats(logits, "mirostat", (1,))
    mu = finite(logits, mu, "mirostat: mu")
    rate = _not_below_0(logits, eta, "mirostat: eta")
    best, shift, shifted, weights, total = weigh(logits)
    keep = ((log(total) - shifted) / LN2 <= mu) | (logits == best)
    token = gumbel_max(masked(logits, keep), state)
    zero = fixed(logits, 0.0)
    kept = log(reduce_sum(select(keep, weights, zero)))
    observed = maximum((kept - (gather(logits, token) - shift)) / LN2, zero)  # which takes 0 for inf - inf
    return token, mu - rate * (observed - _not_below_0(logits, tau, "mirostat: tau"))


def _not_below_0(logits: Tensor, value: Number, what: str) -> Tensor:
    given = finite(logits, value, what)
    if not isinstance(value, Tensor) and value < 0:
        raise TraceError(f"{what} is 0 or more, got {value}")
    return given


FUNCTIONS = (
    token_counts, repetition_penalty, presence_penalty, frequency_penalty, dynamic_temperature, entropy_temperature, mirostat,
)  # fmt: skip
