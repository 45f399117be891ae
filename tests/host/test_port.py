"""The op table and the port: every op is covered, and every wrong call is refused in words, at the call."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pie_core.eta import Model, intrinsics, trace_epilogue
from pie_core.host.budget import Budget, Refusal
from pie_core.host.ops import OPS, parse
from pie_core.host.port import HANDLERS, GuestPort
from tests.engine.fake_runner import HIDDEN, VOCAB, limits
from tests.engine.support import GREEDY
from tests.host.support import SERVICES

WAKES: list[int] = []


def port(budget: Budget | None = None) -> GuestPort:
    """A port with working sets 1, 2, pipeline 3, channels 4 (reader) 5 (writer) 6 (bool), program 7."""
    made = GuestPort(SERVICES, limits(), budget or Budget(), lambda: WAKES.append(1))
    for op, fields in [
        ("ws.new", {"ws": 1}), ("ws.new", {"ws": 2}), ("pipe.new", {"pipe": 3}),
        ("ch.new", {"ch": 4, "dtype": "i32", "host": "reader"}), ("ch.new", {"ch": 5, "dtype": "u32", "host": "writer"}),
        ("ch.new", {"ch": 6, "dtype": "bool"}), ("program", {"prog": 7, "text": GREEDY.program.text}),
    ]:  # fmt: skip
        assert call(made, op, **fields) == ""
    return made


def call(to: GuestPort, op: str, **fields: Any) -> Any:
    answer = to.call(op, json.dumps(fields))
    return json.loads(answer)["error"] if answer.startswith('{"error"') else answer


SUBMIT: dict[str, Any] = {"pipe": 3, "tokens": [1], "ws": [1], "geo": {"mode": "folding"}, "prog": 7, "outs": [100]}


def test_every_op_has_a_handler_in_the_port() -> None:
    assert set(HANDLERS) == set(OPS)


def test_the_table_is_the_contract() -> None:
    kinds = {kind: sorted(name for name, op in OPS.items() if op.kind == kind) for kind in ("sync", "posted", "future")}
    sync = "encode decode bytes chat.render chat.text chat.role chat.cue chat.seal log time random"
    posted = (
        "ws.new ws.drop ws.fork ws.commit ws.discard ws.truncate pipe.new pipe.close pipe.stop_when "
        "ch.new ch.drop ch.put ch.set program program.drop submit send"
    )
    future = "ch.take ch.read sleep receive ws.length ws.cached ws.save ws.open prewarm"
    assert kinds == {"sync": sorted(sync.split()), "posted": sorted(posted.split()), "future": sorted(future.split())}


@pytest.mark.parametrize(
    ("op", "payload", "words"),
    [
        ("nap", "{}", "unknown op 'nap'"),
        ("encode", "{", "not JSON"),
        ("encode", "[]", "must be an object"),
        ("encode", "{}", "'text' is missing"),
        ("encode", '{"text":3}', "text = 3 must be text"),
        ("encode", '{"text":"","x":1}', "unknown field 'x'"),
        ("random", '{"n":4097}', "0 .. 4096"),
        ("random", '{"n":true}', "True"),
        ("ws.new", '{"ws":0}', "whole number 1 .."),
        ("ws.new", '{"ws":1.0}', "1.0"),
        ("ws.new", '{"ws":1,"reuse":0}', "reuse = 0 must be true or false"),
        ("prewarm", '{"ids":[-1],"f":9}', "must be a list of at most 1048576 whole numbers 0 .. 4294967295"),
        ("log", '{"level":"loud","text":""}', "one of debug"),
        ("submit", '{"pipe":3,"tokens":{"x":1},"ws":[1],"geo":{}}', "tokens"),
        ("encode", "[" * 100_000, "not JSON"),
        ("ch.put", json.dumps({"ch": 1, "words": [-1] * 100}), "words = [" + "-1, " * 13 + "-1,…] must be a list"),
    ],
)
def test_payloads_are_validated(op: str, payload: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse(op, payload)
    assert caught.value.kind == "UsageError" and words in caught.value.message
    assert words in json.loads(port().call(op, payload))["error"]["message"]


@pytest.mark.parametrize(
    ("op", "fields", "words"),
    [
        ("log", {"level": "info", "text": "word " * 300_000}, "text = '" + "word " * 11 + "…' must be text of at most 1048576 characters"),
        ("ws.save", {"ws": 1, "name": "it's " * 100, "f": 2}, 'name = "' + "it's " * 11 + '…" must be text of at most 100 characters'),
    ],
)
def test_a_long_text_is_shown_shortened_and_closed(op: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse(op, json.dumps(fields))
    assert caught.value.message == f"{op}: {words}"


@pytest.mark.parametrize(("op", "field"), [("encode", "text"), ("chat.role", "content")])
def test_texts_for_the_tokenizer_reach_it(op: str, field: str) -> None:
    """Its own limit is the lower one, and it tells both lengths."""
    text = "x" * 1_500_000
    fields = {"role": "user", field: text} if op == "chat.role" else {field: text}
    assert parse(op, json.dumps(fields))[field] == text


@pytest.mark.parametrize(
    ("op", "fields", "kind", "words"),
    [
        ("ws.new", {"ws": 3}, "UsageError", "id 3 is taken by a pipeline"),
        ("ws.drop", {"ws": 3}, "UsageError", "id 3 is a pipeline; a working set is needed"),
        ("ws.drop", {"ws": 9}, "UsageError", "unknown, or was dropped"),
        ("ws.fork", {"ws": 1, "of": 2}, "UsageError", "taken"),
        ("ws.fork", {"ws": 9, "of": 8}, "UsageError", "id 8"),
        ("ws.commit", {"ws": 1, "n": 1}, "InvalidState", "holds at most 0"),
        ("ws.discard", {"ws": 1, "n": 2}, "InvalidState", "holds at most 0"),
        ("pipe.stop_when", {"pipe": 3, "ch": 4}, "UsageError", "one bool"),
        ("ch.new", {"ch": 9, "dtype": "u32", "shape": [0]}, "UsageError", "empty extent"),
        ("ch.new", {"ch": 9, "dtype": "u32", "shape": [2], "seed": [1]}, "UsageError", "1 words"),
        ("ch.put", {"ch": 4, "words": [1]}, "ChannelError", "not host-written"),
        ("ch.put", {"ch": 5, "words": [1, 2]}, "ChannelError", "2 words"),
        ("ch.take", {"ch": 5, "f": 9}, "ChannelError", "does not read"),
        ("ch.take", {"ch": 4, "f": 1}, "UsageError", "taken by a working set"),
        ("program", {"prog": 9, "text": "{}"}, "ProgramError", "keys"),
        ("submit", SUBMIT | {"tokens": []}, "InvalidPass", "empty"),
        ("submit", SUBMIT | {"tokens": [VOCAB]}, "InvalidPass", "token id"),
        ("submit", SUBMIT | {"tokens": [[1], [2]]}, "InvalidPass", "2 lists"),
        ("submit", SUBMIT | {"tokens": {"ch": 6}}, "InvalidPass", "u32 or i32"),
        ("submit", SUBMIT | {"tokens": {"ch": 5}}, "ChannelEmpty", "spoken for"),
        ("submit", SUBMIT | {"ws": [1, 1], "tokens": [[1], [1]]}, "InvalidPass", "once"),
        ("submit", SUBMIT | {"geo": {"mode": "tree"}}, "UnsupportedGeometry", "tree"),
        ("submit", SUBMIT | {"geo": {"graph": [1]}}, "UnsupportedGeometry", "graph"),
        ("submit", SUBMIT | {"geo": {"mask": [1]}}, "InvalidPass", "mask=[1] must be a list of rows"),
        ("submit", SUBMIT | {"geo": {"mode": "buffered", "tree": [-1, 0, 0, 0, 0]}}, "InvalidPass", "tree has 5 entries for the"),
        ("ws.commit", {"ws": 1, "n": {"ch": 0}}, "UsageError", "must be a whole number, a list of at most 65536 indices"),
        ("ws.commit", {"ws": 1, "n": {"ch": 1, "out": 2}}, "UsageError", "must be a whole number"),
        ("ws.commit", {"ws": 1, "n": [-1]}, "UsageError", "must be a whole number"),
        ("ws.commit", {"ws": 1, "n": [0]}, "InvalidState", "index 0: the buffer of the working set holds at most 0"),
        ("ws.cached", {"ws": 3, "f": 99}, "UsageError", "a working set is needed"),
        ("prewarm", {"ids": [0, VOCAB], "f": 99}, "InvalidPass", f"prewarm: ids[1] = {VOCAB} is not a token id"),
        ("prewarm", {"ids": [0], "f": 1}, "UsageError", "taken by a working set"),
        ("ws.save", {"ws": 1, "name": "../x", "f": 99}, "InvalidState", "cannot be named"),
        ("ws.open", {"ws": 98, "name": "", "f": 99}, "InvalidState", "cannot be named"),
        ("ws.open", {"ws": 98, "name": "x", "f": 98}, "UsageError", "unique"),
        ("submit", SUBMIT | {"reads": [[1]]}, "InvalidPass", "position 1"),
        ("submit", SUBMIT | {"reads": [[]]}, "InvalidPass", "1 read-outs"),
        ("submit", SUBMIT | {"outs": []}, "InvalidPass", "1 outputs"),
        ("submit", SUBMIT | {"outs": [1]}, "UsageError", "taken"),
        ("submit", SUBMIT | {"params": [1]}, "InvalidPass", "0 parameters"),
        ("submit", SUBMIT | {"chans": [4]}, "InvalidPass", "0 channels"),
        ("submit", SUBMIT | {"prog": 3}, "UsageError", "a program is needed"),
        ("submit", SUBMIT | {"pipe": 1}, "UsageError", "a pipeline is needed"),
        ("decode", {"ids": [1 << 40]}, "UsageError", "ids"),
        ("chat.role", {"role": "robot", "content": ""}, "MessageError", "robot"),
    ],
)
def test_wrong_ops_are_refused_at_the_call(op: str, fields: dict[str, Any], kind: str, words: str) -> None:
    made = port()
    before = list(made.take_posts())
    refusal = call(made, op, **fields)
    assert refusal["type"] == kind, refusal
    assert words in refusal["message"]
    assert list(made.take_posts()) == before, "a refused op is not posted"


def test_a_program_of_another_model_is_refused() -> None:
    other = trace_epilogue(lambda: intrinsics.output(0, "logits"), Model(VOCAB + 1, 4)).program
    assert f"{VOCAB + 1} elements" in call(port(), "program", prog=9, text=other.text)["message"]


@pytest.mark.parametrize(("reads", "words"), [([[0]], "looks at 2 read-outs"), ([[0, 1, 2]], "traced for 2 read-outs, the pass has 3")])
def test_a_program_over_all_read_outs_needs_their_number(reads: list[list[int]], words: str) -> None:
    made = port()
    rows = trace_epilogue(lambda: intrinsics.outputs("hidden"), Model(VOCAB, HIDDEN), rows=2).program
    call(made, "program", prog=9, text=rows.text)
    refusal = call(made, "submit", **(SUBMIT | {"tokens": [1, 2, 3], "prog": 9, "reads": reads}))
    assert refusal["type"] == "InvalidPass" and words in refusal["message"]


@pytest.mark.parametrize(
    ("budget", "calls"),
    [
        (Budget(handles=6), [("ws.new", {"ws": 50})]),
        (Budget(programs=1), [("program", {"prog": 50, "text": GREEDY.program.text})]),
        (Budget(futures=1), [("sleep", {"ms": 1, "f": 50}), ("sleep", {"ms": 1, "f": 51})]),
        (Budget(outstanding=1), [("submit", SUBMIT), ("submit", SUBMIT | {"outs": [101]})]),
        (Budget(outstanding=1), [("prewarm", {"ids": [1], "f": 50}), ("submit", SUBMIT)]),
        (Budget(outstanding=1), [("submit", SUBMIT), ("prewarm", {"ids": [1], "f": 50})]),
        (Budget(unread_bytes=10), [("send", {"value": "12345"}), ("send", {"value": "12345"})]),
        (Budget(output_bytes=10), [("send", {"value": "12345"}), ("send", {"value": "12345"})]),
        (Budget(log_bytes=10), [("log", {"level": "info", "text": "1234567"}), ("log", {"level": "info", "text": "1234567"})]),
        (Budget(cell_words=100), [("ch.new", {"ch": 50, "dtype": "u32", "shape": [50]})]),
    ],
)
def test_budgets(budget: Budget, calls: list[tuple[str, dict[str, Any]]]) -> None:
    made = port(budget)
    *fine, last = [call(made, op, **fields) for op, fields in calls]
    assert all(answer == "" for answer in fine)
    assert last["type"] == "BudgetExceeded"
    assert last["cap"] < last["used"] or last["cap"] == last["used"]
    if calls[0][0] == "ws.new":
        assert last["message"].endswith("let go of working sets, pipelines and channels")
    if calls[0][0] == "log":  # print() comes as log too
        assert last["message"].startswith("characters printed and logged: 14 in use, the cap is 10; print()")


def test_a_closed_pipeline_takes_no_pass_but_orders_a_fork() -> None:
    made = port()
    assert call(made, "pipe.close", pipe=3) == ""
    assert call(made, "submit", **SUBMIT)["type"] == "PipelineClosed"
    assert call(made, "ws.fork", ws=60, of=1, pipe=3) == ""
    assert made.take_posts()[-1] == ("ws.fork", {"ws": 60, "of": 1, "pipe": None, "buffer": False})


def test_of_closed_pipelines_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inferlet that makes one for each of endless turns does not grow."""
    monkeypatch.setattr("pie_core.host.port.CLOSED", 2)
    to = port()
    for pipe in (11, 12, 13):
        assert call(to, "pipe.new", pipe=pipe) == call(to, "pipe.close", pipe=pipe) == ""
    kinds = [call(to, "submit", **{**SUBMIT, "pipe": pipe})["type"] for pipe in (11, 12, 13)]
    assert kinds == ["UsageError", "PipelineClosed", "PipelineClosed"]


