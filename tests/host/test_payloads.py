"""Payloads that are garbage, or too much: refused by what they weigh, with a short message, before they are worth the work."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pie_core.eta import json_text
from pie_core.host.ops import MAX_CALL, MAX_IDS, OPS, SMALL
from tests.host.test_port import SUBMIT, port

SIZE = 4_000_000


def many(piece: str, last: str = "1") -> str:
    """A JSON list of SIZE characters."""
    return f"[{f'{piece},' * (SIZE // (len(piece) + 1))}{last}]"


def submit(**fields: str) -> str:
    """A submit with some fields as JSON text."""
    texts = {name: json.dumps(value) for name, value in SUBMIT.items()} | fields
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def geometry(**fields: str) -> str:
    return submit(geo="{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}")


NEVER_PARSED = [
    ("log", f'{{"level":"info","text":{many("{}")}}}', "holds more than 1024 lists and objects"),
    ("log", f'{{"level":{many("1.5")},"text":""}}', "holds more than 4096 values"),
    ("program", f'{{"prog":1,"text":{many("[1]")}}}', "holds more than 1024 lists and objects"),
    ("program", '{"prog":1,"text":"' + "x" * 7_000_000 + '"}', "has 7000020 characters, of this op at most"),
    ("time", f'{{"a":{many("1")}}}', "characters, of this op at most 65536 are taken"),
    ("ws.new", '{"ws":1' + " " * SMALL.chars + "}", "of this op at most 65536"),
    ("ws.new", '{"ws":1' + "1" * SIZE + "}", "of this op at most 65536"),
    ("ch.put", f'{{"ch":5,"words":{many("1")}}}', f"more than {MAX_IDS + 4096} values"),
    ("ch.put", f'{{"ch":5,"words":{many("{}")}}}', "holds more than 1024 lists and objects"),
    ("ch.put", f'{{"ch":5,"words":{many("9" * 4000)}}}', "numbers of more than 24 digits on average"),
    ("send", f'{{"value":{many("{}")}}}', "holds more than 131072 lists and objects"),
    ("submit", geometry(mask=many("[1]")), "more than 32768 lists and objects"),
    ("submit", submit(reads=f"[{many('1')}]"), "more than 1179648 values"),
    ("chat.text", f'{{"messages":[{{"role":"user","content":{many("[]")}}}]}}', "holds more than 65536 lists and objects"),
    ("encode", '{"text":' + '"' + "x" * MAX_CALL + '"}', "of this op at most 16777216"),
    ("nope", "x" * SIZE, "unknown op 'nope'"),
    ("n" * SIZE, "{}", "unknown op 'nnn"),
]


@pytest.mark.parametrize(("op", "payload", "words"), NEVER_PARSED, ids=lambda value: str(value)[:24])
def test_what_weighs_too_much_is_not_parsed(op: str, payload: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(text: str) -> Any:
        raise AssertionError(f"{len(text)} characters were parsed")

    to = port()
    monkeypatch.setattr(json_text, "_decode", build)
    error = json.loads(to.call(op, payload))["error"]
    assert error["type"] == "UsageError" and words in error["message"], error
    assert len(error["message"]) < 600


ROWS = f"[{'[1,2,3,4,5],' * 30_000}[]]"
GARBAGE = [
    ("ch.put", f'{{"ch":5,"words":[{"{}," * 1000}1]}}', "UsageError", "ch.put: words = [{}, {}, {}"),
    ("decode", '{"ids":[' + '"ab",' * 300_000 + "1]}", "UsageError", "decode: ids = ['ab', 'ab'"),
    ("send", f'{{"value":1,"more":[{"1," * 300_000}1]}}', "UsageError", "unknown field 'more'"),
    ("send", f'{{"{"k" * SIZE}":1,"value":1}}', "UsageError", "unknown field 'kkk"),
    ("submit", geometry(mask=ROWS), "UsageError", "geo = {'mask': [[1, 2, 3, 4, 5], [1"),
    ("submit", geometry(mode=ROWS), "UsageError", "geo = {'mode': [[1, 2"),
    ("submit", geometry(width=f'"{"x" * SIZE}"'), "UsageError", "geo = {'width': 'xxx"),
    ("submit", geometry(tree=f"[{'1,' * 300_000}1]"), "UsageError", "where only mask (rows) and tree (at most 65536 parents) are long"),
    ("submit", geometry(**{f"f{k}": "null" for k in range(1000)}), "UsageError", "an object of at most 16 fields"),
    ("submit", geometry(**{"k" * SIZE: "1"}), "UsageError", "geo = {'kkk"),
    ("submit", submit(tokens=f"[[1],{ROWS}]"), "UsageError", "tokens = [[1], [[1, 2"),
    ("submit", submit(tokens=f'["{"x" * SIZE}"]'), "UsageError", "tokens = ['xxx"),
    ("submit", submit(reads=f"[{ROWS}]"), "UsageError", "reads = [[[1, 2"),
    ("submit", submit(reads=f'[["{"x" * SIZE}"]]'), "UsageError", "a list of at most 256 lists with at most 16384 positions together"),
    ("submit", submit(tokens=f"[{'1,' * 300_000}-1]"), "InvalidPass", "tokens[300000] = -1 is not a token id"),
]


@pytest.mark.parametrize(("op", "payload", "kind", "words"), GARBAGE, ids=lambda value: str(value)[:24])
def test_what_is_parsed_and_wrong_is_told_in_few_words(op: str, payload: str, kind: str, words: str) -> None:
    """Generously: ten times what they take. To show them whole took seconds and hundreds of megabytes."""
    to = port()
    began = time.process_time()
    error = json.loads(to.call(op, payload))["error"]
    assert time.process_time() - began < 1
    assert error["type"] == kind and words in error["message"], error
    assert len(error["message"]) < 600


def test_what_is_large_for_a_reason_passes() -> None:
    to = port()
    for op, fields in [
        ("ch.new", {"ch": 52, "dtype": "u32", "shape": [1 << 19], "seed": [4_000_000_000] * (1 << 19)}),
        ("ch.new", {"ch": 51, "dtype": "u32", "shape": [1 << 20], "host": "writer"}),
        ("ch.put", {"ch": 51, "words": [4_000_000_000] * MAX_IDS}),
        ("log", {"level": "info", "text": "\x00[,{" * (1 << 18)}),  # written as escapes
        ("send", {"value": [{"id": k, "p": 0.5} for k in range(60_000)]}),
        ("submit", SUBMIT | {"tokens": [1] * 256, "geo": {"mode": "folding", "mask": [[(1 << 32) - 1] * 8] * 256, "width": None}}),
    ]:
        answer = to.call(op, json.dumps(fields))
        assert answer == "", answer[:200]
    assert json.loads(to.call("decode", json.dumps({"ids": [5] * MAX_IDS}))) == "f" * MAX_IDS


def test_every_op_has_a_size_and_most_have_a_small_one() -> None:
    large = "encode decode bytes chat.render chat.text chat.role log ws.commit ch.new ch.put ch.set program submit send prewarm"
    assert sorted(name for name, op in OPS.items() if op.size is not SMALL) == sorted(large.split())
    assert all(op.size.chars <= MAX_CALL for op in OPS.values())
