"""Chat turns as token ids, in the checkpoint's own template; text of users never becomes a special token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _host
from ._values import _hint, _short, is_list, type_name
from .errors import UsageError

_prefix: list[int] = []


def prefix() -> list[int]:
    """What every sequence starts with: [BOS] where the model wants one, else []."""
    return list(_prefix)


def role(role: str, content: str) -> list[int]:
    """One whole turn of `role`."""
    return _turn("chat.role", role, content)


def system(content: str) -> list[int]:
    """A system turn."""
    return _turn("chat.system", "system", content)


def user(content: str) -> list[int]:
    """A user turn."""
    return _turn("chat.user", "user", content)


def assistant(content: str) -> list[int]:
    """A finished assistant turn."""
    return _turn("chat.assistant", "assistant", content)


def cue() -> list[int]:
    """What makes the model answer: the opening of an assistant turn."""
    ids: list[int] = _host.call("chat.cue", "{}")
    return ids


def seal() -> list[int]:
    """What closes the assistant turn that `cue` opened."""
    ids: list[int] = _host.call("chat.seal", "{}")
    return ids


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, *, cue: bool = True) -> list[int]:
    """Token ids of a whole conversation, [{"role", "content"}, ...], prefix included; `cue` appends the opening of the answer."""
    ids: list[int] = _host.call_with("chat.render", **_conversation("chat.render", messages, tools, cue))
    return ids


def text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, *, cue: bool = True) -> str:
    """As `render`, as text."""
    out: str = _host.call_with("chat.text", **_conversation("chat.text", messages, tools, cue))
    return out


def _turn(what: str, role: Any, content: Any) -> list[int]:
    for field, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise UsageError(f"{what}: {field} is {_kind(value)}; use a str")
    ids: list[int] = _host.call_with("chat.role", role=role, content=content)
    return ids


def _kind(value: Any) -> str:
    """The type of what may be a user's words, which an error does not repeat."""
    return f"of type {type_name(value)}{_hint(value)}"


def _conversation(what: str, messages: Any, tools: Any, cue: Any) -> dict[str, Any]:
    if not is_list(messages):
        raise UsageError(f'{what}: messages is {_kind(messages)}; use a list of {{"role": ..., "content": ...}}')
    if tools is not None and not is_list(tools):
        raise UsageError(f"{what}: tools is {_kind(tools)}; use a list of tools, or None")
    if not isinstance(cue, bool):
        raise UsageError(f"{what}: cue is {_short(cue)}; use True or False")
    return {"messages": list(messages), "tools": None if tools is None else list(tools), "cue": cue}


def _configure(facts: dict[str, Any]) -> None:
    """Take the prefix that `start` brings."""
    _prefix[:] = facts.get("prefix", [])
