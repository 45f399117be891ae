"""The tokenizer and chat encoder of the default model, loaded once."""

from __future__ import annotations

from typing import Any

import pytest

from pie_core.text.chat import ChatEncoder, load_chat
from pie_core.text.tokenizer import TokenizerSpec, tokenizer_spec
from pie_core.weights import Checkpoint, open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from tests.support.paths import default_model
from tests.support.paths import goldens as load_goldens


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return open_gguf(default_model())


@pytest.fixture(scope="session")
def spec(checkpoint: Checkpoint) -> TokenizerSpec:
    return tokenizer_spec(checkpoint.metadata)


@pytest.fixture(scope="session")
def tokenizer(spec: TokenizerSpec) -> HfTokenizer:
    return HfTokenizer(spec)


@pytest.fixture(scope="session")
def chat(checkpoint: Checkpoint, spec: TokenizerSpec, tokenizer: HfTokenizer) -> ChatEncoder:
    return load_chat(checkpoint.metadata, spec, tokenizer)


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    return load_goldens()
