"""JSON of guests: nesting is capped, brackets in strings are not nesting."""

from __future__ import annotations

import json

import pytest

from pie_core.eta.json_text import MAX_NESTING, loads

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
