"""Writes small, valid GGUF files: a random llama with a real byte-level vocabulary, for tests and benches without a download."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named Tiny<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (" the", " a", " is", " of", " and", " to", "hello", " world", " capital", " France", " Paris", "user", "system", "assistant")

# GGUF's numbers for value types and tensor formats, as this writer uses them.
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
FORMAT_IDS = {"f32": 0, "f16": 1, "q4_1": 3, "q8_0": 8}
FILE_TYPES = {"f32": 0, "f16": 1, "q4_1": 3, "q8_0": 7}


@dataclass(frozen=True)
class RawTensor:
    """One tensor ready to write: `rows` x `cols`, `data` in the checkpoint layout of `fmt`. One-dimensional when `rows` is None."""

    name: str
    fmt: str
    rows: int | None
    cols: int
    data: bytes


def quantise(values: Array, fmt: str) -> bytes:
    """f32 [rows, cols] -> the bytes of `fmt` ("f32", "f16", "q4_1", "q8_0"); cols must be a multiple of 32 for the quantised ones."""
    if fmt == "f32":
        return values.astype("<f4").tobytes()
    if fmt == "f16":
        return values.astype("<f2").tobytes()
    blocks = values.astype(np.float32).reshape(-1, 32)
    if fmt == "q4_1":
        low, high = blocks.min(axis=1), blocks.max(axis=1)
        scale = (high - low) / 15
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.clip(np.rint((blocks - low[:, None]) * inverse[:, None]), 0, 15).astype(np.uint8)
        out = np.empty((len(blocks), 20), np.uint8)
        out[:, 0:2] = scale.astype("<f2")[:, None].view(np.uint8)
        out[:, 2:4] = low.astype("<f2")[:, None].view(np.uint8)
        out[:, 4:] = codes[:, :16] | (codes[:, 16:] << 4)  # low nibbles are elements 0..15
        return out.tobytes()
    if fmt == "q8_0":
        scale = np.abs(blocks).max(axis=1) / 127
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        out = np.empty((len(blocks), 34), np.uint8)
        out[:, 0:2] = scale.astype("<f2")[:, None].view(np.uint8)
        out[:, 2:] = np.rint(blocks * inverse[:, None]).astype(np.int8).view(np.uint8)
        return out.tobytes()
    raise ValueError(f"unknown format {fmt!r}; this writer knows {', '.join(FORMAT_IDS)}")


def dequantise(data: bytes, fmt: str, rows: int, cols: int) -> Array:
    """The inverse of `quantise`: f32 [rows, cols], exactly what a kernel must compute with."""
    if fmt == "f32":
        return np.frombuffer(data, "<f4").reshape(rows, cols).copy()
    if fmt == "f16":
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(rows, cols)
    if fmt == "q4_1":
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 20)
        scale, low = (blocks[:, i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
        codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
        return np.asarray(codes * scale + low, np.float32).reshape(rows, cols)
    if fmt == "q8_0":
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return np.asarray(blocks[:, 2:].view(np.int8).astype(np.float32) * scale, np.float32).reshape(rows, cols)
    raise ValueError(f"unknown format {fmt!r}; this writer knows {', '.join(FORMAT_IDS)}")


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A typed metadata value. ints are u32 in scalars and i32 in lists, which is what token_type needs."""
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return struct.pack("<IIQ", ARRAY, I32, len(value)) + struct.pack(f"<{len(value)}i", *value)
    raise TypeError(f"metadata of type {type(value).__name__} is not written here: {value!r}")


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[RawTensor], *, alignment: int = 32, version: int = 3) -> bytes:
    """A whole GGUF file. Metadata values: bool, int (u32), float (f32), str, list of str, list of int (i32)."""
    pairs = dict(metadata) if alignment == 32 else {**metadata, "general.alignment": alignment}
    header = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(pairs))]
    header += [_string(key) + _value(value) for key, value in pairs.items()]
    body: list[bytes] = []
    offset = 0
    for tensor in tensors:
        shape = (tensor.cols,) if tensor.rows is None else (tensor.cols, tensor.rows)  # the innermost dimension comes first
        header.append(_string(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, FORMAT_IDS[tensor.fmt], offset))
        padding = -len(tensor.data) % alignment
        body.append(tensor.data + bytes(padding))
        offset += len(tensor.data) + padding
    head = b"".join(header)
    return head + bytes(-len(head) % alignment) + b"".join(body)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _merge_candidates() -> Iterator[tuple[str, str]]:
    """Endless, ordered merges: the words letter by letter, then every two, three and four letter string."""
    characters = byte_characters()
    for word in WORDS:
        text = "".join(characters[byte] for byte in word.encode())
        for end in range(2, len(text) + 1):
            yield text[: end - 1], text[end - 1]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    for length in (2, 3, 4):
        for group in product(letters, repeat=length):
            yield "".join(group[:-1]), group[-1]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(tokens, merges) with `size` tokens: the specials, 256 bytes, then one token a merge. Raises ValueError below 259."""
    tokens = [*SPECIALS, *sorted(byte_characters(), key=ord)]
    if size < len(tokens):
        raise ValueError(f"vocab={size} is too small: a byte-level vocabulary here needs at least {len(tokens)}")
    known, merges = set(tokens), []
    for left, right in _merge_candidates():
        if len(tokens) == size:
            break
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return tokens, merges


def tiny_tensors(
    *, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, ff: int, vocab: int, seed: int, fmt: str
) -> Iterator[RawTensor]:
    """The tensors of a tied llama in checkpoint order. The embedding is q8_0 when `fmt` is q4_1, as in SmolLM2."""
    rng = np.random.default_rng(seed)

    def matrix(name: str, rows: int, cols: int, kind: str, scale: float) -> RawTensor:
        values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(scale)
        return RawTensor(name, kind, rows, cols, quantise(values, kind))

    def norm(name: str) -> RawTensor:
        return RawTensor(name, "f32", None, width, (1 + 0.1 * rng.standard_normal(width)).astype("<f4").tobytes())

    yield matrix("token_embd.weight", vocab, width, "q8_0" if fmt == "q4_1" else fmt, 0.3)
    for layer in range(layers):
        shapes = {
            "ffn_down": (width, ff), "ffn_gate": (ff, width), "ffn_up": (ff, width), "attn_k": (kv_heads * head_dim, width),
            "attn_output": (width, heads * head_dim), "attn_q": (heads * head_dim, width), "attn_v": (kv_heads * head_dim, width),
        }  # fmt: skip
        yield norm(f"blk.{layer}.attn_norm.weight")
        yield norm(f"blk.{layer}.ffn_norm.weight")
        for part, (rows, cols) in shapes.items():
            yield matrix(f"blk.{layer}.{part}.weight", rows, cols, fmt, cols**-0.5)
    yield norm("output_norm.weight")


def write_tiny_gguf(
    path: str | os.PathLike[str],
    *,
    layers: int = 1,
    width: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    ff: int = 128,
    vocab: int = 320,
    context: int = 512,
    seed: int = 0,
    fmt: str = "q4_1",
    metadata: Mapping[str, Any] | None = None,
    alignment: int = 32,
) -> Path:
    """Write a random llama checkpoint with SmolLM2's tensor names, metadata keys and formats; the same arguments give the same bytes.

    `fmt` is the format of the matrices (f32, f16, q4_1, q8_0). `metadata` replaces or adds keys; a value of None removes one, which
    is how tests make a file with a missing key or another architecture. Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|> (eos), then
    the 256 bytes, then merges; `vocab` is at least 259.
    """
    tokens, merges = vocabulary(vocab)
    pairs: dict[str, Any] = {
        "general.architecture": "llama", "general.type": "model", "general.name": "Tiny random llama", "general.license": "apache-2.0",
        "llama.block_count": layers, "llama.context_length": context, "llama.embedding_length": width, "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "general.file_type": FILE_TYPES[fmt], "llama.vocab_size": vocab,
        "llama.rope.dimension_count": head_dim, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (vocab - len(SPECIALS)), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": CHATML, "general.quantization_version": 2,
    }  # fmt: skip
    if heads * head_dim != width:
        pairs |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    pairs |= metadata or {}
    tensors = list(
        tiny_tensors(layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ff=ff, vocab=vocab, seed=seed, fmt=fmt)
    )
    target = Path(path)
    target.write_bytes(gguf_bytes({key: value for key, value in pairs.items() if value is not None}, tensors, alignment=alignment))
    return target
