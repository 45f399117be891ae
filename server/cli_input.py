"""The input of `pie run`: a JSON file, then `--key value` pairs over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pie_server.errors import UserError


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_value(text: str) -> Any:
    """A number, bool, null, list or object where `text` is one in JSON; any other text as it is, quotes included."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def parse_pairs(args: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, and a lone `--key` (true) as a dict; dashes in keys become underscores. Raises UserError."""
    pairs: dict[str, Any] = {}
    rest = [arg for i, arg in enumerate(args) if not (i == 0 and arg == "--")]
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--") or len(arg) == 2:
            raise UserError(f"unexpected argument {arg!r}; give the inferlet's input as --key value")
        key, equals, text = arg[2:].partition("=")
        if not key:
            raise UserError(f"argument {arg!r} has no name before the =")
        if equals:
            value = parse_value(text)
        elif rest and not rest[0].startswith("--"):
            value = parse_value(rest.pop(0))
        else:
            value = True
        pairs[key.replace("-", "_")] = value
    return pairs


def read_input_file(path: str) -> dict[str, Any]:
    """The JSON object in the file, or on standard input for "-". Raises UserError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise UserError(f"cannot read the input file {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise UserError(f"the input file {path} is not UTF-8 (byte {err.start})") from err
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as err:
        raise UserError(f"the input file {path} is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise UserError(f"the input file {path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_source(path: str) -> str:
    """The inferlet's source. Raises UserError when it cannot be read as UTF-8 text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise UserError(f"cannot read the inferlet {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise UserError(f"the inferlet {path} is not UTF-8 text (byte {err.start}); pie run takes Python source") from err
