"""Submits of a step loop, which are equal texts but for one token and one future: what was checked once need not be parsed again."""

from __future__ import annotations

import re
from typing import Any

from pie_core.host.ops import MAX_ID

MOST = 64  # texts known; a guest that makes endless different ones must not grow
# The numbers are whole as JSON has them, so that a text with others in their places parses to the same fields but for these two.
_STEADY = re.compile(r'(.*"tokens":\[)(0|[1-9][0-9]{0,9})(\].*"outs":\[)([1-9][0-9]{0,15})(\].*)')
# Other posted ops may take away or change what an accepted submit counted on.
HARMLESS = frozenset({"send", "ch.put", "ch.set"})

Key = tuple[str, str, str]


class Again:
    """Accepted submits of one token and one output by the text around these two numbers. Belongs to the guest's thread."""

    __slots__ = ("_known", "_vocab")

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._known: dict[Key, dict[str, Any]] = {}

    def find(self, payload: str) -> dict[str, Any] | None:
        """The checked fields of a submit that differs from an accepted one in nothing but token and output; None: look closely. The
        future may be taken, and the budget used up. "first": the fields that all of its kind share, where the executor keeps what the
        handles in them stand for."""
        if not self._known:
            return None
        match = _STEADY.fullmatch(payload)
        if match is None:
            return None
        before, token, between, out, behind = match.groups()
        fields = self._known.get((before, between, behind))
        if fields is None or int(token) >= self._vocab or int(out) > MAX_ID:
            return None
        return {**fields, "tokens": [int(token)], "outs": [int(out)], "first": fields}

    def keep(self, payload: str, fields: dict[str, Any]) -> None:
        """A submit was accepted that took nothing of the host's and buffered nothing."""
        match = _STEADY.fullmatch(payload)
        if match is None or payload.count('"tokens"') != 1 or payload.count('"outs"') != 1:
            return
        before, token, between, out, behind = match.groups()
        if fields["tokens"] != [int(token)] or fields["outs"] != [int(out)]:
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[before, between, behind] = fields

    def forget(self) -> None:
        """Something happened that submits may have counted on."""
        self._known.clear()
