"""Llama: pre-norm decoder with grouped-query attention, rotary positions and a gated MLP (arXiv:2302.13971, 2307.09288).

Traced once for ONE token row: every tensor below has the shape of a row, and the lowered plan runs it for all rows of a
batch. Parameters carry their checkpoint (GGUF) names. Llama weights in GGUF are permuted for interleaved rotary pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pie_core.poem import Cache, Metadata, Parameters, Tensor, attention, embed, linear, read_out, rms_norm, rope, silu


@dataclass(frozen=True)
class Config:
    """Sizes of one checkpoint: `width` = embedding, `ff` = hidden of the MLP, `context` in tokens, `rope_base` = theta."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    context: int
    eps: float
    rope_base: float
    rope_style: str = "interleaved"

    @classmethod
    def from_metadata(cls, meta: Metadata) -> Config:
        """Read the sizes from checkpoint metadata. Raises WeightsError naming a key that is missing, of a wrong type or out of range."""
        arch = meta.str("general.architecture")
        width_key, heads_key, rope_key = f"{arch}.embedding_length", f"{arch}.attention.head_count", f"{arch}.rope.freq_base"
        kv_key, dim_key = f"{arch}.attention.head_count_kv", f"{arch}.attention.key_length"
        width = meta.size(width_key)
        heads = meta.size(heads_key, divides=None if dim_key in meta else (width_key, width))
        return cls(
            layers=meta.size(f"{arch}.block_count"),
            width=width,
            heads=heads,
            kv_heads=meta.size(kv_key, divides=(heads_key, heads)) if kv_key in meta else heads,
            head_dim=meta.size(dim_key) if dim_key in meta else width // heads,
            ff=meta.size(f"{arch}.feed_forward_length"),
            vocab=len(meta.strings("tokenizer.ggml.tokens")),
            context=meta.size(f"{arch}.context_length"),
            eps=meta.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_base=meta.positive(rope_key) if rope_key in meta else 10000.0,
        )


class Attention:
    """Causal attention over the paged cache of one layer."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.c = c
        self.q = p.matrix("attn_q.weight", c.heads * c.head_dim, c.width)
        self.k = p.matrix("attn_k.weight", c.kv_heads * c.head_dim, c.width)
        self.v = p.matrix("attn_v.weight", c.kv_heads * c.head_dim, c.width)
        self.o = p.matrix("attn_output.weight", c.width, c.heads * c.head_dim)

    def __call__(self, x: Tensor, kv: Cache) -> Tensor:
        c = self.c
        q = rope(linear(x, self.q), c.head_dim, c.rope_base, c.rope_style)  # [heads * head_dim]
        k = rope(linear(x, self.k), c.head_dim, c.rope_base, c.rope_style)  # [kv_heads * head_dim]
        v = linear(x, self.v)  # [kv_heads * head_dim]
        kv.append(k, v)
        return linear(attention(q, kv, scale=c.head_dim**-0.5, head_dim=c.head_dim), self.o)  # [width]


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.gate = p.matrix("ffn_gate.weight", c.ff, c.width)
        self.up = p.matrix("ffn_up.weight", c.ff, c.width)
        self.down = p.matrix("ffn_down.weight", c.width, c.ff)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)  # [ff] -> [width]


class Block:
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.eps = c.eps
        self.attention_norm = p.vector("attn_norm.weight", c.width)
        self.attention = Attention(c, p)
        self.mlp_norm = p.vector("ffn_norm.weight", c.width)
        self.mlp = MLP(c, p)

    def __call__(self, h: Tensor, kv: Cache) -> Tensor:
        h += self.attention(rms_norm(h, self.attention_norm, self.eps), kv)  # [width]
        h += self.mlp(rms_norm(h, self.mlp_norm, self.eps))  # [width]
        return h


class Model:
    """Token ids to read-outs: "hidden" [width] after the last norm and "logits" [vocab]."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.c = c
        self.token_embd = p.matrix("token_embd.weight", c.vocab, c.width)
        self.blocks = [Block(c, p.scope(f"blk.{i}")) for i in range(c.layers)]
        self.norm = p.vector("output_norm.weight", c.width)
        self.output = p.matrix("output.weight", c.vocab, c.width) if p.has("output.weight") else self.token_embd  # tied

    def __call__(self, tokens: Tensor, caches: list[Cache]) -> dict[str, Tensor]:
        h = embed(tokens, self.token_embd)  # [width]
        for block, kv in zip(self.blocks, caches, strict=True):
            h = block(h, kv)
        h = rms_norm(read_out(h), self.norm, self.c.eps)  # [width], only rows that are read out
        return {"hidden": h, "logits": linear(h, self.output)}
