"""The model language refuses what its checkpoint or the kernels do not give, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pie_core.eta.trace import Trace
from pie_core.models.registry import UnknownArchitecture, resolve
from pie_core.poem import Cache, Param, Parameters, PoemError, attention, embed, linear, read_out, rms_norm, rope, trace_model
from pie_core.poem.lower import lower
from pie_core.poem.ops import TABLE
from pie_core.weights import Checkpoint, MissingKey, open_gguf
from pie_core.weights.errors import BadMetadata
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=2)
    return open_gguf(path)


def row(n: int) -> Any:
    trace = Trace("model", table=TABLE)
    return embed(trace.add("tokens", (), {}, ("u32", ())), Param("e", "q8_0", 100, n))


MATRIX = Param("m", "q4_1", 96, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(row(32), MATRIX), r"linear 'm' takes a row of 64, got f32\[32\]"),
        (lambda: rms_norm(row(32), Param("n", "f32", 1, 64), 1e-5), "rms_norm 'n' takes a row of 64"),
        (lambda: rope(row(64), 48, 1e4), "head_dim 48 must be even and divide 64"),
        (lambda: rope(row(64), 32, 1e4, "sideways"), "style 'sideways'"),
        (lambda: attention(row(64), Cache(3), scale=1.0, head_dim=32), "layer 3: append to the cache before attention"),
    ],
)
def test_misuse_names_the_parameter(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PoemError, match=message):
        call()


def test_appending_twice_is_refused() -> None:
    h = row(64)
    cache = Cache(0)
    cache.append(h, h)
    with pytest.raises(PoemError, match="layer 0 appends to its cache twice"):
        cache.append(h, h)


def test_parameters_check_names_and_shapes(checkpoint: Checkpoint) -> None:
    p = Parameters(checkpoint)
    with pytest.raises(MissingKey, match=r"no tensor 'blk\.7\.attn_q\.weight'"):
        p.scope("blk.7").matrix("attn_q.weight", 64, 64)
    with pytest.raises(PoemError, match=r"'blk\.0\.attn_q\.weight' has shape \[64, 64\], the metadata asks for \[64, 96\]"):
        p.scope("blk.0").matrix("attn_q.weight", 64, 96)
    assert p.has("output_norm.weight")
    assert not p.has("output.weight")


class _Broken:
    """A model file whose outputs are not read-outs."""

    def __init__(self, config: Any, p: Parameters) -> None:
        self.w = p.matrix("token_embd.weight", config.vocab, config.width)

    def __call__(self, tokens: Any, caches: list[Cache]) -> dict[str, Any]:
        return {"logits": embed(tokens, self.w)}


class _NoHead(_Broken):
    """Reads out without a norm."""

    def __call__(self, tokens: Any, caches: list[Cache]) -> dict[str, Any]:
        h = embed(tokens, self.w)
        caches[0].append(h, h)
        caches[1].append(h, h)
        out = read_out(h)
        return {"hidden": out, "logits": linear(out, self.w)}


def test_a_model_must_return_its_read_outs(checkpoint: Checkpoint) -> None:
    config = resolve(checkpoint.metadata).Config.from_metadata(checkpoint.metadata)
    with pytest.raises(PoemError, match="a dict with the read-outs hidden, logits"):
        trace_model(_Broken, config, checkpoint)
    with pytest.raises(PoemError, match=r"read_out must be followed by rms_norm|never attends to it"):
        lower(trace_model(_NoHead, config, checkpoint))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes().replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", 1)
    with pytest.raises(UnknownArchitecture, match=r"unknown architecture 'mamba'; known: llama\. .*--poem FILE"):
        resolve(open_gguf(data).metadata)


def test_a_poem_file_replaces_the_registered_one(tmp_path: Path, checkpoint: Checkpoint) -> None:
    good = tmp_path / "mine.py"
    good.write_text("from pie_core.models.llama import Config, Model as Base\nclass Model(Base):\n    mine = True\n")
    mine, built_in = resolve(checkpoint.metadata, good), resolve(checkpoint.metadata)
    config = mine.Config.from_metadata(checkpoint.metadata)
    assert trace_model(mine.Model, config, checkpoint) == trace_model(built_in.Model, config, checkpoint)
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\n")
    with pytest.raises(PoemError, match="must define the classes Model and Config"):
        resolve(checkpoint.metadata, bad)
    bad.write_text("raise ValueError('no')\n")
    with pytest.raises(PoemError, match=r"bad\.py, line 1, did not load: ValueError: no"):
        resolve(checkpoint.metadata, bad)


POEM = """
from pie_core.models.llama import Config as Sizes, Model as Base
import sys
class Config(Sizes):
    pass
