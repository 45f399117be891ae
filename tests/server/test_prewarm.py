"""`pie serve --prewarm FILE`: what is computed before the server is ready, who finds it, and files that are refused."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from pie_core.text.chat import ChatEncoder
from pie_core.text.stream import MessageError
from pie_core.weights import open_gguf
from pie_server import pace
from pie_server.api.backend import Progress
from pie_server.cli import execute
from pie_server.config import Settings, load_settings
from pie_server.errors import UserError
from pie_server.loading import load_text
from pie_server.logs import configure
from pie_server.pace import Paces
from pie_server.prewarm import Opening, opening
from pie_server.service import Service
from tests.server.conftest import TINY_CONTEXT, pie_serve

SYSTEM = {"role": "system", "content": "You answer in one word, and you never say why. " * 3}
ASK, ANSWER = {"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."}


def write(folder: Path, value: Any, name: str = "start.json") -> Path:
    file = folder / name
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return file


def test_every_key_finds_it_computed(tiny_model: Path, tmp_path: Path) -> None:
    shots, system = write(tmp_path, [SYSTEM, ASK, ANSWER], "shots.json"), write(tmp_path, [SYSTEM], "system.json")
    with pie_serve(
        "--device", "cpu", "--model", str(tiny_model), "--kv-pool-mb", "16", "--prewarm", str(shots), "--prewarm", str(system)
    ) as server:

        def cached(messages: Sequence[Any], key: str | None, **fields: Any) -> int:
            body = {"messages": messages, "max_tokens": 1, **fields}
            headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
            request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                return int(json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"])

        def asked(text: str) -> dict[str, str]:
            return {"role": "user", "content": text}

        only_system = cached([SYSTEM, asked("first")], None)
        with_shots = cached([SYSTEM, ASK, ANSWER, asked("second")], "sk-one")
        assert 96 <= only_system < with_shots
        assert cached([SYSTEM, asked("third")], "sk-two") == only_system
        long = asked("what somebody said behind it, which is nobody else's business " * 2)
        assert cached([SYSTEM, long], "sk-one") == only_system
        assert cached([SYSTEM, long], "sk-one") > only_system + 64
        assert cached([SYSTEM, long], "sk-two") == only_system, "what follows stays with the key"
        assert cached([SYSTEM, asked("fourth")], "sk-one", cache_prompt=False) == 0


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> ChatEncoder:
    with open_gguf(tiny_model) as checkpoint:
        return load_text(checkpoint).chat


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, ASK, ANSWER], [ASK, ANSWER], [SYSTEM, ASK], [ASK]])
def test_an_opening_is_what_every_such_request_begins_with(chat: ChatEncoder, messages: list[dict[str, str]]) -> None:
    ids = opening(Path("x.json"), messages, chat, 4096).ids
    follow: list[list[dict[str, str]]] = [[{"role": "user", "content": text}] for text in ("and?", "1", "\nsay more", "Äh")]
    if messages[-1]["role"] == "user":
        follow = [[], [ANSWER, ASK]]
    wholes = [chat.encode([*messages, *more]) for more in follow]
    assert all(whole[: len(ids)] == ids for whole in wholes)
    assert len({len(whole) for whole in wholes}) > 1 and len(ids) > len(chat.encode(messages, cue=False)) - 2


class Grumpy:
    """A template that refuses the conversation."""

    def encode(self, messages: Any, **_: Any) -> list[int]:
        raise MessageError("conversations must begin with the user")


def test_messages_that_the_template_refuses() -> None:
    with pytest.raises(UserError, match=r"the --prewarm file x\.json: conversations must begin with the user"):
        opening(Path("x.json"), [SYSTEM], Grumpy(), 4096)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "cannot read the --prewarm file {file}: No such file or directory"),
        ("[", "the --prewarm file {file} is not JSON"),
        ("[1e999]", "the --prewarm file {file} holds 1e999"),
        ({"messages": [SYSTEM]}, "the --prewarm file {file} must hold a list of chat messages like [{{"),
        ([], "the --prewarm file {file}: messages is empty"),
        ([SYSTEM, {"role": "robot", "content": ""}], "the --prewarm file {file}: messages[1].role must be one of"),
        ([{"role": "system"}], "the --prewarm file {file}: messages[0].content is missing"),
        ([{"role": "system", "content": "x " * TINY_CONTEXT}], "tokens; the model's context of 512 leaves no room to answer"),
    ],
)
def test_a_bad_file_is_named_and_ends_the_command(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any, words: str
) -> None:
    file = tmp_path / "start.json" if value is None else write(tmp_path, value)
    assert execute(["serve", "--port", "0", "--model", str(tiny_model), "--prewarm", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pie: ") and said.count("\n") == 1
    assert words.format(file=file) in said and str(file) in said


def test_a_folder_is_no_file(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["serve", "--port", "0", "--model", str(tiny_model), "--prewarm", str(tmp_path)]) == 2
    assert f"cannot read the --prewarm file {tmp_path}: it is a directory" in capsys.readouterr().err


def test_the_environment_names_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_PREWARM", "a.json, b.json")
    assert load_settings().prewarm == [Path("a.json"), Path("b.json")]
    assert load_settings(prewarm=[Path("c.json")]).prewarm == [Path("c.json")]


async def test_what_the_cache_cannot_hold_is_said_by_its_file(tmp_path: Path) -> None:
    """The context is larger than the pool, so that only loading can tell."""
    model = tmp_path / "long.gguf"
    write_tiny_gguf(model, context=1 << 16)
    file = write(tmp_path, [{"role": "system", "content": "x" * 30_000}])
    service = Service.from_settings(Settings(model=str(model), device="cpu", kv_pool_mb=1, prewarm=[file]))
    try:
        await service.load()
        assert service.status.state == "failed" and service.status.error is not None
        assert f"the --prewarm file {file}: prewarm: 30008 tokens exceed" in service.status.error
        assert "a larger --kv-pool-mb makes room" in service.status.error
    finally:
        await service.close()


async def test_what_is_too_short_to_cache_is_a_warning(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [SYSTEM])
    settings = Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4, prewarm=[file])
    service = Service.from_settings(settings)
    service._openings = [Opening(file, list(range(5))), *service._openings, Opening(file, [])]
    configure()
    try:
        await service.load()
        assert service.status.state == "ready", service.status.error
        assert re.fullmatch(r"\d\d+ tokens of 3 files, 2 of them too short to be kept", service.prewarm_text)
    finally:
        await service.close()
    warned = [line for line in capfd.readouterr().err.splitlines() if "prewarm_too_short" in line]
    assert len(warned) == 2 and 'file=start.json error="it has 5 tokens; 16 are the least that is kept"' in warned[0]


async def test_progress_counts_tokens(tiny_model: Path, tmp_path: Path) -> None:
    long, short = ([{"role": "system", "content": letter * n}] for letter, n in (("x", 400), ("y", 100)))
    files = [write(tmp_path, long, "long.json"), write(tmp_path, short, "short.json")]
    told: list[tuple[str, int, int, bool]] = []

    def keep(now: Progress) -> None:
        if now.stage.endswith("ahead"):
            told.append((now.stage, now.done, now.total, now.ends_at is not None))

    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4, prewarm=files), on_progress=keep)
    try:
        await service.load()
        assert service.status.state == "ready", service.status.error
        lengths = [len(start.ids) for start in service._openings]
        assert told == [
            ("computing long.json ahead", 0, sum(lengths), False),
            ("computing long.json ahead", 256, sum(lengths), True),
            ("computing short.json ahead", lengths[0], sum(lengths), True),
        ]
        assert service.prewarm_text == f"{sum(n // 16 * 16 for n in lengths)} tokens of 2 files"
    finally:
        await service.close()


def test_an_expected_end_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now, paces = [100.0], Paces()
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace.time, "time", lambda: 1000.0 + now[0])

    def at(seconds: float, done: int, total: int = 100) -> float | None:
        now[0] = seconds
        return paces.ends_at("x", done, total)

    assert [at(100, 10), at(101, 10), at(110, 20), at(120, 55)] == [None, None, 1190.0, 1140.0]
    assert [at(500, 5), at(510, 10), at(520, 10, 50), at(530, 30, 0)] == [None, 1690.0, None, None], "what goes back begins anew"
    paces.forget("x")
    assert at(540, 40, 0) is None and at(541, 40, 50) is None


AHEAD = """
from inferlet import model
from inferlet.eta import ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ids = list(range(100, 150))
    made = await model.prewarm(ids) if input["make"] else None
    ws, pipe, fwd = WorkingSet(reuse=input["reuse"]), Pipeline(), ForwardPass()
    fwd.embed(ids)
    fwd.state([ws])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    await out
    return [made, await ws.cached()]
"""


async def test_what_an_inferlet_makes_ahead_is_found_by_later_ones_of_its_tenant(tiny_model: Path) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    try:
        await service.load()

        async def ran(tenant: str, make: bool = False, reuse: bool = True) -> Any:
            return await service.run(AHEAD, "ahead.py", {"make": make, "reuse": reuse}, tenant=tenant)

        assert await ran("a", make=True, reuse=False) == [48, 0]
        assert await ran("a") == [None, 48]
        assert await ran("b", reuse=False) == [None, 0]
        assert await ran("b") == [None, 0]
        assert await ran("b", make=True) == [48, 48]
    finally:
        await service.close()
