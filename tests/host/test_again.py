"""Submits that differ in a token and a future only: taken without parsing, with the same fields and the same refusals."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pie_core.host.again import LONGEST, MOST, Again
from pie_core.host.budget import Budget
from pie_core.host.port import GuestPort
from tests.engine.fake_runner import VOCAB, limits
from tests.host.support import SERVICES
from tests.host.test_port import SUBMIT, call, port


def text(token: Any = 1, out: Any = 100, **other: Any) -> str:
    """A submit as the guests' libraries write it."""
    return json.dumps({**SUBMIT, "tokens": [token], "outs": [out], **other}, separators=(",", ":"))


def answer(to: GuestPort, payload: str) -> Any:
    got = to.call("submit", payload)
    return json.loads(got)["error"] if got else got


def posted(of: GuestPort) -> list[Any]:
    """What it posted since."""
    posts = of.take_posts()
    found = list(posts)
    posts.clear()
    return found


def known(of: GuestPort, payload: str) -> bool:
    return of._again.find(payload) is not None


def test_the_fields_are_those_of_a_parsed_submit() -> None:
    steady, fresh = port(), port()
    assert answer(steady, text()) == "" and not known(fresh, text(2, 101))
    before = posted(steady)[-1][1]
    posted(fresh)
    assert known(steady, text(2, 101))
    assert answer(steady, text(2, 101)) == answer(fresh, text(2, 101)) == ""
    [(op, fields)] = posted(steady)
    assert fields.pop("first") is before  # where the executor keeps what they share
    assert [(op, fields)] == posted(fresh)
    assert steady.table.outstanding(101) and fresh.table.outstanding(101)


def test_two_submits_share_no_list_that_changes() -> None:
    to = port()
    answer(to, text(1, 100)), answer(to, text(2, 101)), answer(to, text(3, 102))
    fields = [fields for op, fields in posted(to) if op == "submit"]
    assert [(f["tokens"], f["outs"]) for f in fields] == [([1], [100]), ([2], [101]), ([3], [102])]


@pytest.mark.parametrize(
    ("payload", "type_"),
    [
        (text(2, 100), "UsageError"),  # the future is in flight
        (text(2, 4), "UsageError"),  # an id of a channel
        (text(VOCAB, 101), "InvalidPass"),
        (text(-1, 101), "InvalidPass"),
        (text(2.0, 101), "InvalidPass"),
        (text(True, 101), "InvalidPass"),
        (text(2, 1 << 53), "UsageError"),
        (text(2, 101).replace("[2]", "[02]"), "UsageError"),  # not JSON
        (text(2, 101).replace("[101]", "[101,101]"), "InvalidPass"),
        (text(2, 101, pipe=9), "UsageError"),
        (text(2, 101, ws=[9]), "UsageError"),
        (text(2, 101) + " x", "UsageError"),
        ('{"tokens":[1],' + text(2, 101)[1:-1] + ',"surplus":1}', "UsageError"),
    ],
)
def test_what_is_wrong_is_refused_as_ever(payload: str, type_: str) -> None:
    to = port()
    assert answer(to, text()) == ""
    assert answer(to, payload)["type"] == type_


@pytest.mark.parametrize(
    ("op", "fields", "type_"),
    [
        ("pipe.close", {"pipe": 3}, "PipelineClosed"),
        ("ws.drop", {"ws": 1}, "UsageError"),
    ],
)
def test_what_a_submit_counted_on_can_go(op: str, fields: dict[str, Any], type_: str) -> None:
    to = port()
    assert answer(to, text()) == ""
    assert call(to, op, **fields) == ""
    assert answer(to, text(2, 101))["type"] == type_


def test_sends_and_puts_leave_it_known() -> None:
    to = port()
    answer(to, text())
    assert call(to, "send", value=1) == "" and call(to, "ch.put", ch=5, words=[1]) == ""
    assert call(to, "sleep", ms=1, f=50) == "" and call(to, "time") != ""
    assert known(to, text(2, 101))
    assert call(to, "pipe.new", pipe=60) == ""
    assert not known(to, text(2, 101))


def test_budget_of_passes() -> None:
    to = port(Budget(outstanding=3))
    assert [answer(to, text(1, 100 + k)) for k in range(3)] == ["", "", ""]
    assert answer(to, text(1, 103))["type"] == "BudgetExceeded"
    to.settled_passes += 1
    assert answer(to, text(1, 103)) == ""


@pytest.mark.parametrize("other", [{"geo": {"mode": "buffered"}}, {"tokens": {"ch": 5}}, {"tokens": [1, 2]}, {"prog": None, "outs": []}])
def test_what_changes_more_than_two_numbers_is_looked_at_each_time(other: dict[str, Any]) -> None:
    to = port()
    call(to, "ch.put", ch=5, words=[1])
    payload = text(**other)
    assert answer(to, payload) == ""
    assert not to._again._known and not known(to, payload)


def test_keys_named_twice_are_not_kept() -> None:
    to = port()
    twice = '{"outs":[7],' + text(1, 100)[1:]
    assert answer(to, twice) == ""
    assert not to._again._known


def test_it_does_not_grow() -> None:
    again = Again(VOCAB)
    for k in range(3 * MOST):
        again.keep(text(1, 100, params=[k]), {"tokens": [1], "outs": [100]})
    assert len(again._known) <= MOST
    again.forget()
    assert again.find(text(1, 100, params=[3 * MOST - 1])) is None


def test_held_posts_wake_nobody_until_they_are_flushed() -> None:
    wakes: list[int] = []
    to = GuestPort(SERVICES, limits(), Budget(), lambda: wakes.append(1))
    to.held = True
    to.flush()
    assert not wakes and not to.held, "there was nothing to tell of"
    to.held = True
    assert call(to, "ws.new", ws=1) == call(to, "ws.new", ws=2) == "" and not wakes
    to.flush()
    to.flush()
    assert wakes == [1] and not to.held
    assert [fields["ws"] for _, fields in posted(to)] == [1, 2]
    assert call(to, "ws.new", ws=3) == "" and wakes == [1, 1]


@pytest.mark.parametrize(
    "piece", ['"tokens":[1]', '"tokens":[1],"outs":[2]', '"outs":[2]', '"tokens":[', "]", '"tokens":[1' + "1" * 50 + '],"outs":[']
)
@pytest.mark.parametrize("size", [LONGEST, 1_000_000])
def test_texts_of_many_tokens_take_no_time(piece: str, size: int) -> None:
    """A regular expression that tries each pair of places took half a second for 100 kB, the interpreter's lock held."""
    to = port()
    assert answer(to, text()) == ""
    payload = (piece * size)[:size]
    began = time.process_time()
    for _ in range(20):
        assert not known(to, payload)
    assert time.process_time() - began < 1


def test_a_long_submit_is_looked_at_each_time() -> None:
    to = port()
    payload = text() + " " * LONGEST
    assert answer(to, payload) == ""
    assert not to._again._known and not known(to, payload)
