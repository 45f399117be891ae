"""The checkpoint's tokenizer: golden ids, special tokens as text, limits, and vocabularies that are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_core.text.tokenizer import MAX_CHARS, TokenizerError, TokenizerSpec, byte_alphabet, tokenizer_spec
from pie_core.weights import MissingKey, open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from tests.support.tiny_gguf import byte_characters, gguf_bytes, vocabulary, write_tiny_gguf


def test_golden_ids(tokenizer: HfTokenizer, goldens: dict[str, Any]) -> None:
    cases = [case for case in goldens["tokenizer_cases"] if "<|" not in case["text"]]
    assert len(cases) == 15
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_golden_generations_decode(tokenizer: HfTokenizer, goldens: dict[str, Any]) -> None:
    for name in ("completion", "chat_capital", "chat_colors", "chat_math"):
        assert tokenizer.decode(goldens[name]["gen_ids"]) == goldens[name]["gen_text"]
    assert tokenizer.encode(goldens["teacher_forced"]["text"]) == goldens["teacher_forced"]["ids"]


def test_special_tokens_in_text_stay_text(tokenizer: HfTokenizer, spec: TokenizerSpec) -> None:
    for name, index in spec["specials"].items():
        ids = tokenizer.encode(f"a{name}b")
        assert not set(ids) & set(spec["specials"].values())
        assert tokenizer.decode(ids) == f"a{name}b"
        assert tokenizer.token_bytes(index) == name.encode()


def test_the_same_file_with_specials_parses_them(spec: TokenizerSpec) -> None:
    """Other hosts load spec["tokenizer"] as it is; there the special tokens are declared as such."""
    import json

    engine = tokenizers.Tokenizer.from_str(json.dumps(spec["tokenizer"]))
    assert engine.encode("<|im_start|>user", add_special_tokens=False).ids == [1, 4093]


def test_smollm2_ends(spec: TokenizerSpec) -> None:
    assert spec["eos"] == [2, 0]  # <|im_end|> as declared, then <|endoftext|>
    assert (spec["bos"], spec["add_bos"]) == (1, False)
    assert len(spec["specials"]) == 17


# SmolLM2's vocabulary has no token for the bytes of six control characters and of planes 4 to 11, where nothing is assigned.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
COVERED = st.characters(codec="utf-8", exclude_characters=NO_TOKEN).filter(lambda character: not 0x40000 <= ord(character) < 0xC0000)


@settings(deadline=None)
@given(st.text(COVERED, max_size=60))
def test_any_text_comes_back(tokenizer: HfTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_bytes_without_a_token_are_left_out(tokenizer: HfTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(f"a{NO_TOKEN}b")) == "ab"


def test_every_id_has_bytes_and_bad_ids_are_named(tokenizer: HfTokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert all(tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size))
    for bad in (-1, 49152, 1 << 40):
        with pytest.raises(TokenizerError, match=f"id {bad} is outside the vocabulary; ids are 0 to 49151"):
            tokenizer.decode([5, bad])


def test_bytes_that_are_no_text_decode_to_replacements(tokenizer: HfTokenizer) -> None:
    part = tokenizer.encode("😀")[:1]
    assert tokenizer.decode(part) == "�"


def test_long_runs_do_not_blow_up(tokenizer: HfTokenizer) -> None:
    for character in ("a", " ", "日"):
        run = character * (MAX_CHARS // 5)
        assert tokenizer.decode(tokenizer.encode(run)) == run
    with pytest.raises(TokenizerError, match=f"{MAX_CHARS + 1} characters is too long to encode; at most {MAX_CHARS}") as caught:
        tokenizer.encode("a" * (MAX_CHARS + 1))
    assert caught.value.too_long


def test_a_lone_surrogate_is_refused(tokenizer: HfTokenizer) -> None:
    with pytest.raises(TokenizerError, match="character 1 of the text is a lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_threads_share_one_tokenizer(tokenizer: HfTokenizer, goldens: dict[str, Any]) -> None:
    cases = [case for case in goldens["tokenizer_cases"] if "<|" not in case["text"]] * 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, (case["text"] for case in cases))) == [case["ids"] for case in cases]


def test_byte_alphabet_is_the_one_of_byte_level_vocabularies() -> None:
    assert byte_alphabet() == {character: byte for byte, character in enumerate(byte_characters())}
    assert sorted(byte_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def spec_of(**changes: Any) -> TokenizerSpec:
    """The spec of a small tokenizer with some metadata changed; None removes a key."""
    tokens, merges = vocabulary(300)
    pairs: dict[str, Any] = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": merges, "token_type": [3] * 3 + [1] * 297, "eos_token_id": 2,
    }  # fmt: skip
    pairs |= changes
    return tokenizer_spec(
        open_gguf(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in pairs.items() if value is not None}, [])).metadata
    )


TOKENS, MERGES = vocabulary(300)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "kind 'llama' is not supported"),
        ({"pre": "deepseek-v9"}, "family 'deepseek-v9' is not known; known: gpt-2, smollm"),
        ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "300 tokens but only 299 different"),
        ({"tokens": []}, "list of numbers|has 0 tokens"),
        ({"token_type": [1] * 299}, "300 tokens and 299 token types"),
        ({"merges": [*MERGES, "xx yy"]}, f"merge {len(MERGES)} is 'xx yy'"),
        ({"merges": ["a"]}, "merge 0 is 'a'"),
        ({"eos_token_id": None, "token_type": [1] * 300}, "names no token that ends a text"),
        ({"eos_token_id": 1, "token_type": [1] * 300}, "names no token that ends a text"),
    ],
)
def test_vocabularies_that_contradict_themselves(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        spec_of(**changes)


def test_missing_keys_and_ids_outside_are_named() -> None:
    with pytest.raises(MissingKey, match=r"tokenizer\.ggml\.merges"):
        spec_of(merges=None)
    with pytest.raises(Exception, match=r"tokenizer\.ggml\.eos_token_id.* is 300, it must be 0 to 299"):
        spec_of(eos_token_id=300)


@pytest.mark.parametrize(
    ("changes", "eos"),
    [
        ({}, [2, 0]),
        ({"eos_token_id": 0}, [0, 2]),
        ({"eos_token_id": 1}, [0, 2]),  # <|im_start|> never ends a text
        ({"eos_token_id": 2, "eot_token_id": 77, "eom_token_id": 78}, [2, 77, 78, 0]),
        ({"eos_token_id": None}, [0, 2]),
    ],
)
def test_ends(changes: dict[str, Any], eos: list[int]) -> None:
    assert spec_of(**changes)["eos"] == eos


@pytest.mark.parametrize(
    ("changes", "bos", "add"),
    [
        ({}, None, False),
        ({"bos_token_id": 1}, 1, False),
        ({"bos_token_id": 1, "add_bos_token": True}, 1, True),
        ({"add_bos_token": True}, None, False),
    ],
)
def test_bos_policy(changes: dict[str, Any], bos: int | None, add: bool) -> None:
    spec = spec_of(**changes)
    assert (spec["bos"], spec["add_bos"]) == (bos, add)


@pytest.mark.parametrize(("family", "pieces"), [("smollm", ["1", "2", "3", "Ġ", "4"]), ("gpt-2", ["123", "Ġ4"])])
def test_families_split_digits_differently(family: str, pieces: list[str]) -> None:
    merges = ["1 2", "12 3", "Ġ 4"]
    tokens = [*vocabulary(259)[0], "12", "123", "Ġ4"]
    tokenizer = HfTokenizer(spec_of(pre=family, tokens=tokens, merges=merges, token_type=[3] * 3 + [1] * 259))
    assert [tokens[index] for index in tokenizer.encode("123 4")] == pieces


def test_user_defined_tokens_are_found_in_text_control_tokens_are_not() -> None:
    tokenizer = HfTokenizer(spec_of(token_type=[3, 4, 3] + [1] * 297))
    assert tokenizer.encode("<|im_start|>") == [1]
    assert len(tokenizer.encode("<|im_end|>")) > 1


def test_tiny_checkpoints_have_a_working_tokenizer(tmp_path: Path) -> None:
    with open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", vocab=400)) as checkpoint:
        tokenizer = HfTokenizer(tokenizer_spec(checkpoint.metadata))
    text = "hello world, the capital of France is Paris 日本 😀"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode()) and max(ids) >= 259
