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
    assert resolve(checkpoint.metadata, good).Model.mine
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\n")
    with pytest.raises(PoemError, match="must define the classes Model and Config"):
        resolve(checkpoint.metadata, bad)
    bad.write_text("raise ValueError('no')\n")
    with pytest.raises(PoemError, match="did not load: ValueError: no"):
        resolve(checkpoint.metadata, bad)
