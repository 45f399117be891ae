"""Submits of a step loop, which are equal texts but for one token and one future: what was checked once need not be parsed again."""

from __future__ import annotations

from typing import Any

from pie_core.host.ops import MAX_ID

MOST = 64  # texts known; a guest that makes endless different ones must not grow
LONGEST = 4096  # characters of such a text
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
        parts = _split(payload)
        if parts is None:
            return None
        before, token, between, out, behind = parts
        fields = self._known.get((before, between, behind))
        if fields is None or int(token) >= self._vocab or int(out) > MAX_ID:
            return None
        return {**fields, "tokens": [int(token)], "outs": [int(out)], "first": fields}

    def keep(self, payload: str, fields: dict[str, Any]) -> None:
        """A submit was accepted that took nothing of the host's and buffered nothing."""
        parts = _split(payload)
        if parts is None or payload.count('"tokens"') != 1 or payload.count('"outs"') != 1:
            return
        before, token, between, out, behind = parts
        if fields["tokens"] != [int(token)] or fields["outs"] != [int(out)]:
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[before, between, behind] = fields

    def forget(self) -> None:
        """Something happened that submits may have counted on."""
        self._known.clear()


def _split(payload: str) -> tuple[str, str, str, str, str] | None:
    """A text around its one token and its one output; None where it has not both. The numbers are whole as JSON has them, so that a text
    with others in their places parses to the same fields but for these two."""
    if len(payload) > LONGEST:
        return None
    before, _, rest = payload.partition('"tokens":[')
    token, _, rest = rest.partition("]")
    between, _, rest = rest.partition('"outs":[')
    out, _, behind = rest.partition("]")
    both = token + out
    if not (token and out and both.isdecimal() and both.isascii()) or out[0] == "0" or (token[0] == "0" and len(token) > 1):
        return None
    return before, token, between, out, behind
