"""The chat API's inferlet in the sandbox, over the engine's deterministic runner: what it makes of the context and the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from test_sandbox_process import OracleRunner

from pie_core.host.process import Process
from pie_core.host.services import ModelFacts, Services
from pie_core.text.stream import TextError
from pie_server.api.openai import builtin_source
from pie_server.api.openai_schema import parse_chat_request
from pie_server.sandbox import Limits, Sandbox
from tests.engine.fake_runner import HIDDEN, VOCAB, FakeRunner, limits
from tests.engine.support import running
from tests.host.support import ToyChat, ToyTokenizer

FRAME = 3  # tokens that ToyChat adds to one message


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=Limits(text_chars=1 << 20), spares=0)
    yield made
    made.close()


async def ask(
    sandbox: Sandbox,
    tokens: int,
    *,
    pages: int,
    context: int = 4096,
    chat: Any = None,
    runner: type[FakeRunner] = FakeRunner,
    arena: int = 4096,
    held: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    """The inferlet's result for a prompt of `tokens` tokens on an engine of `pages`, whose `arena` has so many words for channels, of which
    others hold `held`; no answer ends before its limit."""
    facts = ModelFacts("toy", VOCAB, HIDDEN, min(context, pages * 16), (), pages)
    messages = [{"role": "user", "content": "a" * (tokens - FRAME)}]
    request = parse_chat_request({"messages": messages, "temperature": 0, **fields})
    async with running(runner(limits(pages=pages, context=context, arena_words=arena))) as engine:
        others = [engine.open_instance("other").channel("f32", (held // 2,))] if held else []
        process = Process(engine, Services(facts, ToyTokenizer(), chat or ToyChat()), "openai_chat.py")
        payload = {"id": "x", "created": 1, "model": "toy", "request": request}
        result: dict[str, Any] = await process.run(sandbox.open(process.port), process.request(builtin_source("openai_chat.py"), payload))
        assert engine.pool.used == 0 and engine.arena.used == held and len(others) == bool(held)
    return result


@pytest.mark.parametrize(
    ("tokens", "n", "pages", "limit"),
    [
        (40, 8, 20, 25),  # 2 pages of the prompt shared, 2 more each
        (33, 8, 18, 32),  # as many tokens as fill pages to their ends
        (32, 8, 17, 17),  # the prompt's last token is each choice's own
        (4, 8, 8, 13),
        (40, 3, 200, 1049),  # (2 + 198 // 3) pages
        (40, 1, 20, 280),  # alone: all of the pool
    ],
)
async def test_choices_share_the_pool(sandbox: Sandbox, tokens: int, n: int, pages: int, limit: int) -> None:
    """Without a bound of its own this request could never fit, and would wait for pages that no one else holds."""
    result = await ask(sandbox, tokens, pages=pages, n=n, max_tokens=5000)
    assert [choice["finish_reason"] for choice in result["body"]["choices"]] == ["length"] * n
    assert result["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": n * limit, "total_tokens": tokens + n * limit,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


async def test_max_tokens_that_fit_are_kept(sandbox: Sandbox) -> None:
    assert (await ask(sandbox, 40, pages=20, n=8, max_tokens=25))["usage"]["completion_tokens"] == 200
    assert (await ask(sandbox, 40, pages=20, n=8, max_tokens=24))["usage"]["completion_tokens"] == 192


async def test_choices_without_any_room_are_refused_by_name(sandbox: Sandbox) -> None:
    result = await ask(sandbox, 40, pages=6, n=8)
    assert (result["status"], result["error"]["param"], result["error"]["code"]) == (400, "n", "context_length_exceeded")
    assert result["error"]["message"] == (
        "8 answers to messages of 40 tokens do not fit into the KV cache of 96 tokens; ask for a smaller n, or start the server with a "
        "larger --kv-pool-mb"
    )


async def test_who_bounds_the_messages_is_named(sandbox: Sandbox) -> None:
    pool = (await ask(sandbox, 100, pages=6))["error"]
    assert pool["message"] == (
        "the messages are 100 tokens, the KV cache of this server holds 96, and at least 1 must be left to answer; "
        "a larger --kv-pool-mb makes room"
    )
    context = (await ask(sandbox, 100, pages=60, context=64))["error"]
    assert context["message"] == "the messages are 100 tokens, the context of toy is 64, and at least 1 must be left to answer"
    assert {pool["code"], context["code"]} == {"context_length_exceeded"}


async def test_an_answer_of_too_many_logprobs_is_refused(sandbox: Sandbox) -> None:
    result = await ask(sandbox, 40, pages=600, n=2, max_tokens=4000, logprobs=True, top_logprobs=20)
    assert (result["status"], result["error"]["param"], result["error"]["code"]) == (400, "top_logprobs", None)
    assert result["error"]["message"].startswith("168,000 log-probabilities are too many for one answer, which may have 120,000")


async def test_a_bias_for_a_token_that_the_model_does_not_have(sandbox: Sandbox) -> None:
    result = await ask(sandbox, 10, pages=6, logit_bias={str(VOCAB): 1})
    assert (result["status"], result["error"]["param"]) == (400, f"logit_bias.{VOCAB}")
    assert result["error"]["message"] == f"logit_bias.{VOCAB}: the tokens of toy are 0 to {VOCAB - 1}"


async def test_no_room_for_histories_is_told_as_such(sandbox: Sandbox) -> None:
    """A history of 1,024 ids takes twice as many words of device memory; a request gets a quarter of the arena."""

    async def of(n: int, held: int = 0) -> dict[str, Any]:
        return await ask(sandbox, 40, pages=200, runner=OracleRunner, arena=1 << 14, held=held, n=n, max_tokens=260, frequency_penalty=1)

    assert (await of(2))["usage"]["completion_tokens"] == 520
    never, later = await of(8), await of(2, 13_000)
    assert (never["status"], never["error"]["param"]) == (400, "n")
    assert "words of channel cells" in never["error"]["message"]
    assert (later["status"], later["error"]["code"]) == (503, "kv_cache_full")
    assert "words of device memory" in later["error"]["message"]


class Strict(ToyChat):
    """Refuses every conversation, for its length or for another reason."""

    def __init__(self, *, too_long: bool) -> None:
        self._too_long = too_long

    def encode(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> list[int]:
        raise TextError("no", too_long=self._too_long)


@pytest.mark.parametrize(("too_long", "code"), [(True, "context_length_exceeded"), (False, "invalid_messages")])
async def test_messages_over_the_hosts_limits_are_too_long_for_the_context(sandbox: Sandbox, too_long: bool, code: str) -> None:
    result = await ask(sandbox, 10, pages=6, chat=Strict(too_long=too_long))
    assert (result["status"], result["error"]["code"]) == (400, code)


async def test_messages_over_the_limit_of_a_host_call_too(sandbox: Sandbox) -> None:
    result = await ask(sandbox, 2 << 20, pages=6)
    assert (result["status"], result["error"]["code"]) == (400, "context_length_exceeded")
