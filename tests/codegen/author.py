"""Programs for tests, written as authors write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pie_core import eta
from pie_core.eta import Model, Tensor, Trace, Traced, trace_epilogue
from pie_core.eta.program import Program
from pie_core.eta.tracing import tracing

F = eta.FUNCTIONS


@dataclass(eq=False)
class Chan:
    """A channel object with the methods authors call."""

    dtype: str = "f32"
    shape: tuple[int, ...] = ()
    capacity: int = 1
    is_counter: bool = False

    def take(self) -> Tensor:
        return eta.channel.take(self)

    def read(self) -> Tensor:
        return eta.channel.read(self)

    def put(self, value: Any) -> None:
        eta.channel.put(self, value)


def counter() -> Chan:
    """What `Channel.counter(seed)` is to the tracer."""
    return Chan("u32", (2,), is_counter=True)


def traced(fn: Callable[[], Any], vocab: int = 1000, hidden: int = 64, rows: int | None = None) -> Traced:
    """`fn` traced for a model of these widths and a pass of `rows` read-outs, its text parsed back as a host does."""
    result = trace_epilogue(fn, Model(vocab, hidden), rows)
    assert Program.parse(result.program.text) == result.program
    return result


def over_cells(fn: Callable[..., Any], *cells: tuple[str, tuple[int, ...]]) -> Traced:
    """`fn` over the values of channels of these types."""
    channels = [Chan(dtype, shape) for dtype, shape in cells]
    return traced(lambda: fn(*[c.take() for c in channels]))


def map_program(fn: Callable[..., Tensor], inputs: int, n: int) -> Program:
    """`fn` over `inputs` vectors of n elements as a map program."""
    trace = Trace("map")
    with tracing(trace):
        out = fn(*[trace.input(k, n) for k in range(inputs)])
    return Program.parse(trace.finish([out]).text)


def greedy() -> Tensor:
    return F["reduce_argmax"](eta.intrinsics.output(0, "logits"))
