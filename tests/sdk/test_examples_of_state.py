"""The examples of working sets on the cpu device: each is checked against a way to the same tokens that does not share its idea."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sdk.conftest import SDK
from tests.sdk.real_engine import Job, run_jobs

EXAMPLES = SDK.parent / "examples"
RAIN = "The best thing about rain is"
AGAIN = "ha ha ha ha ha ha ha ha ha ha"
PARIS = "Paris is the capital of France. Rome is the"
WIDE = 4096  # a window that hides nothing

# Greedy decoding by a mask that says what window and sinks say: the same tokens by another way through the engine.
MASKED = """
from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe, made, held = WorkingSet(), Pipeline(), [], 0
    fresh = chat.prefix() + model.encode(input["prompt"])
    while len(made) < input["max_tokens"]:
        places = range(held, held + len(fresh))
        rows = [[p <= q and (p > q - input["window"] or p < input["sinks"]) for p in range(held + len(fresh))] for q in places]
        fwd = ForwardPass()
        fwd.embed(fresh)
        fwd.state([ws], StateGeometry.folding(mask=rows))
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        held += len(fresh)
        fresh = [await out]
        made += fresh
    return {"text": model.decode(made)}
"""
# The log-probability of each token of `answer` behind `prompt`, from one pass.
SCORED = """
from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, WorkingSet, gather_row, intrinsics, log_softmax

async def main(input):
    prompt = chat.prefix() + model.encode(input["prompt"])
    ids, answer, ws, pipe = prompt + input["answer"], Channel.of(input["answer"]), WorkingSet(), Pipeline()
    fwd = ForwardPass()
    fwd.embed(ids)
    fwd.state([ws])
    fwd.read(range(len(prompt) - 1, len(ids) - 1))
    out = fwd.epilogue(lambda: gather_row(log_softmax(intrinsics.outputs("logits")), answer.read()))
    pipe.submit(fwd)
    return sum(await out)
