"""The service over a tiny model on the cpu device: life, messages, cancellation, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from pie_server import cli
from pie_server.api.backend import InferletError
from pie_server.config import Settings
from pie_server.errors import UserError
from pie_server.metrics import Metrics
from pie_server.metrics_help import HELP
from pie_server.service import Service

LOOP = """
from inferlet import model, send
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe, tokens = WorkingSet(), Pipeline(), model.encode("hello world")
    for i in range(input["n"]):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        tokens = [await out]
        send(i)
    return {"n": input["n"]}
"""


TOO_MUCH = """
from inferlet import model
from inferlet.eta import ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    fwd, pipe = ForwardPass(), Pipeline()
    fwd.embed([1] * (model.pages * model.page_tokens + 1))
    fwd.state([WorkingSet()])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd); await out
"""

NOBODY_SENDS = """
from inferlet import receive

async def main(input):
    return await receive()
"""


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    await service.load()
    assert service.status.state == "ready", service.status.error
    yield service
    await service.close()
    await service.close()


def assert_nothing_held(service: Service) -> None:
    stats = service.stats()
    assert {name: stats[name] for name in ("pages_used", "arena_words_used", "instances")} == {
        "pages_used": 0, "arena_words_used": 0, "instances": 0,
    }  # fmt: skip


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_messages_come_in_order_to_a_slow_reader(service: Service) -> None:
    seen = []

    async def slow(message: Any) -> None:
        await asyncio.sleep(0.002)
        seen.append(message)

    assert await service.run(LOOP, "loop.py", {"n": 12}, slow) == {"n": 12}
    assert seen == list(range(12))
    assert_nothing_held(service)
    assert service.stats()["steps_total"] >= 12


async def test_many_at_once(service: Service) -> None:
    results = await asyncio.gather(*(service.run(LOOP, "loop.py", {"n": n}) for n in range(1, 9)))
    assert results == [{"n": n} for n in range(1, 9)]
    assert_nothing_held(service)


async def test_cancelling_frees_everything_at_any_moment(service: Service) -> None:
    for messages in (0, 1, 5):
        seen: list[Any] = []

        async def note(message: Any, seen: list[Any] = seen) -> None:
            seen.append(message)

        task = asyncio.create_task(service.run(LOOP, "loop.py", {"n": 400}, note))
        await asyncio.sleep(0)
        await until(lambda seen=seen, messages=messages: len(seen) >= messages)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_nothing_held(service)
        assert len(seen) < 400


async def test_a_reader_that_fails_ends_the_inferlet(service: Service) -> None:
    async def gone(message: Any) -> None:
        raise ConnectionResetError("the client left")

    with pytest.raises(ConnectionResetError):
        await service.run(LOOP, "loop.py", {"n": 400}, gone)
    assert_nothing_held(service)


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_on_top_of_a_reader_that_fails_leaves_no_run(service: Service, turns: int) -> None:
    """A client that leaves is met first by a write, and by the loss of its connection some turns of the loop later."""

    async def gone(message: Any) -> None:
        asyncio.get_running_loop().call_soon(cancel_in, turns)
        raise ConnectionResetError("the client left")

    def cancel_in(left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(cancel_in, left - 1)
        else:
            task.cancel()

    task = asyncio.create_task(service.run(LOOP, "loop.py", {"n": 400}, gone))
    await asyncio.wait([task])
    await until(lambda: not service.stats()["instances"])
    assert service._idle.is_set() and not service._runs
    assert_nothing_held(service)


async def test_the_authors_error_has_its_place(service: Service) -> None:
    with pytest.raises(InferletError) as caught:
        await service.run("def main(input):\n    return input['x']\n", "mine.py", {})
    error = caught.value
    assert (error.kind, error.message, error.file, error.line) == ("KeyError", "'x'", "mine.py", 2)
    assert str(error) == "KeyError: 'x' (mine.py, line 2)"
    assert_nothing_held(service)


async def test_nobody_can_send_to_an_inferlet_that_only_receives(service: Service) -> None:
    with pytest.raises(InferletError, match="whoever started this run sends none") as caught:
        await service.run(NOBODY_SENDS, "alone.py", {})
    assert (caught.value.kind, caught.value.line) == ("Deadlock", 5)
    assert_nothing_held(service)


async def test_logs_go_to_the_one_who_asked(service: Service) -> None:
    lines = []
    await service.run(
        "def main(input):\n    print('a')\n    return {}\n", "mine.py", {}, on_log=lambda level, text: lines.append((level, text))
    )
    assert lines == [("info", "a")]


async def test_before_loading_and_after_closing_there_is_no_model(tiny_model: Path) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=1))
    for _ in range(2):
        with pytest.raises(UserError, match="not loaded"):
            await service.run(LOOP, "loop.py", {"n": 1})
        assert service.stats() == {}
        await service.close()


async def test_a_pool_over_the_devices_memory_fails_the_load_with_a_sentence(tiny_model: Path) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=100_000))
    await service.load()
    assert service.status.state == "failed"
    assert service.status.error is not None and "\n" not in service.status.error
    await service.close()


async def test_closing_while_loading_does_not_wait(tiny_model: Path) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    loading = asyncio.create_task(service.load())
    await until(lambda: service.status.progress.stage != "starting")
    loading.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await loading
        await service.close()


async def test_the_pool_bounds_the_context_that_inferlets_are_told(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    write_tiny_gguf(path, context=100_000)
    service = Service.from_settings(Settings(model=str(path), device="cpu", kv_pool_mb=1))
    await service.load()
    source = "from inferlet import model\ndef main(input):\n    return model.context\n"
    context = await service.run(source, "context.py", {})
    assert context == service.card.context == service.stats()["pages_free"] * 16 < 100_000
    over = (
        rf"{context + 1} exceed the context of {context}, all that the KV cache holds; the KV cache has 1 MB, a larger --kv-pool-mb makes"
    )
    with pytest.raises(InferletError, match=over) as caught:
        await service.run(TOO_MUCH, "much.py", {})
    assert (caught.value.kind, caught.value.line) == ("ContextLengthExceeded", 10)
    await service.close()


async def test_every_counter_of_the_engine_is_explained(tiny_model: Path) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    try:
        await service.load()
        found = set(service.stats())
        text = Metrics(service.stats).render().decode()
    finally:
        await service.close()
    assert found <= set(HELP)
    assert set(HELP) - found == {"state_slots_free", "state_slots_used"}, "only of models with recurrent state"
    for name, words in HELP.items():
        assert words[0].isupper() and words.lower() != name.replace("_", " "), name
        assert name not in found or f"# HELP pie_{name} {words}\n" in text


async def test_a_pool_that_holds_no_question_is_told_instead_of_a_command_that_fails(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=1))
    try:
        await service.load()
        cli._print_ready("http://x", service)
        fine, tokens = capsys.readouterr().out, service.pool_tokens
        cli._say_page("http://x")
        page = capsys.readouterr().out
        monkeypatch.setattr(cli, "LEAST_POOL_TOKENS", tokens + 1)
        cli._print_ready("http://x", service)
        small = capsys.readouterr().out
    finally:
        await service.close()
    assert "chat/completions" in fine and "note:" not in fine
    assert "hello in" not in fine and page.startswith("  http://x/hello in a browser")
    assert "chat/completions" not in small and f"room for {tokens:,} tokens" in small and "a larger --kv-pool-mb" in small


def test_progress_is_told_stage_by_stage(tiny_model: Path) -> None:
    stages = []
    settings = Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4)
    service = Service.from_settings(settings, on_progress=lambda progress: stages.append((progress.stage, progress.done, progress.total)))

    async def main() -> None:
        await service.load()
        await service.close()

    asyncio.run(main())
    assert {stage for stage, _, _ in stages} >= {"opening the device", "opening the sandbox", "loading weights"}
    weights = [(done, total) for stage, done, total in stages if stage == "loading weights" and total]
    assert weights and weights[-1][0] == weights[-1][1]
