"""`--key value` pairs and input files of `pie run`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from pie_server import cli_input
from pie_server.api.backend import InferletError
from pie_server.cli import execute
from pie_server.cli_input import parse_pairs, parse_value, read_input_file, read_source, text_hint, usage_sentence
from pie_server.cli_unread import unread_keys
from pie_server.errors import UserError
from tests.server.conftest import ROOT


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
        (["--a:text", "5", "--b:text=true", "--c:text="], {"a": "5", "b": "true", "c": ""}),
        (["--max-n:text", "1e999"], {"max_n": "1e999"}),
        (["--a=--dashes", "--b:text=--b"], {"a": "--dashes", "b": "--b"}),
    ],
)
def test_parse_pairs(args: list[str], pairs: dict[str, Any]) -> None:
    assert parse_pairs(args) == pairs


@pytest.mark.parametrize(
    "args",
    [
        ["x"], ["-n", "8"], ["--prompt", "--dashes in a text"], ["--a", "1", "2"], ["--=1"], ["--a", "1", "--"],
        ["--:text", "1"], ["--a:text"], ["--a:text", "--b"], ["--a", "\udcff"],
    ],
)  # fmt: skip
def test_bad_pairs_are_refused_by_name(args: list[str]) -> None:
    with pytest.raises(UserError, match="argument"):
        parse_pairs(args)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "[1, 1e999]", '{"a": 2e400}'])
def test_a_number_that_no_float_holds_is_refused_at_its_flag(value: str) -> None:
    with pytest.raises(UserError, match=r"^--i: .* is too large for a number; --i:text passes it as text"):
        parse_pairs(["--i", value])


PASSED = ["--a", "x", "--b:text", "5", "--seed", "-1", "--go", "--prompt", "5"]
WANTED = [  # error, the key that the hint names
    ("TypeError", 'can only concatenate str (not "int") to str', "seed"),
    ("TypeError", 'can only concatenate str (not "bool") to str', "go"),
    ("UsageError", "model.encode: text is 5; use a str", "prompt"),
    ("AttributeError", "'int' object has no attribute 'strip'", "seed"),
    ("AttributeError", "'int' object has no attribute 'foo'", None),
    ("UsageError", "Channel.counter: seed is -1; use an integer from 0 to 4294967295", None),
    ("TypeError", 'can only concatenate str (not "list") to str', None),
    ("KeyError", "'text of int'", None),
]


@pytest.mark.parametrize(("kind", "message", "key"), WANTED, ids=[message for _, message, _ in WANTED])
def test_the_hint_names_what_should_have_been_text(kind: str, message: str, key: str | None) -> None:
    hint = text_hint(PASSED, kind, message)
    assert (hint is None) == (key is None)
    if hint is not None:
        assert hint.startswith(f"--{key} was passed as ") and f"--{key}:text VALUE" in hint


UNREAD = [  # source, whether --promt is told
    ("async def main(input):\n    return input['prompt']", True),
    ("def main(given): return given.get('prompt') if 'n' in given else given.pop('n', 1)", True),
    ("def main(input): return ask(input, 'prompt')\ndef ask(input, name): return input.get(name)", True),
    ("def main(input): return ask(input)\ndef ask(input): return ask(input) + input['prompt']", True),
    ("async def main(input):\n    return input", False),
    ("def main(input): return {**input}", False),
    ("def main(input):\n    for key in input: print(key)", False),
    ("def main(input): return other(1, input)", False),
    ("def main(input): return ask(input)\ndef ask(input): return sorted(input)", False),
    ("def main(input): return input['promt']", False),
    ("def main(*inputs): return inputs[0]['prompt']", False),
    ("main = make()", False),
    ("def main(input:", False),
    ("def main(input): return " + "(" * 5000 + "1" + ")" * 5000, False),
]


@pytest.mark.parametrize(("source", "told"), UNREAD, ids=[source[:60] for source, _ in UNREAD])
def test_keys_that_an_inferlet_never_reads(source: str, told: bool) -> None:
    assert unread_keys(source, ["promt"]) == (["promt"] if told else [])


def test_every_example_tells_of_a_misspelt_key() -> None:
    for path in sorted((ROOT / "inferlet_sdk" / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert unread_keys(source, ["promt", "max_toknes"]) == ["promt", "max_toknes"], path.name


def test_input_from_a_file_and_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in.json"
    file.write_text('{"prompt": "가"}', encoding="utf-8")
    assert read_input_file(str(file)) == {"prompt": "가"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO('{"n": "é"}'.encode()), encoding="ascii"))
    assert read_input_file("-") == {"n": "é"}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1e999}', "1e999, which is too large for a number"),
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


@pytest.mark.parametrize("read", [read_input_file, read_source])
def test_files_without_an_end_and_large_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    with pytest.raises(UserError, match="is a device, not a file"):
        read("/dev/zero")
    monkeypatch.setattr(cli_input, "INPUT_BYTES", 1 << 20)
    file = tmp_path / "large"
    file.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(UserError, match="is over the limit of 1 MB"):
        read(str(file))


def test_an_empty_path() -> None:
    with pytest.raises(UserError, match="path is empty"):
        read_source("")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "--device", "gpu"], "pie: Invalid value for '--device': 'gpu' is not one of 'auto', 'cpu', 'webgpu'."),
        (["serve", "--log-format", "xx"], "pie: Invalid value for '--log-format': 'xx' is not one of 'json', 'text'."),
        (["serve", "--bogus"], "pie: No such option: --bogus; --help lists them"),
        (["serve", "--prt", "1"], "pie: No such option: --prt (Possible options: --port)"),
        (["serve", "--kv-pool-mb"], "pie: Option '--kv-pool-mb' requires an argument."),
    ],
)
def test_what_the_command_line_is_wrong_about(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(args) == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_only_options_that_are_alike_are_proposed() -> None:
    said = usage_sentence("No such option: --hots (Possible options: --host, --log-format)")
    assert said == "No such option: --hots (Possible options: --host)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InferletError("KeyboardInterrupt", "", "a.py", 3), "KeyboardInterrupt (a.py, line 3)"),
        (InferletError("ValueError", "no", "a.py", 3), "ValueError: no (a.py, line 3)"),
        (InferletError("MemoryLimitExceeded", ""), "MemoryLimitExceeded"),
    ],
)
def test_a_failure_in_words(error: InferletError, text: str) -> None:
    assert str(error) == text
