"""Channels inside a traced function: take, read, put, and the counter that feeds the random ops."""

from __future__ import annotations

from pie_core.eta.advice import is_channel, operand_advice
from pie_core.eta.errors import TraceError
from pie_core.eta.functions import iota
from pie_core.eta.rules import show
from pie_core.eta.tensor import Scalar, Tensor
from pie_core.eta.trace import ChannelLike
from pie_core.eta.tracing import active_trace


def take(channel: ChannelLike) -> Tensor:
    """Consume the channel's cell. A counter (`channel.counter` true) also puts back its advanced state, [key, counter + 1]."""
    trace = active_trace("take")
    value = trace.take(channel)
    if getattr(channel, "is_counter", False):
        trace.put(channel, value + iota(2))
    return value


def read(channel: ChannelLike) -> Tensor:
    """Peek at the channel's cell. A counter cannot be read: a pass would repeat the numbers of the next one."""
    if getattr(channel, "is_counter", False):
        raise TraceError("read: a counter is taken, not read, so that no two passes see the same random numbers")
    return active_trace("read").read(channel)


def put(channel: ChannelLike, value: Tensor | Scalar) -> None:
    """Put a value into the channel. A pass puts one: of several puts in one pass only the last is there afterwards, and the ones before
    are gone without an error; put a vector, or into a channel each, to keep them all."""
    if getattr(channel, "is_counter", False):
        raise TraceError("put: a counter advances by itself at each take")
    if not isinstance(value, (Tensor, bool, int, float)):
        cell = show((channel.dtype, tuple(channel.shape)))
        raise TraceError(
            f"put: the channel holds {cell}, the value is a {type(value).__name__}; put a Tensor of that shape, or one number"
            f"{operand_advice(value) if is_channel(value) else ''}"
        )
    active_trace("put").put(channel, value)
