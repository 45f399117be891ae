"""Lowering: which launches a layer becomes, and that fusions happen only where they are proven."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pie_core.models.registry import resolve
from pie_core.poem import Cache, Graph, Parameters, PoemError, attention, embed, linear, read_out, rms_norm, rope, silu, trace_model
from pie_core.poem.lower import Lowered, Step, lower
from pie_core.weights import open_gguf
from tests.support.tiny_gguf import write_tiny_gguf

LAYERS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poem") / "tiny.gguf"
    write_tiny_gguf(path, layers=LAYERS)
    return path


def graph_of(path: Path, model: Any = None) -> Graph:
    checkpoint = open_gguf(path)
    found = resolve(checkpoint.metadata)
    return trace_model(model or found.Model, found.Config.from_metadata(checkpoint.metadata), checkpoint)


def names(steps: list[Step]) -> list[str]:
    return [s.template or "map" for s in steps]


def test_a_layer_is_nine_launches(tiny: Path) -> None:
    low = lower(graph_of(tiny))
    layer = ["rms_norm", "linear", "rope_append", "attention", "linear", "rms_norm", "linear", "map", "linear"]
    assert names(low.body) == ["embed"] + layer * LAYERS
    assert names(low.head) == ["rms_norm", "linear"]
    qkv, out, gate_up, down = [s for s in low.body if s.template == "linear"][:4]
    assert [len(s.bindings["quants"].names) for s in (qkv, out, gate_up, down)] == [3, 1, 2, 1]
    assert [s.params["add"] for s in (qkv, out, gate_up, down)] == [False, True, False, True]


def test_buffers_are_shared_by_liveness(tiny: Path) -> None:
    one, three = (lower(graph_of(tiny)) for _ in range(2))
    assert one.widths == three.widths
    assert len(one.widths) <= 8  # however many layers
    accumulators = {s.bindings["out"] for s in one.body if s.params.get("add")}
    assert len(accumulators) == 1  # the residual stream stays in one buffer


def reads_before_written(low: Lowered) -> Counter[str]:
    """Activations that a step reads although nothing wrote them."""
    written, bad = set(), Counter[str]()
    for s in (*low.body, *low.head):
        for name, r in s.bindings.items():
            if r.kind == "act" and (name not in ("out", "q") or s.template == "attention") and name != "out" and r.index not in written:
                bad[f"{s.template}.{name}"] += 1
        for name in ("out", "q"):
            if name in s.bindings and s.bindings[name].kind == "act":
                written.add(s.bindings[name].index)
    return bad


def test_every_buffer_is_written_before_it_is_read(tiny: Path) -> None:
    assert not reads_before_written(lower(graph_of(tiny)))


class Variant:
    """One layer over the tiny checkpoint; `mode` picks what is wrong or different."""

    mode = ""

    def __init__(self, c: Any, p: Parameters) -> None:
        self.c = c
        self.p = p
        self.embd = p.matrix("token_embd.weight", c.vocab, c.width)
        self.norm = p.vector("output_norm.weight", c.width)

    def __call__(self, tokens: Any, caches: list[Cache]) -> dict[str, Any]:
        c, p = self.c, self.p
        h = embed(tokens, self.embd)
        for i, kv in enumerate(caches):
            blk = p.scope(f"blk.{i}")
            q = linear(h, blk.matrix("attn_q.weight", c.heads * c.head_dim, c.width))
            k = linear(h, blk.matrix("attn_k.weight", c.kv_heads * c.head_dim, c.width))
            v = linear(h, blk.matrix("attn_v.weight", c.kv_heads * c.head_dim, c.width))
            if self.mode != "no rope":
                q = rope(q, c.head_dim, c.rope_base)
                k = rope(k, c.head_dim, 1.0 if self.mode == "two bases" else c.rope_base)
            kv.append(k, v)
            a = linear(attention(q, kv, scale=1.0, head_dim=c.head_dim), blk.matrix("attn_output.weight", c.width, c.heads * c.head_dim))
            # "later use": h is read again after the product, so it may not be overwritten
            h = (h + a) * silu(h) if self.mode == "later use" else h + a
        h = rms_norm(read_out(h), self.norm, c.eps)
        return {"hidden": h, "logits": linear(h, self.embd)}


@pytest.mark.parametrize(
    ("mode", "message"),
    [("no rope", "attention without rotary positions"), ("two bases", "q and k use different rotary settings")],
)
def test_what_no_kernel_covers_is_refused(tiny: Path, mode: str, message: str) -> None:
    with pytest.raises(PoemError, match=f"layer 0: {message}"):
        lower(graph_of(tiny, type("V", (Variant,), {"mode": mode})))


def test_no_accumulation_into_a_stream_that_is_read_again(tiny: Path) -> None:
    low = lower(graph_of(tiny, type("V", (Variant,), {"mode": "later use"})))
    assert not any(s.params.get("add") for s in low.body if s.template == "linear")
    assert any(s.template is None for s in low.body)
    assert not reads_before_written(low)
