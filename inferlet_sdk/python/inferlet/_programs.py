"""Epilogues: traced, sent to the host once an instance, and referred to by id from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pie_core.eta import trace_epilogue
from pie_core.eta.trace import trace_stage

from . import _host, _memo, model


class Lowered(NamedTuple):
    """An epilogue as a submit refers to it: the host's program id, parameter words, the author's channels, number and form of outputs."""

    prog: int
    params: tuple[int, ...]
    channels: tuple[Any, ...]
    outs: int
    single: bool


_ids: dict[str, int] = {}  # canonical text -> program id


def lower(fn: Callable[[], Any], rows: int | None = None) -> Lowered:
    """Trace `fn` for a pass of `rows` read-outs (None: not known) and make its program known to the host. Raises TraceError at the
    author's line."""
    known, store = _memo.lookup(fn, rows)
    if known is not None:
        return known  # type: ignore[no-any-return]
    traced = trace_epilogue(fn, model, rows)
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


def check_stage(stage: str, fn: Callable[[], Any], tokens: int) -> None:
    """Trace `fn` as another stage of a pass of `tokens` tokens. Raises TraceError at the author's line."""
    row, kv_row = (tokens, model.hidden), (tokens, model.kv_width or model.hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (tokens,), "positions": (tokens,), "query": row, "attention": row, "key": kv_row, "value": kv_row, "layer": (),
    }  # fmt: skip
    trace_stage(stage, fn, shapes).program.verify()
