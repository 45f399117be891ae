"""Epilogues: traced, sent to the host once an instance, and referred to by id from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pie_core.eta import trace_epilogue

from . import _host, model

_ids: dict[str, int] = {}  # canonical text -> program id


def lower(fn: Callable[[], Any]) -> tuple[int, tuple[int, ...], tuple[Any, ...], bool, int]:
    """(program id, parameter words, channels, single, number of outputs) of the epilogue `fn`; raises TraceError at the author's line."""
    traced = trace_epilogue(fn, model)
    program = traced.program
    text = program.text
    prog = _ids.get(text)
    if prog is None:
        prog = _host.new_id()
        _host.call_with("program", prog=prog, text=text)
        _ids[text] = prog
    return prog, traced.params, traced.channels, traced.single, len(program.outs)
