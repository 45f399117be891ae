"""Streaming text: bytes to text without broken characters, stop strings cut exactly, and message checks. Standard library only.

A Python guest bundles this one file, so it imports nothing of this project.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 32  # nesting of lists and objects in a message


class TextError(Exception):
    """Text, messages or a template cannot be used; the message is one sentence. `too_long`: because of their length alone, which is
    beyond any model's context."""

    def __init__(self, text: str, *, too_long: bool = False) -> None:
        super().__init__(text)
        self.too_long = too_long


class MessageError(TextError):
    """A chat message is malformed. `index` is its place in the list (None: the list itself), `field` the key at fault ("" for none)."""

    def __init__(self, text: str, index: int | None = None, field: str = "") -> None:
        super().__init__(text)
        self.index, self.field = index, field


class Detokenizer:
    """Bytes in, text out, for one stream. Bytes of an unfinished character are held back until the rest arrives.

    The concatenation of all outputs equals `b"".join(inputs).decode("utf-8", "replace")`, however the bytes are split.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that `data` completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the stream: bytes that never became a character come out as U+FFFD. The object is then ready for a new stream."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


class StopMatcher:
    """Lets text through up to the first stop string, for one stream.

    The stop string that is complete first wins, the longest of those that end together. While the text ends in the beginning of a
    stop string, that part is held back. Results do not depend on how the text is split. Raises ValueError for an empty stop string.
    """

    __slots__ = ("_fails", "_held", "_states", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop strings must be a list of non-empty strings, got {stops!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._fails = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)  # how many characters of each stop string the text ends in
        self._held = ""
        self.stopped: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to send and was not sent before; "" after a stop. `stopped` names the match."""
        if self.stopped is not None or not self._stops:
            return "" if self.stopped is not None else text
        pending, states = self._held + text, self._states
        for at, character in enumerate(text, len(self._held) + 1):
            found = ""
            for index, stop in enumerate(self._stops):
                state, fail = states[index], self._fails[index]
                while state and stop[state] != character:
                    state = fail[state - 1]
                state += stop[state] == character
                if state == len(stop):
                    found = max(found, stop, key=len)
                    state = fail[state - 1]
                states[index] = state
            if found:
                self.stopped, self._held = found, ""
                return pending[: at - len(found)]
        keep = len(pending) - max(states)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """The end of the stream: what was held back and turned out not to be a stop string."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return rest


def _failure_table(stop: str) -> tuple[int, ...]:
    """Knuth, Morris and Pratt: for each prefix the length of its longest proper suffix that is also a prefix."""
    table, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length - 1]
        length += stop[length] == character
        table.append(length)
    return tuple(table)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Checked copies of chat messages: role known ("developer" becomes "system"), content a string (parts are joined).

    An assistant message that carries `tool_calls` may have null content, which becomes "". Other fields are kept; null ones are left
    out, for clients send back `"tool_calls": null`.
    Raises MessageError with index and field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise MessageError(f"messages must be a list, got {_name(messages)}")
    if not messages:
        raise MessageError("messages is empty; give at least one message")
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"messages[{index}] must be an object, got {_name(message)}", index)
    if "role" not in message:
        raise MessageError(f"messages[{index}].role is missing", index, "role")
    role = message["role"]
    if role not in ROLES:
        raise MessageError(f"messages[{index}].role is {_short(role)}, it must be one of {', '.join(ROLES)}", index, "role")
    checked = {key: _check_value(value, index, key, 0) for key, value in message.items() if key != "content" and value is not None}
    checked["role"] = "system" if role == "developer" else role
    checked["content"] = _content(message, index)
    return checked


def _content(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        missing = "is null" if "content" in message else "is missing"
        raise MessageError(f"messages[{index}].content {missing}; give a string", index, "content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(_part(part, index, number) for number, part in enumerate(content))
    raise MessageError(f"messages[{index}].content must be a string or a list of parts, got {_name(content)}", index, "content")


def _part(part: object, index: int, number: int) -> str:
    where = f"messages[{index}].content[{number}]"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"{where} must be an object, got {_name(part)}", index, "content")
    if part.get("type") != "text":
        raise MessageError(f"{where}.type is {_short(part.get('type'))}, only 'text' parts are supported", index, "content")
    if not isinstance(part.get("text"), str):
        raise MessageError(f"{where}.text must be a string, got {_name(part.get('text'))}", index, "content")
    return str(part["text"])


def _check_value(value: object, index: int, field: str, depth: int) -> object:
    """JSON only, and not too deep: templates walk these values."""
    if depth > MAX_DEPTH:
        raise MessageError(f"messages[{index}].{field} is nested deeper than {MAX_DEPTH}", index, field)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _check_value(item, index, field, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_check_value(item, index, field, depth + 1) for item in value]
    raise MessageError(f"messages[{index}].{field} holds {_name(value)}, which is not JSON", index, field)


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
