"""The blocks of docs/inferlets.md, with what the guide says of the run of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

GUIDE = (Path(__file__).parents[2] / "docs" / "inferlets.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```python(?: inferlet)?\n(.*?)^```\n\n```text\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A block of code with what the guide says of its run."""

    title: str
    source: str
    input: dict[str, Any]
    received: tuple[Any, ...]
    sent: list[Any]
    result: str


def as_shown(value: Any) -> Any:
    """What a block sent and returned, with the context that the guide shows where a small KV cache bounds it."""
    return json.loads(re.sub(r"context of \d+, all that the KV cache holds", "context of 8192", json.dumps(value, default=repr)))


def _examples() -> list[Example]:
    found: list[Example] = []
    head = ""
    for title, body in re.findall(r"^##+ (.*?)$(.*?)(?=^##|\Z)", GUIDE, flags=re.MULTILINE | re.DOTALL):
        for code, talk in _BLOCK.findall(body):
            first, *messages, result = talk.splitlines()
            received = tuple(json.loads(line[2:]) for line in messages if line.startswith("> "))
            sent = [json.loads(line[2:]) for line in messages if line.startswith("< ")]
            if not head:  # the first block's imports and `step` stand before the others
                head = code[: code.index("\nasync def main")]
                code = code[len(head) :]  # noqa: PLW2901
            found.append(Example(title, f"{head}\n{code}", json.loads(first), received, sent, result))
    return found


EXAMPLES = _examples()
