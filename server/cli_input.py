"""What the command line gives: the input of `pie run` (a JSON file, then `--key value` pairs), JSON files, and what is wrong with it."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import IO, Any

from pie_server.errors import UserError

INPUT_BYTES = 64 << 20
SOURCE_BYTES = 1 << 20
TEXT = ":text"  # the ending of a key whose value is text as it stands


class _TooLarge(Exception):
    """A number that no float holds."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _TooLarge(text)
    return value


def parse_value(text: str) -> Any:
    """A number, bool, null, list or object where `text` is one in JSON; any other text as it is, quotes included."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def parse_pairs(args: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, and a lone `--key` (true) as a dict; dashes in keys become underscores. `--key:text value`
    takes the value as text whatever it looks like, and `--key=--value` one that begins with dashes. Raises UserError."""
    pairs: dict[str, Any] = {}
    rest = [arg for i, arg in enumerate(args) if not (i == 0 and arg == "--")]
    while rest:
        arg = rest.pop(0)
        _check_text(arg)
        if not arg.startswith("--") or len(arg) == 2:
            raise UserError(f"unexpected argument {arg!r}; give the inferlet's input as --key value")
        name, equals, value = arg[2:].partition("=")
        key = name.removesuffix(TEXT)
        if any(character.isspace() for character in key):  # a text, meant as the value of the key before it
            raise UserError(f"argument {arg!r} is no --key; text that begins with dashes is given as --key=--text")
        if not key:
            raise UserError(f"argument {arg!r} has no name before the {TEXT if name else '='}")
        given = bool(equals)
        if not given and rest and not rest[0].startswith("--"):
            given, value = True, rest.pop(0)
            _check_text(value)
        if name != key and not given:
            raise UserError(f"argument {arg!r} has no text after it; text that begins with dashes is given as --{name}=--text")
        pairs[key.replace("-", "_")] = True if not given else value if name != key else _value(key, value)
    return pairs


def _value(key: str, text: str) -> Any:
    try:
        return parse_value(text)
    except _TooLarge as error:
        raise UserError(f"--{key}: {error} is too large for a number; --{key}{TEXT} passes it as text") from None


def _check_text(arg: str) -> None:
    """Bytes of the command line that are not UTF-8 come as lone surrogates, which no JSON text can carry."""
    try:
        arg.encode()
    except UnicodeEncodeError:
        raise UserError(f"the argument {arg!r} is not UTF-8") from None


_OF_A_WRONG_TYPE = ("AttributeError", "TypeError", "UsageError")
_TEXT_WANTED = re.compile(r"\b(?:str|string|text)\b")
_TEXT_METHODS = tuple(f"attribute '{name}'" for name in dir(str) if not name.startswith("_"))


def text_hint(args: Sequence[str], kind: str, message: str) -> str | None:
    """How to pass as text the value of `args` that was taken as something else, where the error `kind: message` is of text that was
    wanted and of such a value; else None."""
    if kind not in _OF_A_WRONG_TYPE or not (_TEXT_WANTED.search(message) or message.endswith(_TEXT_METHODS)):
        return None
    for key, value in parse_pairs(args).items():
        named = (re.escape(type(value).__name__), re.escape(repr(value)))
        if not isinstance(value, str) and re.search(rf"(?<!\w)(?:{'|'.join(named)})(?!\w)", message):
            kind = "true" if value is True else "null" if value is None else json.dumps(value, ensure_ascii=False)
            shown = kind if len(kind) <= 40 else f"{kind[:37]}..."
            dashes = f", --{key}=--VALUE text that begins with dashes" if value is True else ""
            return f"--{key} was passed as {shown}, not as text; --{key}{TEXT} VALUE passes text{dashes}"
    return None


def read_input_file(path: str) -> dict[str, Any]:
    """The JSON object in the file, or on standard input for "-". Raises UserError."""
    what = "standard input" if path == "-" else f"the input file {path}"
    value = _json(what, _from_stdin()) if path == "-" else read_json_file(path, "the input file", INPUT_BYTES)
    if not isinstance(value, dict):
        raise UserError(f"{what} must hold a JSON object, not {type(value).__name__}")
    return value


def read_json_file(path: str, what: str, limit: int) -> Any:
    """The JSON value in a file or pipe of at most `limit` bytes, which errors call `what`. Raises UserError."""
    return _json(f"{what} {path}", _from_file(path, what, limit))


def _json(what: str, data: bytes) -> Any:
    try:
        return json.loads(_decode(what, data), parse_constant=_no_constant, parse_float=_finite)
    except _TooLarge as error:
        raise UserError(f"{what} holds {error}, which is too large for a number") from None
    except (ValueError, RecursionError) as err:
        raise UserError(f"{what} is not JSON: {err}") from err


def read_source(path: str) -> str:
    """The inferlet's source. Raises UserError when it cannot be read as UTF-8 text."""
    if not path:
        raise UserError("the inferlet's path is empty; give a Python file")
    return _decode(f"the inferlet {path}", _from_file(path, "the inferlet", SOURCE_BYTES), "; pie run takes Python source")


def _decode(what: str, data: bytes, fix: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise UserError(f"{what} is not UTF-8 text (byte {err.start}){fix}") from err


def _from_stdin() -> bytes:
    return _all(sys.stdin.buffer, "standard input", INPUT_BYTES)


def _from_file(path: str, what: str, limit: int) -> bytes:
    """At most `limit` bytes of a file or a pipe; devices have no end, so they are refused."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            kind = "a directory" if stat.S_ISDIR(mode) else "a device"
            raise UserError(f"cannot read {what} {path}: it is {kind}, not a file")
        with Path(path).open("rb") as file:
            return _all(file, f"{what} {path}", limit)
    except OSError as err:
        raise UserError(f"cannot read {what} {path}: {err.strerror}") from err
    except ValueError as err:  # a NUL in the path
        raise UserError(f"cannot read {what} {path!r}: {err}") from err


def _all(file: IO[bytes], what: str, limit: int) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{what} is over the limit of {limit >> 20} MB")
    return data


_UNKNOWN = re.compile(r"No such option: (--\S+) \(Possible options: (.*)\)")
_NEAR = 0.5  # how alike two names are of which one may be meant as the other


def usage_sentence(message: str) -> str:
    """What the command line's parser says, without its inner words, and with the options only that are like the one that was given."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is None:
        return message.replace(": Value error, ", ": ", 1)
    given, known = unknown[1].lstrip("-"), unknown[2].split(", ")
    near = [name for name in known if SequenceMatcher(None, given, name.lstrip("-")).ratio() >= _NEAR]
    return f"No such option: {unknown[1]}" + (f" (Possible options: {', '.join(near)})" if near else "; --help lists them")
