"""What the port checks of edits of working sets at the call: against what it counted itself, and against the engine where nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pie_core.engine.working_set import WorkingSet
from pie_core.host.budget import Refusal
from pie_core.host.ops import Payload
from pie_core.host.table import ChannelEntry, SetEntry, Table


class EditPort(Protocol):
    """What the checks ask a port. Everything they refuse raises Refusal, or InvalidState of the engine's own checks; what passes may still
    fail later, which is told by the set's next use."""

    @property
    def table(self) -> Table: ...
    def settled_set(self, key: int) -> WorkingSet | None:
        """The engine's working set where nothing that was posted is still to happen to it, so that it stays as it is during the call; None
        where it may be another one when the edit gets there, or has failed."""
        ...

    def most(self, entry: SetEntry) -> int | None:
        """The tokens that a set holds at most, where they are known though something posted is still to happen to it."""
        ...


def _commit(port: EditPort, p: Payload) -> str:
    what = p["n"]
    if isinstance(what, int):
        return _shrink("ws.commit", port, p)
    entry = port.table.get("ws.commit", p["ws"], SetEntry)
    if isinstance(what, list):
        if entry.buffered is not None and what and max(what) >= entry.buffered:
            raise Refusal(
                "InvalidState", f"ws.commit: index {max(what)}: the buffer of the working set holds at most {entry.buffered} tokens"
            )
        if (ws := port.settled_set(p["ws"])) is not None:
            ws.check_path(what)
        entry.buffered = 0
    elif "ch" in what:
        readable(port.table, "ws.commit", what["ch"])
    return ""


def _discard(port: EditPort, p: Payload) -> str:
    if p["n"] is None:
        port.table.get("ws.discard", p["ws"], SetEntry).buffered = 0
        return ""
    return _shrink("ws.discard", port, p)


def _shrink(op: str, port: EditPort, p: Payload) -> str:
    entry, n = port.table.get(op, p["ws"], SetEntry), p["n"]
    if entry.buffered is not None and n > entry.buffered:
        raise Refusal("InvalidState", f"{op}({n}): the buffer of the working set holds at most {entry.buffered} tokens")
    if (ws := port.settled_set(p["ws"])) is not None:
        (ws.check_commit if op == "ws.commit" else ws.check_discard)(n)
    if entry.buffered is not None:
        entry.buffered -= n
    return ""


def _truncate(port: EditPort, p: Payload) -> str:
    entry = port.table.get("ws.truncate", p["ws"], SetEntry)
    if (ws := port.settled_set(p["ws"])) is not None:
        ws.check_truncate(p["n"])
    elif (most := port.most(entry)) is not None and p["n"] > most:
        raise Refusal("InvalidState", f"truncate({p['n']}) is past the end: the working set has {most} tokens", {"length": most})
    entry.buffered = None
    return ""


EDITS: dict[str, Callable[[EditPort, Payload], str]] = {"ws.commit": _commit, "ws.discard": _discard, "ws.truncate": _truncate}


def readable(table: Table, op: str, key: int) -> None:
    """Refuses a channel that the host does not read."""
    if table.get(op, key, ChannelEntry).host != "reader":
        raise Refusal("ChannelError", f'{op}: the host does not read this channel; create it with host="reader"')
