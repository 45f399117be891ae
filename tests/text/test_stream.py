"""Incremental text: no broken characters, stop strings cut exactly, messages refused by index and field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_core.text import stream
from pie_core.text.stream import Detokenizer, MessageError, StopMatcher, check_messages


def split(data: Any, cuts: list[int]) -> list[Any]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize("text", ["😀", "한글 テスト", "👩‍👩‍👧‍👦!", "naïve — “q”", "plain", "\U0010ffff\x00é"])
def test_split_characters_come_out_whole(text: str) -> None:
    detokenizer = Detokenizer()
    outputs = [detokenizer.feed(bytes([byte])) for byte in text.encode()]
    assert "".join(outputs) == text and "�" not in "".join(outputs)
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=8))
def test_any_split_equals_one_decode(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    text = "".join(map(detokenizer.feed, split(data, cuts))) + detokenizer.flush()
    assert text == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back_then_flushed() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed("a😀".encode()[:-1]) == "a"
    assert detokenizer.flush() == "�"
    assert detokenizer.feed(b"b") == "b"


def test_streams_do_not_mix() -> None:
    first, second = Detokenizer(), Detokenizer()
    data = "é".encode()
    assert first.feed(data[:1]) + second.feed(data) + first.feed(data[1:]) == "éé"


STOP_CASES = [
    (["STOP"], ["hello STOP rest"], "hello ", "STOP"),
    (["STOP"], ["hello S", "T", "OP", " rest"], "hello ", "STOP"),
    (["STOP"], ["a S", "TAB"], "a STAB", None),
    (["STOP"], ["a STO"], "a STO", None),
    (["aab"], ["a", "a", "a", "b"], "a", "aab"),
    (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny", "\n\n"),
    (["abcd", "bc"], ["ab", "cd"], "a", "bc"),
    (["bc", "abc"], ["xab", "c"], "x", "abc"),
    (["é😀"], ["aé", "😀b"], "a", "é😀"),
    ([], ["x", "y"], "xy", None),
    (["a"], ["a"], "", "a"),
]


@pytest.mark.parametrize(("stops", "parts", "text", "stopped"), STOP_CASES)
def test_stop_strings_cut_exactly(stops: list[str], parts: list[str], text: str, stopped: str | None) -> None:
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.feed, parts)) + matcher.flush() == text
    assert matcher.stopped == stopped
    if stopped:
        assert matcher.feed("more") == "" and matcher.flush() == ""


def expected_stop(stops: list[str], text: str) -> str:
    """The definition: the first stop string to be complete wins, the longest at the same end."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.text("abc", max_size=30), st.lists(st.integers(0, 1000), max_size=6))
def test_stops_do_not_depend_on_the_split(stops: list[str], text: str, cuts: list[int]) -> None:
    matcher, sent = StopMatcher(stops), ""
    for part in split(text, cuts):
        sent += matcher.feed(part)
        if matcher.stopped is None and stops:
            held = max(size for stop in stops for size in range(len(stop)) if not size or (sent + matcher._held).endswith(stop[:size]))
            assert len(matcher._held) == held  # the longest suffix that begins a stop string, no more and no less
    assert sent + matcher.flush() == expected_stop(stops, text)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1]])
def test_bad_stop_lists_are_refused(stops: Any) -> None:
    with pytest.raises(ValueError, match="non-empty strings"):
        StopMatcher(stops)


def user(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    ("messages", "index", "field", "words"),
    [
        (None, None, "", "must be a list, got null"),
        ("hi", None, "", "must be a list, got str"),
        ({"role": "user"}, None, "", "must be a list, got dict"),
        ([], None, "", "messages is empty"),
        ([None], 0, "", r"messages\[0\] must be an object, got null"),
        ([user(), "x"], 1, "", r"messages\[1\] must be an object, got str"),
        ([{"content": "x"}], 0, "role", r"messages\[0\].role is missing"),
        ([user(), {"role": "robot", "content": "x"}], 1, "role", "'robot', it must be one of system"),
        ([{"role": None, "content": "x"}], 0, "role", "is None"),
        ([{"role": "user"}], 0, "content", "content is missing"),
        ([user(None)], 0, "content", "content is null"),
        ([{"role": "assistant", "content": None}], 0, "content", "content is null"),
        ([user(3)], 0, "content", "a string or a list of parts, got int"),
        ([user([3])], 0, "content", r"content\[0\] must be an object, got int"),
        ([user(["a", {"type": "image_url"}])], 0, "content", r"content\[1\].type is 'image_url', only 'text'"),
        ([user([{"type": "text", "text": None}])], 0, "content", r"content\[0\].text must be a string, got null"),
        ([user(name=b"x")], 0, "name", "holds bytes, which is not JSON"),
    ],
)
def test_bad_messages_name_index_and_field(messages: Any, index: int | None, field: str, words: str) -> None:
    with pytest.raises(MessageError, match=words) as caught:
        check_messages(messages)
    assert (caught.value.index, caught.value.field) == (index, field)


def test_a_message_nested_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(MessageError, match=r"messages\[0\].extra is nested deeper than 32"):
        check_messages([user(extra=deep)])


def test_good_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    given_messages = [{"role": "developer", "content": "d"}, user(parts, name="n"), call]
    checked = check_messages(given_messages)
    assert checked[0] == {"role": "system", "content": "d"}
    assert checked[1] == user("ab", name="n")
    assert (checked[2]["content"], checked[2]["tool_calls"]) == ("", call["tool_calls"])
    assert check_messages([user("x", tool_calls=None, refusal=None)]) == [user("x")]
    assert given_messages[1]["content"] is parts  # the caller's messages are not changed


def test_the_module_needs_the_standard_library_only() -> None:
    """A guest bundles this one file by itself."""
    code = "import sys; before = set(sys.modules); exec(compile(open(sys.argv[1]).read(), 'stream', 'exec'), {'__name__': 'stream'}); "
    code += "print(sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))"
    source = Path(stream.__file__)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(source)], capture_output=True, text=True, check=True)
    new = {name.partition(".")[0] for name in eval(done.stdout)}
    assert new <= set(sys.stdlib_module_names)
