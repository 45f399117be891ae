"""JSON text of a guest: as `json.loads`, with a cap on nesting that holds on every host."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_NESTING = 200
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OTHERS = re.compile(r"[^\[\]{}]+")


def loads(text: str) -> Any:
    """The value. Raises ValueError for broken text and over MAX_NESTING: in a browser deep recursion is no exception but
    the end of the interpreter, and with it of every other inferlet."""
    if text.count("[") + text.count("{") > MAX_NESTING and _too_deep(text):
        raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")
    return json.loads(text)


def _too_deep(text: str) -> bool:
    depth = 0
    for bracket in _OTHERS.sub("", _STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_NESTING:
            return True
    return False
