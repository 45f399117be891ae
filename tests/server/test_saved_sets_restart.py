"""Working sets that inferlets save outlive the server's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pie_server.api.backend import InferletError
from pie_server.config import Settings
from pie_server.service import Service

SOURCE = """
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe, tokens = (await WorkingSet.open("kept")) if input["open"] else WorkingSet(), Pipeline(), []
    feed = [7] if input["open"] else [5, 17, 30, 71, 2, 9, 44, 200, 13, 101, 8, 66, 31, 150, 99, 3, 7]
    if input["save"]:
        fwd = ForwardPass()
        fwd.embed(feed[:-1])
        fwd.state([ws])
        pipe.submit(fwd)
        return await ws.save("kept")
    for _ in range(4):
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        feed = [await out]
        tokens += feed
    return tokens
"""


async def run(model: Path, *inputs: dict[str, bool]) -> list[Any]:
    """Each input's result, or error, on a server that starts and stops."""
    service = Service.from_settings(Settings(model=str(model), device="cpu", kv_pool_mb=4))
    await service.load()
    assert service.status.state == "ready", service.status.error
    results: list[Any] = []
    for input in inputs:
        try:
            results.append(await service.run(SOURCE, "kept.py", {"save": False, "open": False} | input))
        except InferletError as error:
            results.append(error)
    await service.close()
    return results


async def test_a_set_is_opened_after_a_restart(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pie_server.loading.cache_root", lambda: tmp_path)
    nothing, saved, want = await run(tiny_model, {"open": True}, {"save": True}, {})
    assert nothing.kind == "UnknownSavedSet" and saved == 16
    assert len(list((tmp_path / "sets").iterdir())) == 1
    assert await run(tiny_model, {"open": True}) == [want]
