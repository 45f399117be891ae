"""Filters of sampling: each takes logits and returns a bool mask of their shape, true for tokens that stay.

`masked(logits, mask)` applies a mask; masks combine with & and |. Of a row with a finite logit and neither NaN nor +inf, every
filter leaves something; to force a token, give all others -inf. Probabilities are those of softmax(logits): divide by the temperature first
where the filter shall see the tempered distribution.
"""

from __future__ import annotations

from pie_core.eta.advice import is_channel, operand_advice
from pie_core.eta.dtypes import INTEGER
from pie_core.eta.errors import TraceError
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, constant, iota, pivot_threshold, rng_uniform, scatter_set, sort_desc
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
    number,
    reduce_argmax,
    reduce_max,
    reduce_sum,
    scalar,
    select,
    softmax,
    sqrt,
)
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor

absolute, cumsum, gather, minimum, reduce_min = (
    TABLE_FUNCTIONS[name] for name in ("absolute", "cumsum", "gather", "minimum", "reduce_min")
)

Number = Scalar | Tensor
INF = float("inf")
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
    """Nucleus (arXiv:1904.09751): walking down from the likeliest, tokens stay until those before them hold probability p."""
    floats(logits, "top_p")
    return pivot_threshold(softmax(logits), mass=maximum(_share(logits, p, "top_p: p"), LEAST_MASS))


def min_p(logits: Tensor, p: Number) -> Tensor:
    """Tokens at least p times as likely as the likeliest one (arXiv:2407.01082)."""
    floats(logits, "min_p")
    return logits >= along(reduce_max(logits) + log(_share(logits, p, "min_p: p")), logits)


def top_a(logits: Tensor, a: Number) -> Tensor:
    """Tokens of probability a * max^2 or more, max being that of the likeliest; a from 0 to 1."""
    p = softmax(floats(logits, "top_a"))
    best = reduce_max(p)
    return p >= along(_share(logits, a, "top_a: a") * best * best, p)


def epsilon_cutoff(logits: Tensor, epsilon: Number) -> Tensor:
    """Tokens of probability epsilon or more (arXiv:2210.15191), and the likeliest."""
    p = softmax(floats(logits, "epsilon_cutoff"))
    best = reduce_max(p)
    return p >= along(minimum(best, scalar(logits, epsilon, "epsilon_cutoff: epsilon")), p)


def eta_cutoff(logits: Tensor, epsilon: Number) -> Tensor:
    """Tokens of probability min(epsilon, sqrt(epsilon) * exp(-entropy)) or more (arXiv:2210.15191), and the likeliest."""
    floats(logits, "eta_cutoff")
    p = softmax(logits)
    bound = scalar(logits, epsilon, "eta_cutoff: epsilon")
    cut = minimum(sqrt(bound) * exp(-entropy(logits)), bound)
    return p >= along(minimum(reduce_max(p), cut), p)


def typical(logits: Tensor, mass: Number) -> Tensor:
    """Locally typical tokens (arXiv:2202.00666) of logits f32 [n]: those whose surprise is nearest to the entropy, until they hold
    probability `mass`; and the likeliest."""
    floats(logits, "typical", (1,))
    p = softmax(logits)
    log_p = log(maximum(p, TINY))
    near = -absolute(log_p - reduce_sum(p * log_p))  # how far the surprise, -ln p, lies from the entropy
    return pivot_threshold(p, mass=scalar(logits, mass, "typical: mass"), order=near) | _likeliest(logits)


def tail_free(logits: Tensor, z: Number) -> Tensor:
    """Tail-free sampling of logits f32 [n]: of the sorted probabilities, those before the normalised curvature sums to more than z."""
    floats(logits, "tail_free", (1,))
    n = logits.shape[0]
    values, order = sort_desc(softmax(logits))
    place = iota(n)
    second = gather(values, place + 1)
    curve = absolute((values - second) - (second - gather(values, place + 2)))
    curve = select(place + 2 < n, curve, 0.0)
    share = cumsum(curve / maximum(reduce_sum(curve), TINY))
    return _unsorted((share <= scalar(logits, z, "tail_free: z")) | (place == 0), order)


def xtc(logits: Tensor, threshold: Number, probability: Number, state: Tensor) -> Tensor:
    """Exclude top choices, of logits f32 [n]: with `probability` (one draw of `state` u32[2]), of the tokens of probability `threshold` or
    more only the least likely stays; the others are untouched."""
    p = softmax(floats(logits, "xtc", (1,)))
    above = p >= scalar(logits, threshold, "xtc: threshold")
    least = reduce_min(select(above, p, INF))
    struck = rng_uniform(state) < scalar(logits, probability, "xtc: probability")
    return ~(above & (p > least) & struck)


def nucleus_sample(logits: Tensor, p: Number, state: Tensor) -> Tensor:
    """i32 sample, one a row, among the tokens that top_p(logits, p) keeps."""
    return gumbel_max(masked(logits, top_p(logits, p)), state)


def sample(  # noqa: PLR0917
    logits: Tensor, state: Tensor, temperature: Number = 1.0, top_k: int | Tensor | None = None, top_p: Number | None = None,
    min_p: Number | None = None,
) -> Tensor:  # fmt: skip
    """i32 sample, one a row: temperature first (0 is greedy; so is a Tensor below 1e-30, or of NaN), then top-k, top-p and min-p, each
    over what the one before left."""
    floats(logits, "sample")
    if isinstance(temperature, Tensor):
        temperature = maximum(temperature, COLDEST_SAMPLE)
    else:
        number(temperature, "sample: temperature")
        if temperature == 0:
            return reduce_argmax(logits)
        if temperature < COLDEST_SAMPLE:
            raise TraceError(f"sample: temperature is 0 (greedy) or {COLDEST_SAMPLE} or more, got {temperature}")
    x = logits / finite(logits, temperature, "sample: temperature")
    if top_k is not None:
        x = masked(x, top_k_mask(x, top_k))
    if top_p is not None:
        x = masked(x, _top_p(x, top_p))
    if min_p is not None:
        x = masked(x, _min_p(x, min_p))
    return gumbel_max(x, state)


_top_p, _min_p = top_p, min_p  # `sample` has parameters of these names


def _share(logits: Tensor, value: Number, what: str) -> Tensor:
    """A number from 0 to 1 as f32; a Tensor is cut off at 1."""
    if isinstance(value, Tensor):
        return minimum(value, 1.0)
    number(value, what)
    if not 0 <= value <= 1:
        raise TraceError(f"{what} lies between 0 and 1, got {value}")
    return scalar(logits, value, what)


def _likeliest(logits: Tensor) -> Tensor:
    return logits == along(reduce_max(logits), logits)


def _unsorted(keep: Tensor, order: Tensor) -> Tensor:
    """A mask over sorted places, at the places before sorting."""
    return scatter_set(broadcast(constant(False, "bool"), keep.shape), order, keep)


FUNCTIONS = (
    top_k_mask, top_p, min_p, top_a, epsilon_cutoff, eta_cutoff, typical, tail_free, xtc, nucleus_sample, sample,
)  # fmt: skip
