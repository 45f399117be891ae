"""`pie serve --prewarm FILE`: beginnings of conversations, computed before the server is ready and shared by all who send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.text.chat import ChatEncoder
from pie_core.text.stream import TextError
from pie_server.api.openai_schema import parse_messages
from pie_server.cli_input import read_json_file
from pie_server.errors import ApiError, UserError

_FILE_BYTES = 64 << 20
_PART = 16 * PAGE_TOKENS  # tokens computed between two reports of the progress
_NEXT = ("a", "1")  # two ways in which the user may go on; they share no first character, hence no first token


@dataclass(frozen=True)
class Opening:
    """How conversations begin, as token ids, and the file that says so."""

    file: Path
    ids: list[int]

    @property
    def short(self) -> bool:
        """Whether it is less than a page, the least that is kept."""
        return len(self.ids) < PAGE_TOKENS

    def parts(self, pool_tokens: int) -> Iterator[list[int]]:
        """Longer and longer beginnings, the last one the whole: each takes up what those before it left in the cache, and tells how far it
        has come. What does not fit into `pool_tokens` is given whole, to be refused before anything of it is computed."""
        step = _PART if len(self.ids) <= pool_tokens else len(self.ids)
        for end in range(step, len(self.ids) + step, step):
            yield self.ids[:end]


def read_messages(file: Path) -> list[dict[str, str]]:
    """The messages in a JSON file, by the rules of the chat API. Raises UserError naming the file."""
    value = read_json_file(str(file), "the --prewarm file", _FILE_BYTES)
    if not isinstance(value, list):
        raise UserError(f'the --prewarm file {file} must hold a list of chat messages like [{{"role": "system", "content": "..."}}]')
    try:
        return parse_messages(value)
    except ApiError as error:
        raise UserError(f"the --prewarm file {file}: {error.message}") from None


def opening(file: Path, messages: Sequence[dict[str, str]], chat: ChatEncoder, context: int) -> Opening:
    """The ids that every request begins with whose first messages are these: of a conversation that waits for the assistant all ids, of
    others those that do not depend on what the user says next. Raises UserError naming the file."""
    try:
        if messages[-1]["role"] == "user":
            ids = chat.encode(messages)
        else:
            ids = _common(*(chat.encode([*messages, _user(text)]) for text in _NEXT))
    except TextError as error:
        raise UserError(f"the --prewarm file {file}: {error}") from None
    if len(ids) >= context:
        raise UserError(f"the --prewarm file {file} has {len(ids)} tokens; the model's context of {context} leaves no room to answer")
    return Opening(file, ids)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _common(a: list[int], b: list[int]) -> list[int]:
    """What both begin with."""
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]
