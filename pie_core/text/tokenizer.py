"""What a tokenizer is to the engine, and the one description of it that every host's library is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict

from pie_core.text.stream import TextError
from pie_core.weights.metadata import Metadata

MAX_CHARS: Final = 1_000_000  # characters of one encode call; the worst text of that length (digits) takes two seconds
MAX_VOCAB: Final = 2_000_000
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# What a chat template may name -> the checkpoint's word for it (tokenizer.ggml.<word>_token_id).
TEMPLATE_KEYS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Control tokens that end a turn or a text, wherever a checkpoint has them: files often declare only one of theirs.
END_NAMES: Final = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>", "<EOT>"}
)
# Tokens that open a turn; a file that declares one as its end is wrong.
START_NAMES: Final = frozenset({"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|begin_of_text|>", "<s>", "<bos>"})


class TokenizerError(TextError):
    """A checkpoint's tokenizer cannot be used, or an id or text is outside what it takes."""


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: nothing is added, and special tokens in it stay text. Raises TokenizerError over MAX_CHARS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD. Raises TokenizerError for an unknown id."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for. Raises TokenizerError for an unknown id."""
        ...


class TokenizerSpec(TypedDict):
    """Plain JSON. `tokenizer` is a Hugging Face tokenizer.json; `specials` the control tokens; `eos` the ids that end generation,
    the declared one first; `bos` the id a sequence starts with when `add_bos`."""

    tokenizer: dict[str, Any]
    specials: dict[str, int]
    eos: list[int]
    bos: int | None
    add_bos: bool


@dataclass(frozen=True)
class Family:
    """How one pre-tokenizer family splits text before byte-level BPE; `pre` makes the tokenizer.json part."""

    pre: Callable[[], dict[str, Any]]
    add_bos: bool = False  # when the file does not say


def _byte_level(use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _digits_then_byte_level() -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level()]}


FAMILIES: Final[dict[str, Family]] = {"gpt-2": Family(_byte_level), "smollm": Family(_digits_then_byte_level)}


def tokenizer_spec(metadata: Metadata) -> TokenizerSpec:
    """The tokenizer of a checkpoint. Raises TokenizerError for a kind or family that is not known, and for a vocabulary that
    contradicts itself; WeightsError for a missing or mistyped key."""
    kind = metadata.str("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"tokenizer kind {kind!r} is not supported; known: 'gpt2' (byte-level BPE)")
    name = metadata.str("tokenizer.ggml.pre")
    family = FAMILIES.get(name)
    if family is None:
        raise TokenizerError(f"pre-tokenizer family {name!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    vocab = {token: index for index, token in enumerate(tokens)}
    if not 1 <= len(tokens) <= MAX_VOCAB:
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens, 1 to {MAX_VOCAB} are allowed")
    if len(vocab) != len(tokens):
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens but only {len(vocab)} different ones")
    if len(types) != len(tokens):
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens and {len(types)} token types; the counts must be equal")
    added = [
        {"id": index, "content": tokens[index], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for index, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    specials = {tokens[index]: index for index, kind in enumerate(types) if kind == CONTROL and tokens[index]}
    bos = _token_id(metadata, "bos", len(tokens))
    return {
        "tokenizer": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": family.pre(), "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
                "merges": _merges(metadata.strings("tokenizer.ggml.merges"), vocab),
            },
        },
        "specials": specials,
        "eos": _eos(metadata, tokens, specials),
        "bos": bos,
        "add_bos": bos is not None and metadata.optional_bool("tokenizer.ggml.add_bos_token", family.add_bos),
    }  # fmt: skip


def _token_id(metadata: Metadata, name: str, size: int) -> int | None:
    return metadata.optional_int(f"tokenizer.ggml.{name}_token_id", None, low=0, high=size - 1)


def _eos(metadata: Metadata, tokens: list[str], specials: dict[str, int]) -> list[int]:
    declared = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    found = [*declared, *(index for name, index in specials.items() if name in END_NAMES)]
    eos = [index for index in dict.fromkeys(found) if index is not None and tokens[index] not in START_NAMES]
    if not eos:
        raise TokenizerError("the checkpoint names no token that ends a text (tokenizer.ggml.eos_token_id), so generation could never end")
    return eos


def _merges(rows: list[str], vocab: dict[str, int]) -> list[list[str]]:
    merges = []
    for index, row in enumerate(rows):
        left, _, right = row.partition(" ")
        if not left or right not in vocab or left not in vocab or left + right not in vocab:
            raise TokenizerError(f"merge {index} is {row!r}; it must be two tokens of the vocabulary that join to a third")
        merges.append([left, right])
    return merges


def byte_alphabet() -> dict[str, int]:
    """The printable character of byte-level vocabularies -> the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def token_table(spec: TokenizerSpec) -> list[bytes]:
    """The bytes of every id. Added tokens are their own UTF-8 text; all others are spelt in the byte alphabet."""
    alphabet = byte_alphabet()
    literal = {token["content"] for token in spec["tokenizer"]["added_tokens"]}
    vocab: dict[str, int] = spec["tokenizer"]["model"]["vocab"]
    table = [b""] * len(vocab)
    for text, index in vocab.items():
        if text in literal:
            table[index] = text.encode()
            continue
        try:
            table[index] = bytes([alphabet[character] for character in text])
        except KeyError:  # padding entries such as "[PAD1]" may hold other characters; they stand for themselves
            table[index] = text.encode()
    return table