class Model(Base):
    pass
"""


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("import sys\nsys.exit(0)\n", r"bad\.py, line 2, did not load: SystemExit: 0"),
        ("x = (\n", r"bad\.py, line 1, did not load: SyntaxError: '\(' was never closed"),
        (POEM.replace("class Config(Sizes):\n    pass", "class Config: pass"), r"bad\.py failed to read .*: AttributeError"),
        (POEM + "    def __init__(self, c, p):\n        {}['key']\n", r"bad\.py, line 9, failed to build the model: KeyError: 'key'"),
        (
            POEM + "    def __call__(self, tokens, caches):\n        sys.exit(3)\n",
            r"bad\.py, line 9, failed to run the model: SystemExit: 3",
        ),
        (
            POEM + "    def __call__(self, tokens, caches):\n        return tokens + 'x'\n",
            r"bad\.py, line 9, failed to run the model: \w+: .",
        ),
        (POEM + "    def __call__(self, tokens, caches):\n        return None\n", r"bad\.py .*: a model returns a dict .*, got NoneType"),
        (
            POEM + "    def __call__(self, tokens, caches):\n        return {'hidden': 1, 'logits': 2}\n",
            "read-out 'hidden' must be a tensor, got int",
        ),
        (
            POEM + "    def __call__(self, tokens, caches):\n        out = super().__call__(tokens, caches)\n"
            "        return {'hidden': out['logits'], 'logits': out['hidden']}\n",
            r"read-out 'hidden' has shape \[\d+\], the config asks for \[64\]",
        ),
    ],
)
def test_a_poem_file_that_fails_is_one_sentence_with_its_line(tmp_path: Path, checkpoint: Checkpoint, source: str, match: str) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    with pytest.raises(PoemError, match=match) as caught:
        found = resolve(checkpoint.metadata, bad)
        trace_model(found.Model, found.Config.from_metadata(checkpoint.metadata), checkpoint)
    assert "\n" not in str(caught.value)


def test_a_poems_config_has_the_sizes_of_the_engine(tmp_path: Path, checkpoint: Checkpoint) -> None:
    bad = tmp_path / "bad.py"
    config = "class Config:\n    layers = width = 1\n    @classmethod\n    def from_metadata(cls, meta): return cls()\n"
    bad.write_text(f"class Model: pass\n{config}")
    with pytest.raises(PoemError, match=r"bad\.py: Config\.vocab is None; it must be a whole number from 1"):
        resolve(checkpoint.metadata, bad).Config.from_metadata(checkpoint.metadata)


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("llama.attention.head_count", 0, "1 to"),
        ("llama.attention.head_count", 3, "divide llama.embedding_length, which is 64"),
        ("llama.attention.head_count_kv", 0, "1 to"),
        ("llama.attention.head_count_kv", 3, "divide llama.attention.head_count, which is 2"),
        ("llama.attention.key_length", 0, "1 to"),
        ("llama.block_count", 0, "1 to"),
        ("llama.embedding_length", 0, "1 to"),
        ("llama.feed_forward_length", 0, "1 to"),
        ("llama.context_length", 0, "1 to"),
        ("llama.rope.freq_base", 0.0, "above 0"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "above 0"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_key_and_value(tmp_path: Path, key: str, value: float, must: str) -> None:
    meta = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", metadata={key: value})).metadata
    with pytest.raises(BadMetadata, match=rf"metadata key '{key}' of tiny\.gguf is {value}, it must .*{must}"):
        resolve(meta).Config.from_metadata(meta)
