"""Recurrent state in the model language: what is refused, how states lie in a slot, and what the lowered plan binds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pie_core.eta.trace import Trace
from pie_core.models.registry import resolve
from pie_core.poem import Cache, CompiledModel, Graph, Param, PoemError, embed, linear, read_out, rms_norm, trace_model
from pie_core.poem.lower import lower
from pie_core.poem.ops import TABLE
from pie_core.weights import open_gguf
from tests.support.tiny_recurrent import POEM, STATE, write_tiny_recurrent


def row(n: int) -> Any:
    trace = Trace("model", table=TABLE)
    return embed(trace.add("tokens", (), {}, ("u32", ())), Param("e", "q8_0", 100, n))


def vector(n: int, fmt: str = "f32", rows: int = 1) -> Param:
    return Param("v", fmt, rows, n)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.recur("h", row(64), vector(32), vector(64)), "layer 3: decay 'v' of state 'h' must be an f32 vector of 64, like x"),
        (lambda s: s.recur("h", row(64), vector(64), vector(64, "f16")), "layer 3: gain 'v' of state 'h' must be an f32 vector of 64"),
        (lambda s: s.recur("h", row(64), vector(64), vector(64, rows=2)), "layer 3: gain 'v' of state 'h' must be an f32 vector"),
        (lambda s: s.recur("h", row(6), vector(6), vector(6)), "layer 3: state 'h' has width 6; kernels need a multiple of 4"),
    ],
)
def test_misuse_names_layer_and_state(call: Callable[[Cache], object], message: str) -> None:
    with pytest.raises(PoemError, match=message):
        call(Cache(3))


def test_a_state_advances_once_a_token() -> None:
    state, x = Cache(0), row(64)
    h = state.recur("a", x, vector(64), vector(64))
    assert h.shape == (64,)
    state.recur("b", h, vector(64), vector(64))
    assert state.states == {"a": 64, "b": 64} and not state.width
    with pytest.raises(PoemError, match="layer 0 advances its state 'a' twice"):
        state.recur("a", x, vector(64), vector(64))


def traced(path: Path, kinds: Sequence[Any], change: Callable[[Any], Any] = lambda model: model) -> Graph:
    with open_gguf(write_tiny_recurrent(path / "tiny.gguf", kinds)) as checkpoint:
        found = resolve(checkpoint.metadata, POEM)
        return trace_model(change(found.Model), found.Config.from_metadata(checkpoint.metadata), checkpoint)


def test_a_recurrent_layer_has_no_cache_and_a_place_in_the_slot(tmp_path: Path) -> None:
    graph = traced(tmp_path, ("attention", "recurrent", "recurrent"))
    assert graph.cache_widths == (32, 0, 0)
    assert graph.state_width == 2 * STATE
    assert CompiledModel.slot_bytes(graph) == 4 * 2 * STATE
    steps = [s for s in lower(graph).body if s.template == "recur"]
    assert [s.params for s in steps] == [{"width": STATE, "stride": 2 * STATE, "offset": k * STATE} for k in (0, 1)]
    for k, s in enumerate(steps, 1):
        assert s.bindings["decay"].names == (f"blk.{k}.recur_decay",) and s.bindings["gain"].names == (f"blk.{k}.recur_gain",)
        assert s.bindings["state"].kind == "state" and s.bindings["x"] != s.bindings["out"]


def test_a_model_without_recurrence_has_no_slots(tmp_path: Path) -> None:
    graph = traced(tmp_path, ("attention",))
    assert graph.state_width == 0 and CompiledModel.slot_bytes(graph) == 0
    assert not any(s.template == "recur" or any(r.kind == "state" for r in s.bindings.values()) for s in lower(graph).body)


class Late:
    """Advances a state behind the read-outs."""

    def __init__(self, config: Any, p: Any) -> None:
        self.c = config
        self.embd, self.norm = p.matrix("token_embd.weight", config.vocab, config.width), p.vector("output_norm.weight", config.width)
        self.w = p.vector("blk.0.ffn_norm.weight", config.width)

    def __call__(self, tokens: Any, caches: list[Cache]) -> dict[str, Any]:
        h = rms_norm(read_out(embed(tokens, self.embd)), self.norm, self.c.eps)
        h = caches[0].recur("h", h, self.w, self.w)
        return {"hidden": h, "logits": linear(h, self.embd)}


def test_a_recurrence_behind_the_read_outs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoemError, match="layer 0: a recurrence behind read_out would miss the tokens that are not read out"):
        lower(traced(tmp_path, ("recurrent",), lambda _: Late))
