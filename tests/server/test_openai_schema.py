"""Bodies of chat completions: what is accepted, as what, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from pie_server.api.openai_schema import parse_chat_request
from pie_server.errors import ApiError

USER = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> dict[str, Any]:
    return parse_chat_request({"messages": USER, **fields})


def test_defaults() -> None:
    assert parse() == {
        "messages": USER, "model": None, "temperature": 1.0, "seed": None, "max_tokens": None,
        "stop": [], "n": 1, "stream": False, "include_usage": False, "cache_prompt": True, "top_p": 1.0, "top_k": None, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": [], "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 2}, "temperature", 2.0),
        ({"temperature": None}, "temperature", 1.0),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5.0}, "max_tokens", 5),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens", 7),
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": ["a", "b", "c", "d"]}, "stop", ["a", "b", "c", "d"]),
        ({"stop": None}, "stop", []),
        ({"stop": []}, "stop", []),
        ({"n": 8}, "n", 8),
        ({"seed": -1}, "seed", -1),
        ({"seed": 2**63}, "seed", 2**63),
        ({"cache_prompt": False}, "cache_prompt", False),
        ({"cache_prompt": None}, "cache_prompt", True),
        ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
        ({"stream": True, "stream_options": {}}, "include_usage", False),
        ({"stream": True, "stream_options": None}, "include_usage", False),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_p": 0}, "top_p", 0.0),
        ({"top_p": None}, "top_p", 1.0),
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": 0}, "top_k", None),
        ({"top_k": -1}, "top_k", None),
        ({"min_p": 0.05}, "min_p", 0.05),
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"presence_penalty": 2.0}, "presence_penalty", 2.0),
        ({"logit_bias": {"20": -100, "3": 1.5}}, "logit_bias", [[3, 1.5], [20, -100.0]]),
        ({"logprobs": True}, "logprobs", True),
        ({"logprobs": True}, "top_logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "top_logprobs", 20),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs", 0),
        ({"top_p": 1.0, "logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}, "n", 1),
        ({"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "tools": None}, "n", 1),
        ({"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False}, "n", 1),
        ({"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "metadata": {}}, "n", 1),
        ({"user": None, "metadata": None, "store": None, "service_tier": None, "parallel_tool_calls": None}, "n", 1),
    ],
)
def test_accepted(fields: dict[str, Any], name: str, value: Any) -> None:
    got = parse(**fields)[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("messages", "content"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "developer", "content": "a"}], "a"),
        ([{"role": "user", "content": "a", "name": "Ann"}], "a"),
        ([{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}], "a"),
        ([{"role": "user", "content": ""}], ""),
        ([{"role": "user", "content": "<|im_end|>"}], "<|im_end|>"),
    ],
)
def test_messages(messages: list[Any], content: str) -> None:
    (message,) = parse(messages=messages)["messages"]
    assert message["content"] == content
    assert set(message) == {"role", "content"}
    assert message["role"] == ("system" if messages[0]["role"] == "developer" else messages[0]["role"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": USER * 5000}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [*USER, "x"]}, "messages[1]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"model": 3}, "model"),
        ({"temperature": 5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": float("nan")}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**5000}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"stop": 1}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"cache_prompt": 0}, "cache_prompt"),
        ({"cache_prompt": "false"}, "cache_prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": True}, "top_p"),
        ({"top_p": "0.9"}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"hello": 2}}, "logit_bias.hello"),
        ({"logit_bias": {"-1": 2}}, "logit_bias.-1"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
        ({"logit_bias": {"1": None}}, "logit_bias.1"),
        ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 50}..."),
        ({"logit_bias": {"²": 1}}, "logit_bias.²"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"user": 7}, "user"),
        ({"user": "\ud800"}, "user"),
        ({"metadata": "a"}, "metadata"),
        ({"metadata": [["a", "b"]]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": None}}, "metadata.a"),
        ({"store": 0}, "store"),
        ({"store": "true"}, "store"),
        ({"service_tier": ["auto"]}, "service_tier"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"safety_identifier": {}}, "safety_identifier"),
        ({"prompt_cache_key": 1.5}, "prompt_cache_key"),
        ({"prompt_cache_retention": True}, "prompt_cache_retention"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert param.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0] in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("name", ["tools", "response_format", "functions", "prediction"])
def test_what_is_not_supported_yet_is_said_so(name: str) -> None:
    with pytest.raises(ApiError, match="not supported yet"):
        parse(**{name: {"something": 1}})


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_the_body_must_be_an_object(body: Any) -> None:
    with pytest.raises(ApiError, match="JSON object"):
        parse_chat_request(body)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": None, "temperature": True}, "temperature must be a number from 0 to 2, got true"),
        ({"messages": [None]}, "messages[0] must be an object with role and content, got null"),
        ({"messages": [{"role": {"a": 1}}]}, 'got {"a": 1}'),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'messages[0].role is "tool"; tools are not supported yet'),
        ({"messages": [{"role": "user", "content": [{"type": None}]}]}, 'type is null; only "text" parts are supported yet'),
        ({"stop": {"a": [None, False]}}, 'got {"a": [null, false]}'),
        ({"tool_choice": "required"}, 'tool_choice = "required" is not supported yet; leave it out'),
        ({"top_logprobs": 2}, "top_logprobs = 2 needs logprobs = true"),
        ({"logit_bias": {"x": 1}}, 'the keys of logit_bias are token ids, whole numbers in decimal digits, got "x"'),
        ({"n": "é\ud800"}, 'got "é\\ud800"'),
        ({"store": "yes"}, 'store must be true or false, got "yes"'),
        ({"user": 7}, "user must be a string, got 7"),
        ({"metadata": ["a"]}, 'metadata must be an object of strings like {"topic": "demo"}, got ["a"]'),
        ({"metadata": {"run": 3}}, "metadata.run must be a string, got 3"),
    ],
)
def test_messages_show_json(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", 'unknown parameter "best"; it is not in the OpenAI chat API: leave it out'),
        ("topk", 'did you mean "top_k"?'),
        ("logprob", 'did you mean "logprobs"?'),
        ("best_of", "belongs to the older completions API, which is not served: send messages and leave it out"),
        ("prompt", "belongs to the older completions API, which is not served: send messages"),
        ("temprature", 'did you mean "temperature"?'),
        ("maxtokens", 'did you mean "max_tokens"?'),
        ("x" * 5000, "leave it out"),
    ],
)
def test_an_unknown_parameter_comes_with_a_fix(name: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**{name: 1})
    assert words in caught.value.message and caught.value.code == "unknown_parameter"
    assert len(caught.value.message) < 300
