"""Talking to the client and the log: send, receive, log, sleep, and print() as log lines."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from pie_core.eta import Tensor

from . import _host
from ._call import asks
from ._mailbox import Mailbox
from ._values import MAX_NESTING, _short, json_fault, nested_over
from .errors import UsageError

LEVELS = ("debug", "info", "warning", "error")
_MAX_SLEEP = 10**9  # seconds
_LINE = 65536  # characters of one log line; longer output is cut into several


def send(value: Any) -> None:
    """Stream `value` (text, or any JSON) to whoever made the request."""
    if nested_over(value, MAX_NESTING):
        raise UsageError(f"send: value is nested more than {MAX_NESTING} levels deep; send a flatter one")
    try:
        payload = _host.dumps({"value": value})
    except (TypeError, ValueError) as error:
        raise UsageError(f"send: {json_fault(value, 'value') or error}; send text or JSON") from None
    _host.call("send", payload)


_incoming = Mailbox(lambda fid: _host.call("receive", f'{{"f":{fid}}}'))


@asks("receive", "await receive()")
async def receive() -> Any:
    """The next value the client sends to this running inferlet."""
    return await _incoming.get()


def log(*values: Any, level: str = "info") -> None:
    """Write a log line; `level` is one of debug, info, warning, error. (The logarithm of a tensor is `eta.log`.)"""
    if len(values) == 1 and isinstance(values[0], Tensor):
        raise UsageError("log: this one writes a log line; the logarithm of a tensor is eta.log(x) after `from inferlet import eta`")
    if not isinstance(level, str) or level not in LEVELS:
        raise UsageError(f"log: level is {_short(level)}; use one of {', '.join(LEVELS)}")
    for k, v in enumerate(values):
        if hasattr(type(v), "__await__"):
            raise UsageError(f"log: values[{k}] is {_short(v)}")
    _write(level, " ".join(str(v) for v in values))


def _write(level: str, text: str) -> None:
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # a log must show what is wrong with a text, not refuse it
    _host.call_with("log", level=level, text=text)


@asks("sleep", "await sleep(…)")
async def sleep(seconds: float) -> None:
    """Let `seconds` pass without using the CPU."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= _MAX_SLEEP:
        raise UsageError(f"sleep: seconds is {_short(seconds)}; use a number from 0 to {_MAX_SLEEP}")
    await asyncio.sleep(seconds)


class LogStream(io.TextIOBase):
    """sys.stdout or sys.stderr as whole log lines."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._parts: list[str] = []
        self._size = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._parts.append(text)
        self._size += len(text)
        if "\n" in text or self._size > _LINE:
            *lines, rest = "".join(self._parts).split("\n")
            while len(rest) > _LINE:
                lines.append(rest[:_LINE])
                rest = rest[_LINE:]
            self._parts, self._size = ([rest] if rest else []), len(rest)
            for line in lines:
                _write(self._level, line)
        return len(text)

    def close_line(self) -> None:
        """Log what has no newline yet."""
        if self._parts:
            text, self._parts, self._size = "".join(self._parts), [], 0
            _write(self._level, text)
