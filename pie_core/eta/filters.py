"""Filters of sampling: each takes logits and returns a bool mask of their shape, true for tokens that stay.

`masked(logits, mask)` applies a mask; masks combine with & and |. No filter leaves a row empty: one of the likeliest tokens stays, whatever
the threshold; a logit of +inf forces its token (of several at least the first stays), and a row of -inf throughout keeps something too. A
NaN never stays, so that a row of nothing but NaN is the one that ends up empty; a sample of it is token 0. (xtc strikes the likeliest by
intent, and leaves another.) Probabilities are those of softmax(logits): divide by the temperature first where the filter shall see the
tempered distribution. Thresholds are Python numbers or Tensors f32[]; those that the device alone knows are cut off at their bounds.
"""

from __future__ import annotations

from pie_core.eta.advice import is_channel, operand_advice
from pie_core.eta.dtypes import F32_MAX, INTEGER
from pie_core.eta.errors import TraceError
from pie_core.eta.functions import TABLE_FUNCTIONS, iota, pivot_threshold, rng_uniform, sort_desc
from pie_core.eta.probability import (
    INF,
    TINY,
    absolute,
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
    minimum,
    number,
    reduce_argmax,
    reduce_max,
    reduce_sum,
    scalar,
    select,
    shares,
    sqrt,
    weigh,
    within,
)
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor

cumsum, gather, reduce_min = (TABLE_FUNCTIONS[name] for name in ("cumsum", "gather", "reduce_min"))

Number = Scalar | Tensor
COLDEST_SAMPLE = 1e-30  # temperature: leaves nothing to chance, and logits divided by it stay finite
LEAST_MASS = 2.0**-30  # what pivot_mass counts as 1: the first token stays


def top_k_mask(logits: Tensor, k: int | Tensor) -> Tensor:
    """The k largest of each row (arXiv:1805.04833); ties with the k-th stay too. k is a Python int or an integer scalar."""
    floats(logits, "top_k_mask")
    if isinstance(k, Tensor):
        if k.shape or k.dtype not in INTEGER:
            raise TraceError(f"top_k_mask: k is an int of 1 or more, or a scalar Tensor of i32 or u32, got {show(k.type)}")
        return pivot_threshold(logits, rank=maximum(k, 1))
    if type(k) is not int or k < 1:
        got = type(k).__name__ if is_channel(k) else f"{k!r:.40}"
        raise TraceError(f"top_k_mask: k is an int of 1 or more, got {got}{operand_advice(k)}")
    return pivot_threshold(logits, rank=k)


def top_p(logits: Tensor, p: Number) -> Tensor:
    """Nucleus (arXiv:1904.09751): walking down from the likeliest, tokens stay until those before them hold probability p, 0 to 1."""
    floats(logits, "top_p")
    return pivot_threshold(shares(logits), mass=maximum(within(logits, p, 0, 1, "top_p: p"), LEAST_MASS))


def min_p(logits: Tensor, p: Number) -> Tensor:
    """Tokens at least p times as likely as the likeliest one, p from 0 to 1 (arXiv:2407.01082)."""
    best = minimum(reduce_max(floats(logits, "min_p")), fixed(logits, F32_MAX))  # inf + log(0) would be NaN
    return logits >= along(best + log(within(logits, p, 0, 1, "min_p: p")), logits)


def top_a(logits: Tensor, a: Number) -> Tensor:
    """Tokens of probability a * max^2 or more, max being that of the likeliest, and the likeliest; a from 0 to 1."""
    peak = fixed(logits, 1.0) / weigh(floats(logits, "top_a")).total
    return _at_least(logits, within(logits, a, 0, 1, "top_a: a") * peak * peak)


def epsilon_cutoff(logits: Tensor, epsilon: Number) -> Tensor:
    """Tokens of probability epsilon, 0 to 1, or more (arXiv:2210.15191), and the likeliest."""
    return _at_least(floats(logits, "epsilon_cutoff"), within(logits, epsilon, 0, 1, "epsilon_cutoff: epsilon"))


def eta_cutoff(logits: Tensor, epsilon: Number) -> Tensor:
    """Tokens of probability min(epsilon, sqrt(epsilon) * exp(-entropy)) or more, epsilon from 0 to 1 (arXiv:2210.15191), and the
    likeliest."""
    bound = within(floats(logits, "eta_cutoff"), epsilon, 0, 1, "eta_cutoff: epsilon")
    return _at_least(logits, minimum(sqrt(bound) * exp(-entropy(logits)), bound))


def typical(logits: Tensor, mass: Number) -> Tensor:
    """Locally typical tokens (arXiv:2202.00666) of logits f32 [n]: those whose surprise is nearest to the entropy, until they hold
    probability `mass`, 0 or more (from 1 on all stay); and the likeliest."""
    floats(logits, "typical", (1,))
    most = within(logits, mass, 0, INF, "typical: mass")
    p = shares(logits)
    near = -absolute(log(p) + entropy(logits))  # how far the surprise, -ln p, lies from the entropy
    forced = reduce_max(logits) > fixed(logits, F32_MAX)  # +inf: nothing beside it
    return pivot_threshold(p, mass=select(forced, fixed(logits, 0.0), most), order=near) | _likeliest(logits)


