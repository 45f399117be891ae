"""Conversations to token ids: special tokens come from the template alone, never from what a user wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pie_core.text.sandbox import TemplateError
from pie_core.text.stream import MessageError, check_messages
from pie_core.text.template import ChatTemplate
from pie_core.text.tokenizer import TEMPLATE_KEYS, Tokenizer, TokenizerSpec
from pie_core.weights.metadata import Metadata

# Private-use characters; one that occurs in neither messages nor template keeps user text from forming special tokens.
_FIRST, _LAST = 0xF0000, 0xFFFFD
_PRIVATE: Final = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


class ChatEncoder:
    """Turns messages into ids with the checkpoint's own template. Thread-safe when the tokenizer is.

    `specials` maps the text of each special token to its id. `bos` is the id that every sequence starts with, or None. `template` is
    None for a base model: then `prefix` works and everything else raises TemplateError.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, specials: Mapping[str, int], bos: int | None = None) -> None:
        self._tokenizer, self._template, self._specials, self._bos = tokenizer, template, dict(specials), bos
        names = sorted(self._specials, key=len, reverse=True)  # the longest special at a place wins
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._starts = {name[:end] for name in names for end in range(1, len(name))}
        self._ends = {name[at:] for name in names for at in range(1, len(name))}
        self._lengths = sorted({len(part) for part in self._starts})
        self._seal: list[int] | None = None
        self._cue: list[int] | None = None

    def prefix(self) -> list[int]:
        """Ids that every sequence starts with: the BOS of models that want one, else []."""
        return [] if self._bos is None else [self._bos]

    def encode(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of a whole conversation, `prefix` included once, with the opening of the assistant's turn when `cue`.

        Raises MessageError, TemplateError or TokenizerError.
        """
        ids = self._ids(*self._render(messages, cue, tools))
        prefix = self.prefix()
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def text(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> str:
        """The prompt as text, as the template writes it. Raises MessageError or TemplateError."""
        text, marker = self._render(messages, cue, tools)
        return text.replace(marker, "")

    def role(self, role: str, content: str) -> list[int]:
        """Ids of one turn of `role`, without `prefix`, by the difference of two renders.

        Raises MessageError for an unknown role, and TemplateError when the template does not write such a turn on its own.
        """
        turn = {"role": role, "content": content}
        ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        if check_messages([turn])[0]["role"] == "system":
            whole, marker = self._render([turn, ask], False)
            (after, _), (longer, _) = self._render([turn, ask, answer, ask], False), self._render([turn, ask, answer], False)
            segment = whole.removesuffix(self._difference(after, longer, role))
            if segment == whole:
                raise self._indivisible(role)
        else:
            base = [ask] if role == "assistant" else [ask, answer]
            (before, _), (whole, marker) = self._render(base, False), self._render([*base, turn], False)
            segment = self._difference(whole, before, role)
        ids = self._ids(segment, marker)
        prefix = self.prefix()
        return ids[len(prefix) :] if prefix and ids[: len(prefix)] == prefix else ids

    def cue(self) -> list[int]:
        """Ids that open the assistant's turn. Raises TemplateError when the template has no such opening."""
        if self._cue is None:
            ask = [{"role": "user", "content": "a"}]
            (before, _), (after, marker) = self._render(ask, False), self._render(ask, True)
            self._cue = self._ids(self._difference(after, before, "assistant"), marker)
        return list(self._cue)

    def seal(self) -> list[int]:
        """Ids that close the assistant's turn, the end-of-turn token first. Raises TemplateError when the template does not show one."""
        if self._seal is None:
            number = 0
            while (probe := f"zq{number}j") in self._source():
                number += 1
            text, marker = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": probe}], False)
            _, found, rest = text.rpartition(probe)
            if not found:
                raise self._indivisible("assistant")
            self._seal = self._ids(rest, marker)
        return list(self._seal)

    def _source(self) -> str:
        if self._template is None:
            raise TemplateError("this model has no chat template; encode plain text instead")
        return self._template.source

    def _indivisible(self, role: str) -> TemplateError:
        return TemplateError(f"this model's chat template does not write a {role} turn on its own; render whole conversations instead")

    def _difference(self, longer: str, shorter: str, role: str) -> str:
        """What the longer render adds to the shorter one."""
        if not longer.startswith(shorter) or len(longer) == len(shorter):
            raise self._indivisible(role)
        return longer[len(shorter) :]

    def _render(self, messages: object, cue: bool, tools: Sequence[Any] | None = None) -> tuple[str, str]:
        """The rendered text, in which a marker breaks up every special token that a message or tool contains, and the marker."""
        source = self._source()
        assert self._template is not None
        checked = check_messages(messages)
        used = {found for text in (source, *_strings([checked, tools])) for found in _PRIVATE.findall(text)}
        marker = next((chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in used), None)
        if marker is None:
            raise MessageError("the messages use every private-use character, so special tokens in them cannot be kept apart")
        escaped = [
            {**self._escape(message, marker), "role": message["role"], "content": self._escape_text(message["content"], marker, whole=True)}
            for message in checked
        ]
        return self._template.render(escaped, self._escape(tools, marker), cue), marker

    def _escape(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._escape_text(value, marker)
        if isinstance(value, Mapping):
            return {self._break(key, marker): self._escape(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(item, marker) for item in value]
        return value

    def _break(self, text: str, marker: str) -> str:
        """Put `marker` inside every special token of `text`."""
        return self._pattern.sub(lambda found: found[0][0] + marker + found[0][1:], text) if self._pattern else text

    def _escape_text(self, text: str, marker: str, whole: bool = False) -> str:
        """`_break`, and a marker beside what could become a special token together with the template's own text: an end that begins
        one, a beginning that ends one, and, for contents (`whole`), a text that lies within one. Other values, such as names and types,
        are left as they are then, for templates compare them."""
        if self._pattern is None or not text:
            return text
        broken = self._break(text, marker)
        if any(text[-length:] in self._starts for length in self._lengths):
            broken += marker
        if any(text[:length] in self._ends for length in self._lengths) or (whole and any(text in name for name in self._specials)):
            broken = marker + broken
        return broken

    def _ids(self, text: str, marker: str) -> list[int]:
        """Ids of rendered text: specials as themselves, everything between them as plain text."""
        ids: list[int] = []
        for piece in self._pattern.split(text) if self._pattern else [text]:
            if piece in self._specials:
                ids.append(self._specials[piece])
            elif plain := piece.replace(marker, ""):
                ids += self._tokenizer.encode(plain)
        return ids


def _strings(value: Any) -> set[str]:
    """Every string in a JSON value, keys included."""
    found: set[str] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, Mapping):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    return found


def load_chat(metadata: Metadata, spec: TokenizerSpec, tokenizer: Tokenizer) -> ChatEncoder:
    """The chat encoder of a checkpoint. Raises TemplateError for a template that cannot be used, WeightsError for a mistyped key."""
    source = metadata.optional_str("tokenizer.chat_template", None)
    template = None
    if source is not None:
        ids = {key: metadata.optional_int(f"tokenizer.ggml.{name}_token_id", None) for key, name in TEMPLATE_KEYS.items()}
        tokens = {key: tokenizer.decode([index]) for key, index in ids.items() if index is not None}
        template = ChatTemplate(source, tokens)
    return ChatEncoder(tokenizer, template, spec["specials"], spec["bos"] if spec["add_bos"] else None)