"""


def job(example: str, **input: Any) -> Job:
    return Job(f"{example}.py", (EXAMPLES / f"{example}.py").read_text(encoding="utf-8"), input)


RUNS: dict[str, Job] = {
    "again": job("prompt_lookup", prompt=AGAIN, max_tokens=24),
    "again, greedy": job("prompt_lookup", prompt=AGAIN, max_tokens=24, drafts=0),
    "again, tree": job("speculative_tree", prompt=AGAIN, max_tokens=24),
    "paris": job("prompt_lookup", prompt=PARIS, max_tokens=24),
    "paris, tree": job("speculative_tree", prompt=PARIS, max_tokens=24),
    "again, on the device": job("draft_ahead", prompt=AGAIN, max_tokens=24),
    "paris, on the device": job("draft_ahead", prompt=PARIS, max_tokens=24),
    "numbers": job("prompt_lookup"),
    "numbers, on the device": job("draft_ahead"),
    "one token, on the device": job("draft_ahead", prompt="Paris", max_tokens=4, width=2),
    "one token": job("prompt_lookup", prompt="Paris", max_tokens=4, drafts=0),
    "hello": job("hello", prompt=RAIN),
    "one beam": job("beam_search", prompt=RAIN, max_tokens=8, beams=1),
    "beams": job("beam_search", prompt=RAIN, max_tokens=8, beams=4),
    "best": job("best_of_n", prompt=RAIN, n=3, max_tokens=8, seed=1),
    "best, greedy": job("best_of_n", prompt=RAIN, n=2, max_tokens=8, temperature=0),
    "votes": job("self_consistency", votes=4, max_tokens=40),
    "votes, greedy": job("self_consistency", votes=2, max_tokens=24, temperature=0),
    "wide": job("attention_sinks", prompt=RAIN, max_tokens=8, window=WIDE),
    "sinks": job("attention_sinks", prompt=RAIN, max_tokens=12, window=4, sinks=2),
    "no sinks": job("attention_sinks", prompt=RAIN, max_tokens=12, window=4, sinks=0),
    "sinks by mask": Job("masked.py", MASKED, {"prompt": RAIN, "max_tokens": 12, "window": 4, "sinks": 2}),
    "no sinks by mask": Job("masked.py", MASKED, {"prompt": RAIN, "max_tokens": 12, "window": 4, "sinks": 0}),
}
WRONG = [
    (job("prompt_lookup", drafts=33), "drafts 33; use"),
    (job("prompt_lookup", max_tokens=0), "max_tokens is 0"),
    (job("draft_ahead", width=1), "width 1; use"),
    (job("beam_search", beams=0), "beams 0; use"),
    (job("best_of_n", n=0), "n is 0"),
    (job("self_consistency", votes=33), "votes is 33"),
    (job("attention_sinks", window=-1), "window -1"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    jobs = [*RUNS.values(), *(wrong for wrong, _ in WRONG)]
    found = run_jobs("cpu", jobs)
    told = dict(zip([*RUNS, *(words for _, words in WRONG)], found, strict=True))
    both = {f"{name}, scored": {"prompt": RAIN, "answer": told[name]["tokens"]} for name in ("one beam", "beams")}
    scores = run_jobs("cpu", [Job("scored.py", SCORED, input) for input in both.values()])
    return told | dict(zip(both, scores, strict=True))


def test_drafts_change_the_passes_and_not_the_tokens(results: dict[str, Any]) -> None:
    assert results["again"]["tokens"] == results["again, greedy"]["tokens"] == results["again, tree"]["tokens"]
    assert results["again, greedy"]["passes"] == 24
    assert results["again"]["passes"] < 12, "a text that repeats itself is guessed"
    assert results["paris"]["tokens"] == results["paris, tree"]["tokens"]


def test_drafts_need_no_program(results: dict[str, Any]) -> None:
    for name, width in (("again", 4), ("paris", 4), ("numbers", 4), ("one token", 2)):
        alone = results[f"{name}, on the device"]
        assert alone["tokens"] == results[name]["tokens"]
        assert len(alone["tokens"]) / width <= alone["passes"] <= len(alone["tokens"])
    for name in ("again", "numbers"):
        assert results[f"{name}, on the device"]["passes"] < len(results[name]["tokens"]) / 2, "a text that repeats itself is guessed"


def test_beams_find_what_is_likelier_than_the_greedy_text(results: dict[str, Any]) -> None:
    one, beams = results["one beam"], results["beams"]
    assert one["text"] == results["hello"]["text"]
    assert beams["text"] != one["text"] and beams["logprob"] > one["logprob"]
    for name in ("one beam", "beams"):  # forks at every step, and one pass over all, see the same
        assert results[name]["logprob"] == pytest.approx(results[f"{name}, scored"], abs=0.05)


def test_the_best_of_several(results: dict[str, Any]) -> None:
    best = results["best"]
    assert len(set(best["texts"])) == len(best["scores"]) == 3
    assert best["text"] == best["texts"][best["best"]] and best["scores"][best["best"]] == max(best["scores"]) < 0
    assert set(results["best, greedy"]["texts"]) == {results["hello"]["text"]}


def test_the_majority_of_several_reasonings(results: dict[str, Any]) -> None:
    votes = results["votes"]
    last = [re.findall(r"-?\d+(?:\.\d+)?", text)[-1:] for text in votes["texts"]]
    cast = [number for (number,) in filter(None, last)]
    assert len(set(votes["texts"])) == 4 and cast
    assert votes["votes"] == {number: cast.count(number) for number in cast}
    assert cast.count(votes["answer"]) == max(map(cast.count, cast))
    assert len(set(results["votes, greedy"]["texts"])) == 1


def test_windows_and_sinks_hide_what_a_mask_hides(results: dict[str, Any]) -> None:
    assert results["wide"]["text"] == results["hello"]["text"]
    assert results["sinks"]["text"] == results["sinks by mask"]["text"]
    assert results["no sinks"]["text"] == results["no sinks by mask"]["text"] != results["sinks"]["text"]
    assert results["wide"]["tokens_kept"] > 4, "a window hides tokens and frees none"


@pytest.mark.parametrize("words", [words for _, words in WRONG])
def test_inputs_out_of_range_are_refused_in_words(results: dict[str, Any], words: str) -> None:
    assert isinstance(results[words], Exception) and words in str(results[words]) and "use " in str(results[words])


def test_each_example_of_state_is_short() -> None:
    for name in ("draft_ahead", "prompt_lookup", "beam_search", "best_of_n", "self_consistency", "attention_sinks", "run_ahead"):
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60, name
