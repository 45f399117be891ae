"""JSON of guests: nesting and size are capped before anything is built, in one pass; what strings hold is neither."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from pie_core.eta import json_text
from pie_core.eta.json_text import MAX_NESTING, TooLarge, loads

DEEP = ["[" * n + "]" * n for n in (MAX_NESTING + 1, 100_000)]
DEEP += ['{"a":' * 100_000, '[0,{"a":' * 300 + "1" + "}]" * 300, "[" * 100_000, '["]]]]",' * 300 + "[1]" + "]" * 300]
NOT_JSON = [
    ("NaN", "holds NaN, which is not JSON"),
    ("[-Infinity]", "holds -Infinity"),
    ('{"a": 1e999}', "holds 1e999, which is too large"),
    ("[-1e999]", "holds -1e999"),
    ('"\\ud800"', r"lone surrogate \(U\+D800\)"),
    ('{"\\uDC80": 1}', r"lone surrogate \(U\+DC80\)"),
    ('["\\ud83d\\ude00", "\\udfff"]', r"lone surrogate \(U\+DFFF\)"),
]
FINE = ['["\\ud83d\\ude00"]', '"\\\\ud800"', "[1.5e308]", '["ü", 0.5, -2]']
FINE += ["[" * MAX_NESTING + "]" * MAX_NESTING, json.dumps([[i] for i in range(1000)]), json.dumps("[" * 1000), json.dumps(['\\"[{' * 500])]


@pytest.mark.parametrize("text", DEEP)
def test_deep_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        loads(text)


@pytest.mark.parametrize(("text", "words"), NOT_JSON)
def test_what_no_json_text_may_hold_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loads(text)


@pytest.mark.parametrize("text", FINE)
def test_the_rest_is_json(text: str) -> None:
    assert loads(text) == json.loads(text)
    with pytest.raises(ValueError, match=r"Expecting|Extra|Unterminated|nested"):
        loads(text[:-1])


HOSTILE = {  # texts that make a scan by a regular expression, or by a parser that goes back, take quadratic time
    "escaped quotes without an end": '"' + '\\"[' * 30_000,
    "and a backslash last": '"' + '\\"[' * 30_000 + "\\",
    "quotes": '"' * 90_000 + "[" * 300,
    "backslashes": '"' + "\\" * 90_001 + "[" * 300,
    "strings of brackets": '["[",' * 20_000,
    "closing ones": "]" * 90_000 + "[" * 300,
    "no colon": '{"a"' * 25_000,
}


@pytest.mark.parametrize("values", [None, 1000], ids=["any size", "capped"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused_in_linear_time(name: str, values: int | None) -> None:
    """A quadratic scan of them takes 7 s or more, this one a millisecond or two."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r"nested|JSON|Unterminated|Expecting|Extra|holds more|Invalid"):
        loads(HOSTILE[name], values=values)
    assert time.process_time() - began < 1


LARGE = [
    ("[" + "{}," * 500 + "1]", "holds more than 1000 values"),
    ("[" + "1," * 1001 + "1]", "holds more than 1000 values"),
    ("{" + '"a":1,' * 400 + '"b":2}', "holds more than 1000 values"),
    (json.dumps([',{"' * 1000] * 1001), "holds more than 1000 values"),
    (json.dumps(["x"] * 1001), "holds more than 1000 values"),
    ("[" + f"{'9' * 4000}," * 800 + "1]", "numbers of more than 24 digits on average"),
]


@pytest.mark.parametrize(("text", "words"), LARGE)
def test_a_text_with_too_much_in_it_is_refused_before_anything_is_built(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(text: str) -> Any:
        raise AssertionError(f"{len(text)} characters were parsed")

    monkeypatch.setattr(json_text, "_decode", build)
    with pytest.raises(TooLarge, match=words):
        loads(text, values=1000)


@pytest.mark.parametrize("value", [",[{:" * 5000, ["\\", '"', '\\"[,', "\\\\"] * 200, {"[{,:" * 300: ':"\\"' * 3000}, "7" * 2_000_000])
def test_what_strings_hold_does_not_count(value: Any) -> None:
    assert loads(json.dumps(value), values=1000) == value


def weight(value: Any) -> int:
    """What `loads` counts of it."""
    if isinstance(value, list):
        return 2 + sum(map(weight, value)) + max(0, len(value) - 1)
    if isinstance(value, dict):
        return 2 + sum(2 + weight(item) for item in value.values()) + max(0, len(value) - 1)
    return 0


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64])
def test_the_count_is_exact_wherever_windows_end(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(window)
    texts = [1, None, "a\\", '\\"[', '"', "[{:,", "\\" * 3, "é😀,", "\n"]

    def some(depth: int) -> Any:
        kind = rng.randrange(3) if depth else 0
        if kind == 0:
            return rng.choice(texts)
        items = [some(depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 1 else {f"{rng.choice(texts)}{k}": item for k, item in enumerate(items)}

    monkeypatch.setattr(json_text, "_WINDOW", window)
    for k in range(100):
        value = [some(4), "," * 4]
        text = json.dumps(value, ensure_ascii=k % 2 == 0)
        monkeypatch.setattr(json_text, "_LONG", 0)  # the digits of short texts are counted, too: all of them go through windows
        assert loads(text, values=weight(value)) == value
        with pytest.raises(TooLarge):
            loads(text, values=weight(value) - 1)


def test_lists_and_objects_have_a_cap_of_their_own() -> None:
    text = json.dumps([[{}] * 500, "[{" * 500])
    assert loads(text, values=1600, lists=502) == json.loads(text)
    with pytest.raises(TooLarge, match="holds more than 501 lists and objects"):
        loads(text, values=1600, lists=501)
