"""The examples of samplers on the cpu device: settings that leave a sampler no choice of its own make it another one, with its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.conftest import SDK, Local
from tests.sdk.real_engine import Job, run_jobs
from tests.sdk.scripted_host import ScriptedHost, drive
from tests.support.paths import goldens

EXAMPLES = SDK.parent / "examples"
PROMPT = "Once upon a time"
AGAIN = {"prompt": "ha ha ha ha ha ha ha ha ha ha", "temperature": 0.01}
STRONG = {"repetition": 1.5, "presence": 2.0, "frequency": 2.0}
NONE = {"presence": 0.0, "frequency": 0.0}
FORCED = goldens()["teacher_forced"]
# an example with its input; the example and input that give the same text
GREEDY: tuple[str, dict[str, Any]] = ("hello", {})
DRAWN: tuple[str, dict[str, Any]] = ("sampling", {"temperature": 0.8})
SAME: list[tuple[str, dict[str, Any], tuple[str, dict[str, Any]]]] = [
    ("sampling", {"temperature": 0}, GREEDY),
    ("run_ahead", {"temperature": 0.8}, DRAWN),
    ("run_ahead", {"temperature": 1e-5}, GREEDY),
    ("run_ahead", {"temperature": 0}, GREEDY),
    *((name, {"temperature": 0}, GREEDY) for name in ("top_k", "nucleus", "min_p", "typical", "tail_free", "top_a", "eta_cutoff", "xtc")),
    ("penalties", {"temperature": 0, "repetition": 1.0} | NONE, GREEDY),
    ("dry", {"temperature": 0, "multiplier": 0}, GREEDY),
    ("dry", {"multiplier": 0}, DRAWN),
    ("dry", {"allowed": 32}, DRAWN),
    ("top_k", {"k": 1}, GREEDY),
    ("top_k", {"k": 49152}, DRAWN),
    ("nucleus", {"p": 0.0}, GREEDY),
    ("nucleus", {"p": 1.0}, DRAWN),
    ("min_p", {"p": 1.0}, GREEDY),
    ("min_p", {"p": 0.0}, DRAWN),
    ("typical", {"mass": 0.0}, GREEDY),
    ("typical", {"mass": 2.0}, DRAWN),
    ("tail_free", {"z": 0.0}, GREEDY),
    ("tail_free", {"z": 2.0}, DRAWN),
    ("top_a", {"a": 0.0}, DRAWN),
    ("eta_cutoff", {"epsilon": 0.0}, DRAWN),
    ("xtc", {"probability": 0.0}, DRAWN),
    ("xtc", {"threshold": 1.1, "probability": 1.0}, DRAWN),
    ("dynamic_temperature", {"low": 0.8, "high": 0.8}, DRAWN),
    ("dynamic_temperature", {"low": 0.0, "high": 0.0}, GREEDY),
    ("penalties", {"repetition": 1.0} | NONE, DRAWN),
    ("mirostat", {"tau": 0.0}, GREEDY),
]
# settings at work: neither of the two
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"k": 5, "temperature": 2.0}),
    ("nucleus", {"p": 0.5, "temperature": 1.5}),
    ("min_p", {"p": 0.3, "temperature": 2.0}),
    ("typical", {"mass": 0.3, "temperature": 2.0}),
    ("tail_free", {"z": 0.5, "temperature": 2.0}),
    ("top_a", {"a": 0.4, "temperature": 2.0}),
    ("eta_cutoff", {"epsilon": 0.05, "temperature": 2.0}),
    ("xtc", {"threshold": 0.01, "probability": 1.0}),
    ("dynamic_temperature", {"low": 0.2, "high": 4.0}),
    ("mirostat", {"tau": 4.0}),
]


def job(name: str, input: dict[str, Any]) -> Job:
    return Job(f"{name}.py", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), {"prompt": PROMPT, "max_tokens": 8, "seed": 5, **input})


def key(name: str, input: dict[str, Any]) -> str:
    return f"{name} {input}"


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    """What each example gave, by name and input."""
    runs = [GREEDY, DRAWN, *((name, input) for name, input, _ in SAME), *OTHERS, *OTHERS]
    runs += [("prompt_logprobs", {"text": FORCED["text"]}), ("constrained", {}), ("constrained", {"choices": ["Paris", "Rome", "Parma"]})]
    runs += [("sampling", AGAIN), ("penalties", AGAIN | STRONG), ("penalties", AGAIN | {"repetition": 1.0} | NONE)]
    runs += [("dry", AGAIN | {"multiplier": 20}), ("dry", AGAIN | {"multiplier": 0})]
    found: dict[str, Any] = {}
    for (name, input), result in zip(runs, run_jobs("cpu", [job(*run) for run in runs]), strict=True):
        told = result["text"] if isinstance(result, dict) and "text" in result else result
        assert found.setdefault(key(name, input), told) == told, "the same seed gives the same text"
    return found


@pytest.mark.parametrize(("name", "input", "same"), SAME, ids=[key(name, input) for name, input, _ in SAME])
def test_at_its_bounds_a_sampler_is_another_one(texts: dict[str, Any], name: str, input: dict[str, Any], same: tuple[str, Any]) -> None:
    assert texts[key(name, input)] == texts[key(*same)]


@pytest.mark.parametrize(("name", "input"), OTHERS, ids=[key(*run) for run in OTHERS])
def test_between_them_it_is_not(texts: dict[str, Any], name: str, input: dict[str, Any]) -> None:
    got = texts[key(name, input)]
    assert isinstance(got, str) and got, got
    assert got not in (texts[key(*GREEDY)], texts[key(*DRAWN)])


def test_penalties_end_a_repetition(texts: dict[str, Any]) -> None:
    again = texts[key("sampling", AGAIN)].split()
    assert again.count("ha") > 5
    assert texts[key("penalties", AGAIN | {"repetition": 1.0} | NONE)].split() == again
    assert texts[key("penalties", AGAIN | STRONG)].split().count("ha") <= 2


def test_dry_ends_a_repetition(texts: dict[str, Any]) -> None:
    again = texts[key("sampling", AGAIN)].split()
    assert texts[key("dry", AGAIN | {"multiplier": 0})].split() == again
    assert texts[key("dry", AGAIN | {"multiplier": 20})].split().count("ha") <= 2


def test_log_probabilities_of_a_text(texts: dict[str, Any]) -> None:
    """Two passes of several read-outs, against transformers in fp32."""
    result = texts[key("prompt_logprobs", {"text": FORCED["text"]})]
    assert "".join(token for token, _ in result["tokens"]) == FORCED["text"].removeprefix("The")
    assert [logprob for _, logprob in result["tokens"]] == pytest.approx(FORCED["next_logprobs"], abs=0.01)
    assert result["perplexity"] == pytest.approx(FORCED["ppl"], rel=0.01)


def test_a_constrained_answer_is_one_of_the_choices(texts: dict[str, Any]) -> None:
    assert texts[key("constrained", {})]["answer"] in ("yes", "no")
    assert texts[key("constrained", {"choices": ["Paris", "Rome", "Parma"]})]["answer"] in ("Paris", "Rome", "Parma")


TEMPERED = [path for path in sorted(EXAMPLES.glob("*.py")) if 'input.get("temperature"' in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("temperature", [-1.0, "nan", "inf"])
@pytest.mark.parametrize("path", [*TEMPERED, EXAMPLES / "dynamic_temperature.py"], ids=lambda path: path.stem)
async def test_a_temperature_that_is_none_is_refused_in_words(
    guest: Local, host: ScriptedHost, path: Path, temperature: float | str
) -> None:
    key = "high" if path.stem == "dynamic_temperature" else "temperature"
    error = (await drive(guest, host, path.read_text(encoding="utf-8"), {key: temperature}))["e"]
    assert error["type"] == "ValueError" and "use " in error["message"] and ">= 0" in error["message"], error
    assert not host.payloads("submit")


@pytest.mark.parametrize(
    ("name", "input", "words"),
    [
        *(("typical", {"mass": value}, "mass is .*; use a number >= 0") for value in ("nan", -0.1, "inf")),
        *(("tail_free", {"z": value}, "z is .*; use a number >= 0") for value in ("nan", -0.1, "inf")),
        *(("eta_cutoff", {"epsilon": value}, "epsilon is .*; use a probability") for value in ("nan", -1, 1.5)),
        *(("xtc", {"threshold": value}, "threshold is .*; use a number >= 0") for value in ("nan", -1, "inf")),
        *(("xtc", {"probability": value}, "probability is .*; use a number from 0 to 1") for value in ("nan", -1, 7)),
        *(("mirostat", {"tau": value}, "tau is .*; use numbers >= 0") for value in ("nan", -5, "inf")),
        *(("mirostat", {"rate": value}, "rate .*; use numbers >= 0") for value in ("nan", -0.1)),
        *(("penalties", {"repetition": value}, "repetition is .*; use a number above 0") for value in ("nan", -1, 0, "inf")),
        *(("dry", {"multiplier": value}, "multiplier is .*; use a number >= 0") for value in ("nan", -1, "inf")),
        *(("dry", {"base": value}, "base is .*; use a number from 1 to 10") for value in ("nan", 0.5, 11)),
        *(("dry", {"allowed": value}, "allowed is .*; use 1 to 32") for value in (0, 33)),
        *(("penalties", {name: "nan"}, f"{name} .*; use finite numbers") for name in ("presence", "frequency")),
        *(("constrained", {"choices": value}, "must be a list of texts") for value in ("yes", [], ["a", ""], {"a": 1}, None)),
        ("constrained", {"choices": ["\u65e5\u672c", "no", "\u65e5"]}, "'\u65e5' begins '\u65e5\u672c'"),
    ],
)
async def test_a_setting_that_is_none_is_refused_in_words(
    guest: Local, host: ScriptedHost, name: str, input: dict[str, Any], words: str
) -> None:
    error = (await drive(guest, host, (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), input))["e"]
    assert error["type"] == "ValueError" and re.search(words, error["message"]), error
    assert not host.payloads("submit")


def test_every_example_is_run_somewhere() -> None:
    assert {name for name, *_ in SAME} >= {name for name, _ in OTHERS}
    ran = {name for name, *_ in [*SAME, *OTHERS]} | {"hello", "sampling", "prompt_logprobs", "constrained"}
    tests = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names >= ran
    for name in names - ran:
        assert any(name in text for text in tests), f"no test names the example {name}"
