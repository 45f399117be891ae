"""Epilogues: traced, sent to the host once while somebody needs them, and referred to by id from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from pie_core.eta import trace_epilogue
from pie_core.eta.tracing import trace_stage

from . import _host, _memo, _room, model

_KEPT = 128  # programs that are known when no pass needs them, the last ones


class ProgramId(int):
    """The host's id of a program, which is dropped there when nobody holds this any more."""

    def __del__(self) -> None:
        _host.call("program.drop", f'{{"prog":{self}}}')


class Lowered(NamedTuple):
    """An epilogue as a submit refers to it: the host's program id, parameter words, the author's channels, number and form of outputs."""

    prog: ProgramId
    params: tuple[int, ...]
    channels: tuple[Any, ...]
    outs: int
    single: bool


_ids: OrderedDict[str, ProgramId] = OrderedDict()  # by canonical text, the one used last behind all others
_room.forget += [_ids.clear, _memo.forget]


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
        key = _host.new_id()
        _room.with_room(lambda: _host.call_with("program", prog=key, text=text))
        prog = _ids[text] = ProgramId(key)
        if len(_ids) > _KEPT:
            _ids.popitem(last=False)
    else:
        _ids.move_to_end(text)
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
