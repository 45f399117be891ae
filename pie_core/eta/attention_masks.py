"""Attention masks over positions, bool [queries, keys], true where a query sees a key."""

from __future__ import annotations

from pie_core.eta.errors import TraceError
from pie_core.eta.functions import broadcast, reshape
from pie_core.eta.rules import show
from pie_core.eta.tensor import Tensor


def _grid(queries: Tensor, keys: Tensor, what: str) -> tuple[Tensor, Tensor]:
    for name, x in (("queries", queries), ("keys", keys)):
        if not isinstance(x, Tensor) or x.dtype != "u32" or len(x.shape) != 1:
            got = show(x.type) if isinstance(x, Tensor) else type(x).__name__
            raise TraceError(f"{what} takes {name} as positions u32 [n], got {got}")
    shape = (queries.shape[0], keys.shape[0])
    return broadcast(queries, shape), broadcast(reshape(keys, (1, shape[1])), shape)


def _positions(value: Tensor | int, least: int, what: str) -> Tensor | int:
    """A number of positions. Raises TraceError for what is none, and for a Python int below `least`."""
    fits = value.type == ("u32", ()) if isinstance(value, Tensor) else type(value) is int and least <= value <= 0xFFFFFFFF
    if not fits:
        got = show(value.type) if isinstance(value, Tensor) else f"{value!r:.40}"
        raise TraceError(f"{what} is an int of {least} or more, or a Tensor u32[], got {got}")
    return value


def causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """bool [q, k]: key position <= query position; both u32 vectors."""
    q, k = _grid(queries, keys, "causal_mask")
    return k <= q


def sliding_mask(queries: Tensor, keys: Tensor, window: Tensor | int) -> Tensor:
    """bool [q, k]: the last `window` positions up to and with the query's own (u32 scalar or Python int, 1 or more)."""
    q, k = _grid(queries, keys, "sliding_mask")
    return (k <= q) & (q - k < _positions(window, 1, "sliding_mask: window"))


def sink_mask(queries: Tensor, keys: Tensor, window: Tensor | int, sinks: Tensor | int) -> Tensor:
    """bool [q, k]: sliding_mask, and of the positions before it the first `sinks`, 0 or more (arXiv:2309.17453)."""
    q, k = _grid(queries, keys, "sink_mask")
    near = q - k < _positions(window, 1, "sink_mask: window")
    return (k <= q) & (near | (k < _positions(sinks, 0, "sink_mask: sinks")))


FUNCTIONS = (causal_mask, sliding_mask, sink_mask)
