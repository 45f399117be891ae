"""What the port checks of edits of working sets at the call: against what it counted itself, and against the engine where nothing moves."""

from __future__ import annotations

from collections.abc import Callable

from pie_core.engine.working_set import WorkingSet
from pie_core.host.budget import Refusal
from pie_core.host.ops import Payload
from pie_core.host.table import ChannelEntry, SetEntry, Table

Settled = Callable[[int], WorkingSet | None]
Most = Callable[[SetEntry], int | None]


class EditChecks:
    """`settled` gives the engine's working set where nothing that was posted is still to happen to it, so that it stays as it is during the
    call; None where it may be another one when the edit gets there, or has failed. Everything raises Refusal, and InvalidState of the
    engine's own checks; what passes may still fail later, which is told by the set's next use."""

    __slots__ = ("_most", "_settled", "_table", "handlers")

    def __init__(self, table: Table, settled: Settled, most: Most) -> None:
        """`most`: the tokens that a set holds at most, where they are known though something posted is still to happen to it."""
        self._table = table
        self._settled = settled
        self._most = most
        self.handlers: dict[str, Callable[[Payload], str]] = {
            "ws.commit": self._commit, "ws.discard": self._discard, "ws.truncate": self._truncate,
        }  # fmt: skip

    def _commit(self, p: Payload) -> str:
        what = p["n"]
        if isinstance(what, int):
            return self._shrink("ws.commit", p)
        entry = self._table.get("ws.commit", p["ws"], SetEntry)
        if isinstance(what, list):
            if entry.buffered is not None and what and max(what) >= entry.buffered:
                raise Refusal(
                    "InvalidState", f"ws.commit: index {max(what)}: the buffer of the working set holds at most {entry.buffered} tokens"
                )
            if (ws := self._settled(p["ws"])) is not None:
                ws.check_path(what)
            entry.buffered = 0
        elif "ch" in what:
            readable(self._table, "ws.commit", what["ch"])
        return ""

    def _discard(self, p: Payload) -> str:
        if p["n"] is None:
            self._table.get("ws.discard", p["ws"], SetEntry).buffered = 0
            return ""
        return self._shrink("ws.discard", p)

    def _shrink(self, op: str, p: Payload) -> str:
        entry, n = self._table.get(op, p["ws"], SetEntry), p["n"]
        if entry.buffered is not None and n > entry.buffered:
            raise Refusal("InvalidState", f"{op}({n}): the buffer of the working set holds at most {entry.buffered} tokens")
        if (ws := self._settled(p["ws"])) is not None:
            (ws.check_commit if op == "ws.commit" else ws.check_discard)(n)
        if entry.buffered is not None:
            entry.buffered -= n
        return ""

    def _truncate(self, p: Payload) -> str:
        entry = self._table.get("ws.truncate", p["ws"], SetEntry)
        if (ws := self._settled(p["ws"])) is not None:
            ws.check_truncate(p["n"])
        elif (most := self._most(entry)) is not None and p["n"] > most:
            raise Refusal("InvalidState", f"truncate({p['n']}) is past the end: the working set has {most} tokens", {"length": most})
        entry.buffered = None
        return ""


def readable(table: Table, op: str, key: int) -> None:
    """Refuses a channel that the host does not read."""
    if table.get(op, key, ChannelEntry).host != "reader":
        raise Refusal("ChannelError", f'{op}: the host does not read this channel; create it with host="reader"')