def test_stop_when_comes_before_the_puts() -> None:
    made = port()
    assert call(made, "pipe.stop_when", pipe=3, ch=6) == ""
    assert "has a stop channel" in call(made, "pipe.stop_when", pipe=3, ch=6)["message"]
    assert call(made, "ch.new", ch=50, dtype="bool", seed=[1]) == ""
    assert call(made, "pipe.new", pipe=51) == ""
    assert "before the first submit" in call(made, "pipe.stop_when", pipe=51, ch=50)["message"]


def test_the_loop_is_woken_once_until_the_posts_are_taken() -> None:
    WAKES.clear()
    made = port()
    assert len(WAKES) == 1
    posts = made.take_posts()
    assert [name for name, _ in posts][:3] == ["ws.new", "ws.new", "pipe.new"]
    posts.clear()
    call(made, "submit", **SUBMIT)
    assert len(WAKES) == 2


def test_a_host_fault_does_not_trap_the_guest(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = port()

    def broken(text: str) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(SERVICES.tokenizer, "encode", broken)
    assert call(made, "encode", text="x") == {"type": "HostError", "message": "encode: the host failed: ZeroDivisionError"}
    assert "encode" in caplog.text


def test_posts_cross_threads_in_order() -> None:
    made = port()
    made.take_posts().clear()

    def guest() -> None:
        for k in range(500):
            assert call(made, "send", value=k) == ""

    thread = threading.Thread(target=guest)
    thread.start()
    got: list[int] = []
    while len(got) < 500:
        posts = made.take_posts()
        while posts:
            got.append(posts.popleft()[1]["value"])
    thread.join()
    assert got == list(range(500))
