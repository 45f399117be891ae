"""What a request may say about sampling, with the official client against the real model: each filter, penalty and bias has its effect,
the log-probabilities are the model's own, and a seed gives the same text."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import LiveServer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SAY_YES = [{"role": "user", "content": "Say: yes yes yes yes yes yes yes yes"}]
ANSWER = "The capital of France is Paris."


def ask(server: LiveServer, messages: Any = QUESTION, **fields: Any) -> Any:
    body = {"max_tokens": 12, "temperature": 0, **fields}
    extra = {name: body.pop(name) for name in ("top_k", "min_p") if name in body}
    return server.client.chat.completions.create(model=server.model, messages=messages, extra_body=extra, **body)


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


# leave nothing but the likeliest token, at any temperature
GREEDY: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}, {"top_k": 40, "top_p": 0.01, "min_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("filters", GREEDY, ids=[str(f) for f in GREEDY])
def test_a_filter_that_leaves_one_token_is_greedy(live: LiveServer, filters: dict[str, Any]) -> None:
    assert text(ask(live, temperature=2, seed=3, **filters)) == ANSWER


def test_filters_draw_only_what_they_leave(live: LiveServer) -> None:
    """At temperature 1 the model's own probabilities tell which tokens a filter leaves."""

    def first_tokens(**fields: Any) -> list[Any]:
        answers = [ask(live, temperature=1, seed=seed, n=8, max_tokens=1, logprobs=True, top_logprobs=20, **fields) for seed in range(3)]
        return [choice.logprobs.content[0] for answer in answers for choice in answer.choices]

    likeliest = first_tokens()[0].top_logprobs
    assert len({entry.token for entry in first_tokens()}) > 8, "without a filter the first token is anything"
    assert {entry.token for entry in first_tokens(top_k=3)} == {alternative.token for alternative in likeliest[:3]}
    bound = math.exp(likeliest[0].logprob) * 0.5
    assert {entry.token for entry in first_tokens(min_p=0.5)} == {a.token for a in likeliest if math.exp(a.logprob) >= bound}
    mass, nucleus = 0.0, set()
    for alternative in likeliest:
        if mass < 0.4:
            nucleus.add(alternative.token)
        mass += math.exp(alternative.logprob)
    assert 1 < len(nucleus) < 10
    assert {entry.token for entry in first_tokens(top_p=0.4)} <= nucleus


@pytest.mark.parametrize(("frequency", "presence"), [(1.0, 0.0), (0.0, 1.5), (0.6, 0.5), (-0.5, 0.0)])
def test_penalties_lower_what_was_said(live: LiveServer, frequency: float, presence: float) -> None:
    """Every token is the best of the model's own alternatives after the penalties for the answer so far."""
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
    answer = ask(live, SAY_YES, max_tokens=24, logprobs=True, top_logprobs=20, **penalties)
    seen: Counter[str] = Counter()
    changed = False
    for entry in answer.choices[0].logprobs.content:
        scores = {a.token: a.logprob - frequency * seen[a.token] - presence * (seen[a.token] > 0) for a in entry.top_logprobs}
        best = max(scores, key=lambda token: scores[token])
        assert scores[entry.token] >= scores[best] - 1e-3
        changed |= entry.token != entry.top_logprobs[0].token
        seen[entry.token] += 1
    assert changed or frequency < 0
    assert text(answer) == text(ask(live, SAY_YES, max_tokens=24, **penalties))


def test_bias_forbids_and_forces(live: LiveServer) -> None:
    entries = ask(live, logprobs=True).choices[0].logprobs.content
    paris = entries[5]
    assert paris.token == " Paris"
    plain = ask(live, max_tokens=6, logprobs=True, top_logprobs=2)
    second = plain.choices[0].logprobs.content[5].top_logprobs[1].token
    # the ids are found by forcing each: a bias of 100 leaves nothing else
    token = next(i for i in range(7000, 7100) if text(ask(live, max_tokens=1, logit_bias={str(i): 100})) == " Paris")
    assert text(ask(live, max_tokens=6, logit_bias={str(token): -100})) == ANSWER.removesuffix(" Paris.") + second
    assert text(ask(live, max_tokens=3, logit_bias={str(token): 100})) == " Paris" * 3
    many = {str(i): -100 for i in range(1024)} | {str(token): 100}
    with pytest.raises(openai.BadRequestError, match="1025 token ids"):
        ask(live, logit_bias=many)
    del many["0"]
    assert text(ask(live, max_tokens=2, logit_bias=many)) == " Paris" * 2


def test_logprobs_are_the_models_own(live: LiveServer) -> None:
    plain = ask(live, logprobs=True, top_logprobs=20).choices[0]
    entries = plain.logprobs.content
    assert "".join(entry.token for entry in entries) == plain.message.content == ANSWER
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob == max(a.logprob for a in entry.top_logprobs)
        assert len({a.token for a in entry.top_logprobs}) == 20
        assert sum(math.exp(a.logprob) for a in entry.top_logprobs) <= 1 + 1e-5
    # a temperature, a filter or a bias changes what is drawn, not what is told
    hot = ask(live, max_tokens=1, temperature=2, seed=1, top_k=1, logit_bias={"5": 3}, logprobs=True, top_logprobs=20)
    assert hot.choices[0].logprobs.content == entries[:1]
    bare = ask(live, logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in bare] == [entry.logprob for entry in entries]
    assert all(entry.top_logprobs == [] for entry in bare)
    assert ask(live).choices[0].logprobs is None


@pytest.mark.parametrize("fields", [{}, {"stop": [" is"]}, {"stop": ["France is"]}, {"max_tokens": 3}, {"n": 2}], ids=str)
def test_a_stream_tells_the_same_logprobs(live: LiveServer, fields: dict[str, Any]) -> None:
    whole = ask(live, logprobs=True, top_logprobs=2, **fields)
    chunks = list(ask(live, logprobs=True, top_logprobs=2, stream=True, **fields))
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [entry for c in parts if c.logprobs for entry in c.logprobs.content] == choice.logprobs.content
        assert all(c.logprobs for c in parts if c.delta.content)
        told = "".join(entry.token for entry in choice.logprobs.content)
        assert told.startswith(choice.message.content), "each token of the text is told"
        assert len(told) - len(choice.message.content) < 8, "and none of a stop string's own"


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.5, "top_p": 0.9}, {"temperature": 1, "top_k": 50, "min_p": 0.02},
    {"temperature": 1, "frequency_penalty": 1, "presence_penalty": 1, "logit_bias": {"253": 2}, "logprobs": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", SEEDED, ids=str)
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(live: LiveServer, fields: dict[str, Any]) -> None:
    alone = [text(ask(live, seed=seed, **fields)) for seed in (1, 2)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: text(ask(live, seed=seed, **fields)), [1, 2, 1, 2]))
    assert together == alone * 2


def test_odd_bytes_have_entries_too(tiny: LiveServer) -> None:
    """A random model draws bytes that are no UTF-8: each token has its entry, and the bytes of all are the text's."""
    for seed in range(3):
        answer = ask(tiny, temperature=2, seed=seed, max_tokens=40, logprobs=True).choices[0]
        data = b"".join(bytes(entry.bytes) for entry in answer.logprobs.content)
        assert data.decode("utf-8", "replace") == answer.message.content
