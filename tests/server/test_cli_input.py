"""`--key value` pairs and input files of `pie run`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from pie_server.cli_input import parse_pairs, parse_value, read_input_file, read_source
from pie_server.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The capital of France is", "The capital of France is"),
        ("5", 5),
        ("-5", -5),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('{"a": [1]}', {"a": [1]}),
        ("[1, 2]", [1, 2]),
        ('"quoted"', '"quoted"'),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("{", "{"),
        ("", ""),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_parse_value(text: str, value: Any) -> None:
    got = parse_value(text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("args", "pairs"),
    [
        ([], {}),
        (["--prompt", "a b", "--n", "8"], {"prompt": "a b", "n": 8}),
        (["--prompt=a=b"], {"prompt": "a=b"}),
        (["--temperature", "-1"], {"temperature": -1}),
        (["--greedy"], {"greedy": True}),
        (["--greedy", "--n", "3"], {"greedy": True, "n": 3}),
        (["--max-tokens", "3"], {"max_tokens": 3}),
        (["--", "--prompt", "x"], {"prompt": "x"}),
        (["--empty="], {"empty": ""}),
        (["--a", "1", "--a", "2"], {"a": 2}),
    ],
)
def test_parse_pairs(args: list[str], pairs: dict[str, Any]) -> None:
    assert parse_pairs(args) == pairs


@pytest.mark.parametrize("args", [["x"], ["-n", "8"], ["--a", "1", "2"], ["--=1"], ["--a", "1", "--"]])
def test_bad_pairs_are_refused_by_name(args: list[str]) -> None:
    with pytest.raises(UserError, match="argument"):
        parse_pairs(args)


def test_input_from_a_file_and_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in.json"
    file.write_text('{"prompt": "가"}', encoding="utf-8")
    assert read_input_file(str(file)) == {"prompt": "가"}
    monkeypatch.setattr("sys.stdin", io.StringIO('{"n": 1}'))
    assert read_input_file("-") == {"n": 1}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_input_files(tmp_path: Path, data: bytes | None, match: str) -> None:
    file = tmp_path / "in.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UserError, match=match):
        read_input_file(str(file))


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_source(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="directory"):
        read_source(str(tmp_path))
    file = tmp_path / "x.wasm"
    file.write_bytes(b"\0asm\xff")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_source(str(file))
