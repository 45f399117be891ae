"""The official client against a real server: the default model, and a tiny random one for limits and odd bytes."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import TINY_CONTEXT, LiveServer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server: LiveServer, messages: Any = QUESTION, **fields: Any) -> Any:
    body = {"max_tokens": 12, "temperature": 0, **fields}
    return server.client.chat.completions.create(model=server.model, messages=messages, **body)


def ask_stream(server: LiveServer, messages: Any = QUESTION, **fields: Any) -> list[Any]:
    body = {"max_tokens": 12, "temperature": 0, **fields}
    return list(server.client.chat.completions.create(model=server.model, messages=messages, stream=True, **body))


def texts(chunks: list[Any], n: int = 1) -> list[str]:
    parts: list[list[str]] = [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            parts[choice.index].append(choice.delta.content or "")
    return ["".join(part) for part in parts]


def finishes(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                assert choice.index not in found
                found[choice.index] = choice.finish_reason
    return found


def test_answers_and_counts_exactly(live: LiveServer) -> None:
    answer = ask(live)
    (choice,) = answer.choices
    # text and counts of the golden file: default system turn, question and cue in; seven tokens and the end token out
    assert choice.message.content == "The capital of France is Paris."
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "stop")
    assert answer.object == "chat.completion"
    assert answer.model == live.model
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (37, 8, 45)
    short = ask(live, max_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    assert short.choices[0].message.content == "The capital of France is"


def test_the_stream_says_the_same_in_the_right_shape(live: LiveServer) -> None:
    chunks = ask_stream(live)
    assert texts(chunks) == [ask(live).choices[0].message.content]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert set(finishes(chunks)) == {0}
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(live: LiveServer) -> None:
    ask(live)  # so that both find the same in the cache
    chunks = ask_stream(live, stream_options={"include_usage": True})
    *others, last = chunks
    assert last.choices == []
    assert last.usage == ask(live).usage
    assert all(chunk.usage is None and chunk.choices for chunk in others)


def test_the_raw_stream_ends_with_done(live: LiveServer) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 2, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{live.url}/v1/chat/completions", data=body)) as response:
        lines = [line for line in response.read().decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line[6:]) for line in lines[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(live: LiveServer, stream: bool) -> None:
    alone = ask(live).choices[0].message.content
    if stream:
        chunks = ask_stream(live, n=3)
        assert texts(chunks, 3) == [alone] * 3
        assert set(finishes(chunks)) == {0, 1, 2}
    else:
        answer = ask(live, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == [alone] * 3
        assert answer.usage.completion_tokens == 3 * ask(live).usage.completion_tokens
        assert answer.usage.prompt_tokens == ask(live).usage.prompt_tokens


def test_choices_draw_their_own_numbers(live: LiveServer) -> None:
    answer = ask(live, n=3, temperature=2, seed=1, max_tokens=12)
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_a_stop_string_cuts_exactly_wherever_tokens_end(live: LiveServer) -> None:
    whole = ask(live).choices[0].message.content
    for stop in (whole[5:9], whole[-3:], whole[7]):
        answer = ask(live, stop=stop).choices[0]
        cut = whole[: whole.index(stop)]
        assert (answer.message.content, answer.finish_reason) == (cut, "stop")
        chunks = ask_stream(live, stop=["\0never", stop])
        assert (texts(chunks), finishes(chunks)) == ([cut], {0: "stop"})
    # held back because it begins a stop string, and released in the end
    assert ask(live, stop=[whole[-3:] + "\0"]).choices[0].message.content == whole


def test_seeds(live: LiveServer) -> None:
    def sample(seed: int | None) -> str:
        return str(ask(live, temperature=2, max_tokens=6, seed=seed).choices[0].message.content)

    alone = {seed: sample(seed) for seed in (1, 2, 2**40)}
    assert len(set(alone.values())) == 3
    seeds = [1, 2, 2**40, None, None, 1]
    with ThreadPoolExecutor(6) as pool:  # in a batch as alone
        together = list(pool.map(sample, seeds))
    assert [text for seed, text in zip(seeds, together, strict=True) if seed] == [alone[seed] for seed in seeds if seed]
    assert together[3] != together[4]


def test_content_parts_equal_the_joined_string_and_special_tokens_stay_text(live: LiveServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]}]
    assert ask(live, parts).choices[0].message.content == ask(live).choices[0].message.content
    plain = ask(live, [{"role": "user", "content": "x"}], max_tokens=1).usage.prompt_tokens
    assert ask(live, [{"role": "user", "content": "x<|im_end|>"}], max_tokens=1).usage.prompt_tokens > plain + 3


def test_max_completion_tokens_is_honoured(live: LiveServer) -> None:
    answer = ask(live, max_tokens=openai.omit, max_completion_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("fields", "kind", "status", "code", "param"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, 404, "model_not_found", "model"),
        ({"messages": []}, openai.BadRequestError, 400, None, "messages"),
        ({"messages": [None]}, openai.BadRequestError, 400, None, "messages[0]"),
        ({"temperature": 5}, openai.BadRequestError, 400, None, "temperature"),
        ({"n": 0}, openai.BadRequestError, 400, None, "n"),
        ({"max_tokens": -1}, openai.BadRequestError, 400, None, "max_tokens"),
        ({"top_p": 1.5}, openai.BadRequestError, 400, None, "top_p"),
        ({"logit_bias": {"1000000": 1}}, openai.BadRequestError, 400, None, "logit_bias.1000000"),
        ({"top_logprobs": 3}, openai.BadRequestError, 400, None, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, 400, "unsupported_parameter", "response_format"),
        ({"messages": [{"role": "user", "content": "hello " * 600}]}, openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_classes(
    *, tiny: LiveServer, fields: dict[str, Any], kind: type[openai.APIStatusError], status: int, code: str | None, param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        tiny.client.chat.completions.create(**{"model": tiny.model, "messages": QUESTION, "stream": stream, **fields})
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, param)
    if code == "context_length_exceeded":
        assert str(TINY_CONTEXT) in caught.value.message


def test_generation_ends_at_the_context(tiny: LiveServer) -> None:
    answer = ask(tiny, [{"role": "user", "content": "x" * 200}], max_tokens=10_000, stop=["\0"])
    assert answer.usage.total_tokens <= TINY_CONTEXT
    if answer.choices[0].finish_reason == "length":
        assert answer.usage.total_tokens == TINY_CONTEXT


def test_odd_bytes_stream_as_they_answer(tiny: LiveServer) -> None:
    """A random model samples bytes that are no UTF-8: a stream must cut them as the whole answer does."""
    for seed in range(4):
        fields = {"temperature": 2, "seed": seed, "max_tokens": 60}
        assert texts(ask_stream(tiny, **fields)) == [ask(tiny, **fields).choices[0].message.content]


def metric(server: LiveServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_prompts_are_shared_between_requests_of_one_key_only(tiny: LiveServer) -> None:
    prompt = [{"role": "user", "content": "a prompt of its own, longer than some pages " * 8}]

    def reused(key: str) -> float:
        before = metric(tiny, "pie_reused_tokens_total")
        client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=key, max_retries=0)
        client.chat.completions.create(model="tiny", messages=prompt, max_tokens=1)
        return metric(tiny, "pie_reused_tokens_total") - before

    assert reused("key one") == 0
    assert reused("key one") >= 64
    assert reused("key two") == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_came_out_of_the_cache(tiny: LiveServer, n: int, stream: bool) -> None:
    prompt = [{"role": "user", "content": "a prompt that is longer than some pages " * 6}]

    def cached(key: str, **fields: Any) -> int:
        with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=f"{key} {n} {stream}", max_retries=0) as client:
            body = {"model": tiny.model, "messages": prompt, "max_tokens": 4, "n": n, **fields}
            if stream:
                *_, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body)
                usage = last.usage
            else:
                usage = client.chat.completions.create(**body).usage
        assert usage.prompt_tokens > 100
        return int(usage.prompt_tokens_details.cached_tokens)

    out = {"extra_body": {"cache_prompt": False}}
    assert cached("who stays out", **out) == 0
    assert cached("who stays out") == 0, "nothing was left in the cache"
    full = cached("who stays out")
    assert full >= 96 and full % 16 == 0
    assert cached("who stays out", **out) == 0
    assert cached("somebody else") == 0
    assert cached("somebody else", extra_body={"cache_prompt": True}) == full


def test_cache_prompt_of_another_type_is_refused_by_name(tiny: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tiny, extra_body={"cache_prompt": "no"})
    assert caught.value.param == "cache_prompt" and 'cache_prompt must be true or false, got "no"' in caught.value.message


def test_a_client_that_leaves_frees_its_pages(tiny: LiveServer) -> None:
    assert metric(tiny, "pie_pages_used") == 0
    body = {"max_tokens": 400, "temperature": 0, "stop": ["\0"]}
    stream = tiny.client.chat.completions.create(model=tiny.model, messages=QUESTION, stream=True, **body)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while metric(tiny, "pie_pages_used") or metric(tiny, "pie_requests_active"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_eight_at_once_and_nothing_is_left(tiny: LiveServer) -> None:
    def answer(i: int) -> str:
        return str(ask(tiny, [{"role": "user", "content": str(i)}], max_tokens=20).choices[0].message.content)

    alone = [answer(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, range(8))) == alone
    assert metric(tiny, "pie_pages_used") == 0


def test_models_and_health(live: LiveServer) -> None:
    assert [model.id for model in live.client.models.list()] == [live.model]
    assert live.client.models.retrieve(live.model).id == live.model
    with urllib.request.urlopen(f"{live.url}/health") as response:
        health = json.load(response)
    assert (health["status"], health["model"], health["device"]["kind"]) == ("ok", live.model, "cpu")


def test_a_served_path_is_named_by_its_file(tiny: LiveServer, tiny_model: Path) -> None:
    assert tiny.model == tiny_model.stem
