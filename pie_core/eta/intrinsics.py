"""What a stage reads of its pass: read-out rows in an epilogue; tokens, positions, queries and so on in the other stages."""

from __future__ import annotations

from pie_core.eta.tensor import Tensor
from pie_core.eta.tracing import active_trace


def output(i: int = 0, name: str = "logits") -> Tensor:
    """Flat read-out row `i` of the pass: `name` "logits" is f32 [vocabulary], "hidden" f32 [model width]."""
    return active_trace("intrinsics.output").output(i, name)


def outputs(name: str = "logits") -> Tensor:
    """All read-out rows of the pass as one matrix: f32 [rows, vocabulary] for "logits", [rows, model width] for "hidden". The pass must
    have been told its read-outs by .read(positions) before."""
    return active_trace("intrinsics.outputs").outputs(name)


def tokens() -> Tensor:
    """Prologue: token ids of the pass, u32 [T]."""
    return active_trace("intrinsics.tokens").intrinsic("tokens")


def positions() -> Tensor:
    """Prologue and layer stages: positions of the tokens of the pass, u32 [T]."""
    return active_trace("intrinsics.positions").intrinsic("positions")


def query() -> Tensor:
    """Layer stages: projected queries, f32 [T, heads * head width]."""
    return active_trace("intrinsics.query").intrinsic("query")


def key() -> Tensor:
    """on_attn_proj: projected keys, f32 [T, kv heads * head width]."""
    return active_trace("intrinsics.key").intrinsic("key")


def value() -> Tensor:
    """on_attn_proj: projected values, f32 [T, kv heads * head width]."""
    return active_trace("intrinsics.value").intrinsic("value")


def attention() -> Tensor:
    """on_attn: what attention gave, f32 [T, heads * head width]."""
    return active_trace("intrinsics.attention").intrinsic("attention")


def layer() -> Tensor:
    """Layer stages: index of the layer, u32 scalar."""
    return active_trace("intrinsics.layer").intrinsic("layer")
