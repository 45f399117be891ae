"""Epilogues: traced, sent to the host once an instance, and referred to by id from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pie_core.eta import trace_epilogue

from . import _host, _memo, model


class Lowered(NamedTuple):
    """An epilogue as a submit refers to it: the host's program id, parameter words, the author's channels, number and form of outputs."""

    prog: int
    params: tuple[int, ...]
    channels: tuple[Any, ...]
    outs: int
    single: bool


_ids: dict[str, int] = {}  # canonical text -> program id


def lower(fn: Callable[[], Any]) -> Lowered:
    """Trace `fn` and make its program known to the host. Raises TraceError at the author's line."""
    known, store = _memo.lookup(fn)
    if known is not None:
        return known  # type: ignore[no-any-return]
    traced = trace_epilogue(fn, model)
    text = traced.program.text
    prog = _ids.get(text)
    if prog is None:
        prog = _host.new_id()
        _host.call_with("program", prog=prog, text=text)
        _ids[text] = prog
    lowered = Lowered(prog, traced.params, traced.channels, len(traced.program.outs), traced.single)
    if store is not None:
        store(lowered)
    return lowered
