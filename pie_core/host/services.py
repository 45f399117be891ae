"""What a host injects for the ops that are answered beside the guest: the model's facts, its tokenizer, its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pie_core.text.tokenizer import Tokenizer

LogSink = Callable[[str, str], None]  # (level, text), called on the engine's loop


class Chat(Protocol):
    """The checkpoint's chat template (`text.chat.ChatEncoder`)."""

    def prefix(self) -> list[int]: ...
    def encode(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> list[int]: ...
    def text(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> str: ...
    def role(self, role: str, content: str) -> list[int]: ...
    def cue(self) -> list[int]: ...
    def seal(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a guest is told of the model. `eos`: the checkpoint's stop ids, maybe several. `pages`: KV pages of PAGE_TOKENS tokens that
    all inferlets share, 0 where the host does not tell; `context` is never more than fits into them."""

    name: str
    vocab: int
    hidden: int
    context: int
    eos: tuple[int, ...] = ()
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """Shared by all inferlets of a model; tokenizer and chat are called from the guests' threads and must be thread-safe."""

    model: ModelFacts
    tokenizer: Tokenizer
    chat: Chat
