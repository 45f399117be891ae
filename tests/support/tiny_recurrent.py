"""A small model with linear recurrences, test only: a poem file (`Model`, `Config`) and the writer of its random checkpoint.

A layer is a gated diagonal recurrence where the checkpoint holds its tensors, else Llama's attention. Pass this file as `poem`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pie_core.models import llama
from pie_core.models.llama import MLP, Attention, Config
from pie_core.poem import Cache, Parameters, Tensor, linear, silu
from tests.support.tiny_gguf import RawTensor, gguf_bytes, quantise, tiny_tensors, vocabulary

POEM = Path(__file__)
Kind = Literal["attention", "recurrent"]
ATTENTION = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
STATE = 96  # width of a recurrent state: another than the model's

__all__ = ["POEM", "Config", "Model", "write_tiny_recurrent"]


class Recurrence:
    """out(h * silu(gate(x))), h = decay * h + gain * in(x) over the sequence."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.into = p.matrix("recur_in.weight", STATE, c.width)
        self.gate = p.matrix("recur_gate.weight", STATE, c.width)
        self.out = p.matrix("recur_out.weight", c.width, STATE)
        self.decay = p.vector("recur_decay", STATE)
        self.gain = p.vector("recur_gain", STATE)

    def __call__(self, x: Tensor, state: Cache) -> Tensor:
        h = state.recur("h", linear(x, self.into), self.decay, self.gain)  # [STATE]
        return linear(h * silu(linear(x, self.gate)), self.out)  # [width]


class Block(llama.Block):
    """A layer of either kind."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.eps = c.eps
        self.attention_norm = p.vector("attn_norm.weight", c.width)
        self.attention = Recurrence(c, p) if p.has("recur_decay") else Attention(c, p)  # type: ignore[assignment]
        self.mlp_norm = p.vector("ffn_norm.weight", c.width)
        self.mlp = MLP(c, p)


class Model(llama.Model):
    """Token ids to read-outs, through layers of both kinds."""

    def __init__(self, c: Config, p: Parameters) -> None:
        self.c = c
        self.token_embd = p.matrix("token_embd.weight", c.vocab, c.width)
        self.blocks = [Block(c, p.scope(f"blk.{i}")) for i in range(c.layers)]
        self.norm = p.vector("output_norm.weight", c.width)
        self.output = self.token_embd


def write_tiny_recurrent(path: str | os.PathLike[str], kinds: Sequence[Kind] = ("recurrent", "recurrent"), *, seed: int = 5) -> Path:
    """Write a random checkpoint with a layer of each of `kinds`; the same arguments give the same bytes."""
    sizes: dict[str, Any] = {"layers": len(kinds), "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 128, "vocab": 320}
    metadata = {
        "general.architecture": "tiny-recurrent", "tiny-recurrent.block_count": len(kinds), "tiny-recurrent.context_length": 512,
        "tiny-recurrent.embedding_length": sizes["width"], "tiny-recurrent.feed_forward_length": sizes["ff"],
        "tiny-recurrent.attention.head_count": sizes["heads"], "tiny-recurrent.attention.head_count_kv": sizes["kv_heads"],
        "tiny-recurrent.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": vocabulary(sizes["vocab"])[0],
    }  # fmt: skip
    target = Path(path)
    target.write_bytes(gguf_bytes(metadata, list(_tensors(kinds, seed, sizes))))
    return target


def _tensors(kinds: Sequence[Kind], seed: int, sizes: dict[str, Any]) -> Iterator[RawTensor]:
    for tensor in tiny_tensors(**sizes, seed=seed, fmt="f32"):
        _, _, name = tensor.name.partition("blk.")
        layer, _, part = name.partition(".")
        if not layer or kinds[int(layer)] == "attention" or part not in ATTENTION:
            yield tensor
    rng, width = np.random.default_rng(seed + 1), sizes["width"]
    for layer in (i for i, kind in enumerate(kinds) if kind == "recurrent"):
        for part, rows, cols in (("recur_in", STATE, width), ("recur_gate", STATE, width), ("recur_out", width, STATE)):
            values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(cols**-0.5)
            yield RawTensor(f"blk.{layer}.{part}.weight", "f32", rows, cols, quantise(values, "f32"))
        decay = rng.uniform(0.8, 0.999, STATE) * rng.choice((-1, 1), STATE)  # far tokens matter
        yield RawTensor(f"blk.{layer}.recur_decay", "f32", None, STATE, decay.astype("<f4").tobytes())
        yield RawTensor(f"blk.{layer}.recur_gain", "f32", None, STATE, rng.uniform(0.5, 1.5, STATE).astype("<f4").tobytes())
