"""DRY, the penalty on what would make a run of tokens come again: a search through the last tokens, on the device."""

from __future__ import annotations

import math

from pie_core.eta.errors import TraceError
from pie_core.eta.filters import Number
from pie_core.eta.functions import TABLE_FUNCTIONS, broadcast, iota, reshape, scatter_set
from pie_core.eta.probability import exp, finite, floats, reduce_max, reduce_sum, select
from pie_core.eta.rules import show
from pie_core.eta.tensor import Tensor

gather, cumprod = (TABLE_FUNCTIONS[name] for name in ("gather", "cumprod"))

LONGEST = 32  # tokens of a run that are compared; a longer one counts as this long
FURTHEST = 2048  # tokens of a history: each is compared with each, within the elements of a value


def dry(  # noqa: PLR0917
    logits: Tensor,
    history: Tensor,
    multiplier: Number = 0.8,
    base: float = 1.75,
    allowed: int = 2,
    breakers: Tensor | None = None,
) -> Tensor:
    """Logits f32 [n], lowered by multiplier * base^(run - allowed) for each token of the history (i32 [m], the newest last, -1 as padding)
    that would make the last `run` tokens, `allowed` to 32, come again. No run goes over a token where `breakers` (bool [n]) is true."""
    n = _history(floats(logits, "dry", (1,)), history)
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 1 <= base <= 10:
        raise TraceError(f"dry: base is a Python number from 1 to 10, got {base}")
    if isinstance(allowed, bool) or not isinstance(allowed, int) or not 1 <= allowed <= LONGEST:
        raise TraceError(f"dry: allowed is an int from 1 to {LONGEST}, got {allowed}")
    place, back = iota(n).cast("i32"), iota(LONGEST).cast("i32")
    text = history if breakers is None else select(gather(_flags(breakers, logits), history), -1, history)  # i32 [n]: what may match
    earlier = _rows(place, LONGEST) - _columns(back, n)  # i32 [n, LONGEST]: so many tokens before each place
    then, now = gather(text, earlier), _columns(gather(text, n - 1 - back), n)  # i32 [n, LONGEST]
    same = (then == now) & (now >= 0) & (earlier >= 0)  # bool [n, LONGEST]
    run = reduce_sum(cumprod(same.cast("i32")))  # i32 [n]: tokens up to each place that are also the last ones
    follows = select(place < n - 1, gather(history, place + 1), -1)  # i32 [n]
    alike = _rows(follows, n) == _columns(follows, n)  # bool [n, n]: a token may follow at several places
    longest = reduce_max(select(alike, _columns(run, n), 0))  # i32 [n]
    lowered = finite(logits, multiplier, "dry: multiplier") * exp((longest - allowed).cast("f32") * math.log(base))  # f32 [n]
    return scatter_set(logits, follows, gather(logits, follows) - select(longest >= allowed, lowered, 0.0))


def _history(logits: Tensor, history: Tensor) -> int:
    """The length of a history; raises TraceError where it is none."""
    if not isinstance(history, Tensor) or history.dtype != "i32" or len(history.shape) != 1:
        got = show(history.type) if isinstance(history, Tensor) else type(history).__name__
        raise TraceError(f"dry takes the history as i32 [m], got {got}")
    if history.shape[0] > FURTHEST:
        raise TraceError(f"dry: a history holds up to {FURTHEST} tokens, got {history.shape[0]}")
    return history.shape[0]


def _flags(breakers: Tensor, logits: Tensor) -> Tensor:
    if not isinstance(breakers, Tensor) or breakers.dtype != "bool" or breakers.shape != logits.shape:
        got = show(breakers.type) if isinstance(breakers, Tensor) else type(breakers).__name__
        raise TraceError(f"dry: breakers are bool [{logits.shape[0]}], a flag for each token, got {got}")
    return breakers


def _rows(x: Tensor, columns: int) -> Tensor:
    """x [n] at [i, j] by i."""
    return broadcast(x, (x.shape[0], columns))


def _columns(x: Tensor, rows: int) -> Tensor:
    """x [n] at [i, j] by j."""
    return broadcast(reshape(x, (1, x.shape[0])), (rows, x.shape[0]))
