"""Structured logs: one line an event, JSON or key=value; values are escaped, so that no input can forge a line."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any, Literal, TextIO

logger = logging.getLogger("pie")
logger.addHandler(logging.NullHandler())  # commands that do not `configure` say what they have to say themselves


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    head = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
    }
    error = record.exc_info[1] if record.exc_info else None
    return {**head, "event": record.getMessage(), **getattr(record, "fields", {}), **(fault(error) if error is not None else {})}


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """`time level event key=value …`; a value that is not a plain word is written as a JSON string."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        head = f"{fields.pop('time')} {fields.pop('level')} {_word(fields.pop('event'))}"
        return " ".join([head, *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, default=str)
    return text if text and all(c.isascii() and (c.isalnum() or c in "._-+/:{}*") for c in text) else json.dumps(text, ensure_ascii=True)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_handler = _Stderr()


def configure(style: Literal["json", "text"] = "text") -> None:
    """Send this package's log lines to stderr, and in the same form what the engine and libraries warn of."""
    _handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger.setLevel(logging.INFO)
    logging.getLogger().addHandler(_handler)  # the root's level lets warnings pass


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write one line. `fields` never hold a user's text."""
    logger.log(level, event, extra={"fields": fields})


def where(error: BaseException) -> str:
    """`Type at file:line` of `error`'s innermost frame: enough to find a fault, without the message, which may quote a user."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def fault(error: BaseException) -> dict[str, str]:
    """The log fields of a fault of ours: `error` in a word, and the frames of it and of what caused it, without their messages."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        parts.insert(0, "".join(traceback.format_tb(link.__traceback__)) + type(link).__name__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return {"error": where(error), "traceback": "\n".join(parts)}
