"""Chat turns as token ids, in the checkpoint's own template; text of users never becomes a special token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _host
from .errors import UsageError

_prefix: list[int] = []


def prefix() -> list[int]:
    """What every sequence starts with: [BOS] where the model wants one, else []."""
    return list(_prefix)


def role(role: str, content: str) -> list[int]:
    """One whole turn of `role`."""
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(f"chat.role: role is {role!r} and content is of type {type(content).__name__}; both must be str")
    ids: list[int] = _host.call_with("chat.role", role=role, content=content)
    return ids


def system(content: str) -> list[int]:
    """A system turn."""
    return role("system", content)


def user(content: str) -> list[int]:
    """A user turn."""
    return role("user", content)


def assistant(content: str) -> list[int]:
    """A finished assistant turn."""
    return role("assistant", content)


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
    ids: list[int] = _host.call_with("chat.render", messages=_messages(messages), cue=bool(cue), tools=tools)
    return ids


def text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, *, cue: bool = True) -> str:
    """As `render`, as text."""
    out: str = _host.call_with("chat.text", messages=_messages(messages), cue=bool(cue), tools=tools)
    return out


def _messages(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise UsageError(f'chat: messages is of type {type(messages).__name__}; use a list of {{"role": ..., "content": ...}}')
    return list(messages)


def _configure(facts: dict[str, Any]) -> None:
    """Take the prefix that `start` brings."""
    _prefix[:] = facts.get("prefix", [])