def tail_free(logits: Tensor, z: Number) -> Tensor:
    """Tail-free sampling of logits f32 [n]: down the sorted probabilities, tokens stay until the absolute second differences, each counted
    at the middle of its three tokens and divided by their sum, add up to more than z, 0 or more (from 1 on all stay). The first stays, and
    who is as likely as the last that stays."""
    n = floats(logits, "tail_free", (1,)).shape[0]
    most = within(logits, z, 0, INF, "tail_free: z")
    zero, one, place = fixed(logits, 0.0), fixed(logits, 1.0), iota(n)
    p = shares(logits)
    values, _ = sort_desc(minimum(maximum(p, zero), one))
    before = place - 1  # of the first it wraps: out of range
    curve = absolute((gather(values, before) - values) - (values - gather(values, place + 1)))
    bent = cumsum(select(before < max(n - 2, 0), curve, zero))
    bound = select(most < one, most, fixed(logits, INF)) * maximum(gather(bent, n - 1), fixed(logits, TINY))
    left = reduce_sum(((bent <= bound) & (place > 0)).cast("u32"))  # beside the first; what is bent only grows
    return p >= gather(values, left)


def xtc(logits: Tensor, threshold: Number, probability: Number, state: Tensor) -> Tensor:
    """Exclude top choices, of logits f32 [n]: with `probability`, 0 to 1 (one draw of `state` u32[2]), of the tokens of probability
    `threshold`, 0 or more, or more only the least likely stays; the others are untouched, and so is a row with a logit of +inf."""
    floats(logits, "xtc", (1,))
    least_likely, chance = within(logits, threshold, 0, INF, "xtc: threshold"), within(logits, probability, 0, 1, "xtc: probability")
    p, none = shares(logits), fixed(logits, INF)
    least = reduce_min(select(p >= least_likely, p, none))
    struck = (rng_uniform(state) < chance) & (reduce_max(logits) <= fixed(logits, F32_MAX))
    return (p < least_likely) | (p <= select(struck, least, none))


def nucleus_sample(logits: Tensor, p: Number, state: Tensor) -> Tensor:
    """i32 sample, one a row, among the tokens that top_p(logits, p) keeps; p from 0 to 1, state u32[2]."""
    if not isinstance(state, Tensor) or state.type != ("u32", (2,)):
        got = show(state.type) if isinstance(state, Tensor) else type(state).__name__
        raise TraceError(f"nucleus_sample(logits, p, state) takes a state u32[2] last, got {got}; Channel.counter(seed).take() gives one")
    return gumbel_max(masked(logits, top_p(logits, p)), state)


def sample(  # noqa: PLR0917
    logits: Tensor, state: Tensor, temperature: Number = 1.0, top_k: int | Tensor | None = None, top_p: Number | None = None,
    min_p: Number | None = None,
) -> Tensor:  # fmt: skip
    """i32 sample, one a row: temperature first (0 is greedy; so is a Tensor below 1e-30, or of NaN), then top-k, top-p and min-p, each
    over what the one before left. A temperature is a number, a Tensor f32[], or f32[m], one a row of logits [m, n]."""
    floats(logits, "sample")
    if isinstance(temperature, Tensor):
        temperature = maximum(scalar(logits, temperature, "sample: temperature"), COLDEST_SAMPLE)
    else:
        number(temperature, "sample: temperature")
        if temperature == 0:
            return reduce_argmax(logits)
        if temperature < COLDEST_SAMPLE:
            raise TraceError(f"sample: temperature is 0 (greedy) or {COLDEST_SAMPLE} or more, got {temperature}")
    x = logits / along(finite(logits, temperature, "sample: temperature"), logits)
    if top_k is not None:
        x = masked(x, top_k_mask(x, top_k))
    if top_p is not None:
        x = masked(x, _top_p(x, top_p))
    if min_p is not None:
        x = masked(x, _min_p(x, min_p))
    return gumbel_max(x, state)


_top_p, _min_p = top_p, min_p  # `sample` has parameters of these names


def _at_least(logits: Tensor, bound: Tensor) -> Tensor:
    """Tokens of a probability of `bound` (one, or one a row) or more, and the likeliest: the bound ends a rounding below its own."""
    best, _, _, weights, total = weigh(logits)
    least = select(best < fixed(logits, -F32_MAX), fixed(logits, 0.0), fixed(logits, 1.0 - 2.0**-20) / total)
    return weights / along(total, logits) >= along(minimum(least, bound), logits)


def _likeliest(logits: Tensor) -> Tensor:
    return logits == along(reduce_max(logits), logits)


FUNCTIONS = (
    top_k_mask, top_p, min_p, top_a, epsilon_cutoff, eta_cutoff, typical, tail_free, xtc, nucleus_sample, sample,
)  # fmt: skip
