"""The checkpoint's own chat template: messages in, prompt text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import meta

from pie_core.text.sandbox import MAX_TEXT, Budget, TemplateError, TemplateRefused, TemplateSandbox, run
from pie_core.text.stream import check_messages

__all__ = ["MAX_SOURCE", "TIME_LIMIT", "ChatTemplate", "TemplateError", "TemplateRefused"]

MAX_SOURCE: Final = 65_536  # characters of a template
TIME_LIMIT: Final = 0.5  # seconds of CPU time for one render
_sandbox: Final = TemplateSandbox()


class ChatTemplate:
    """A compiled Jinja chat template, safe to render whoever wrote it. Thread-safe.

    `tokens` are the strings a template may name, such as {"bos_token": "<s>"}. Raises TemplateError for a template that is too long,
    not valid, or uses what the sandbox does not offer.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, *, seconds: float = TIME_LIMIT) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        self.source, self.tokens, self._seconds = source, dict(tokens or {}), seconds
        try:
            self._template, tree = _sandbox.load(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid at line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:  # the Python compiler's own limits
            raise TemplateError(f"the chat template is nested too deeply or too large to compile: {error}") from None
        self.takes_tools = "tools" in meta.find_undeclared_variables(tree)

    def render(self, messages: object, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True) -> str:
        """The prompt text of `messages`, with the opening of the assistant's turn when `add_generation_prompt`.

        Raises MessageError (index, field), TemplateRefused when the template rejects the conversation, TemplateError for anything else
        that goes wrong in it, and when `tools` are given to a template that knows none.
        """
        checked = check_messages(messages)
        if tools and not self.takes_tools:
            raise TemplateError("this model's chat template has no place for tools; send the request without them")
        variables = {
            **self.tokens, "messages": checked, "tools": list(tools) if tools else None, "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        return run(self._seconds, lambda budget: self._render(variables, budget))

    def _render(self, variables: dict[str, Any], budget: Budget) -> str:
        parts, size = [], 0
        try:
            for part in self._template.generate(variables):
                budget.tick()
                size += len(part)
                if size > MAX_TEXT:
                    raise TemplateError(f"the chat template writes more than {MAX_TEXT} characters", too_long=True)
                parts.append(part)
        except TemplateError:
            raise
        except Exception as error:  # the template is the model's code: whatever it raises is its failure, not ours
            raise TemplateError(f"the chat template failed on these messages: {type(error).__name__}: {error}") from None
        return "".join(parts)
