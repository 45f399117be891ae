"""The tracer: a function runs once over symbolic tensors and leaves a Program, its parameter words and its channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

from pie_core.eta.advice import result_advice
from pie_core.eta.errors import TraceError
from pie_core.eta.program import MAX_ELEMENTS, Program
from pie_core.eta.rules import Shape, elements
from pie_core.eta.stages import STAGES
from pie_core.eta.tensor import Tensor
from pie_core.eta.trace import ModelInfo, Trace


class Traced(NamedTuple):
    """`params`: the words of the lifted constants, by slot. `channels`: the author's objects in the program's order. `single`: fn returned
    one tensor and not a tuple."""

    program: Program
    params: tuple[int, ...]
    channels: tuple[Any, ...]
    single: bool


_ACTIVE: ContextVar[Trace | None] = ContextVar("eta_trace", default=None)


def active_trace(what: str) -> Trace:
    """The trace that is running. Raises TraceError naming `what` outside of one."""
    trace = _ACTIVE.get()
    if trace is None:
        raise TraceError(f"{what} is only there inside a function given to .epilogue(fn)")
    return trace


def is_tracing() -> bool:
    """Whether a traced function is running now."""
    return _ACTIVE.get() is not None


class tracing:
    """`with tracing(trace):` makes `trace` the running one."""

    __slots__ = ("_token", "_trace")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __enter__(self) -> Trace:
        if _ACTIVE.get() is not None:
            raise TraceError("an epilogue cannot be traced inside another one")
        self._token = _ACTIVE.set(self._trace)
        return self._trace

    def __exit__(self, *_: object) -> None:
        _ACTIVE.reset(self._token)
        self._trace.forget()


def trace_epilogue(fn: Callable[[], Any], model: ModelInfo, rows: int | None = None) -> Traced:
    """Run `fn` once over symbolic tensors. It returns a Tensor, a tuple or list of Tensors, or None. `rows`: read-outs of the pass, needed
    by `intrinsics.outputs`. Raises TraceError (ProgramError for channel orders) at the author's line; whatever else `fn` raises passes
    through."""
    if not callable(fn):
        raise TraceError(f"epilogue takes a function, got {type(fn).__name__}; write .epilogue(lambda: …)")
    return _traced(Trace("epilogue", model, rows=rows), fn, "an epilogue")


def trace_stage(stage: str, fn: Callable[[], Any], shapes: Mapping[str, Shape]) -> Traced:
    """`fn` as the program of the stage prologue, on_attn_proj or on_attn. `shapes`: of the intrinsics it may use, by name (() for layer).
    Such a program is verified and identified, and does not execute yet. Raises TraceError."""
    if stage not in STAGES or not STAGES[stage].intrinsics:
        known = ", ".join(name for name, row in STAGES.items() if row.intrinsics)
        raise TraceError(f"trace_stage knows the stages {known}, not {stage!r}")
    if not callable(fn):
        raise TraceError(f"{stage} takes a function, got {type(fn).__name__}; write .{stage}(lambda: …)")
    return _traced(Trace(stage, shapes=shapes), fn, f"a function of the {stage} stage")


def _traced(trace: Trace, fn: Callable[[], Any], what: str) -> Traced:
    code = fn.__code__ if type(fn) is FunctionType else None  # a bound method has an object besides, which its code counts
    if code is not None and code.co_argcount > len(getattr(fn, "__defaults__", None) or ()):
        names = ", ".join(code.co_varnames[: code.co_argcount])
        raise TraceError(f"{what} is a function without parameters, it reads intrinsics and channels; this one has {names}")
    with tracing(trace):
        result = fn()
    single = isinstance(result, Tensor)
    outs: list[Any] = [result] if single else [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    most = STAGES[trace.stage].outs
    if len(outs) > most:
        raise TraceError(
            f"{what} returns at most {most} tensors, got {len(outs)}" if most else f"{what} returns nothing: put values into channels"
        )
    for out in outs:
        if not isinstance(out, Tensor):
            if hasattr(out, "close") and hasattr(out, "cr_code"):
                out.close()
                raise TraceError(f"{what} is a plain function, not async: it is traced, nothing can be awaited in it")
            raise TraceError(f"{what} returns Tensors, got {type(out).__name__}; {result_advice(out)}")
        if out.trace is not trace:
            raise TraceError(f"{what} returned a tensor of another trace; use channels to carry values between passes")
        if elements(out.shape) > MAX_ELEMENTS:
            raise TraceError(f"an output of {elements(out.shape)} elements is over the cap of {MAX_ELEMENTS}")
    if trace.stage == "epilogue" and not outs and all(trace.ops[i].name == "read" for i in trace.effects):
        raise TraceError(f"{what} has to return a Tensor or put one into a channel; this one does nothing: is a return missing?")
    program = trace.finish(outs)
    return Traced(program, tuple(trace.words), tuple(trace.channels), single)
