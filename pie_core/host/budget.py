"""What one inferlet may use, and the refusal that it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Caps of one inferlet. Counts are of what is alive at a time, bytes of the encoded text."""

    outstanding: int = 64  # passes submitted and not settled
    handles: int = 4096  # working sets, pipelines and channels
    programs: int = 256
    futures: int = 4096  # sleeps, takes, reads, receives and lengths in flight
    cell_words: int = 1 << 22  # u32 words of all channel rings
    unread_bytes: int = 8 << 20  # sent and not yet read by the client
    output_bytes: int = 256 << 20  # sent in all
    log_bytes: int = 1 << 20  # characters of log() and print()
    inbox: int = 1024  # values of the client not yet received
    pages: int | None = None  # KV pages; None: the whole pool


class Refusal(Exception):
    """An op that is refused: travels to the guest as {"error": {"type", "message", ...}}."""

    def __init__(self, kind: str, message: str, fields: Mapping[str, int | str | float] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.fields = dict(fields or {})

    def json(self) -> str:
        """The answer of `host.call`."""
        return json.dumps({"error": error_value(self.kind, self.message, self.fields)})


def error_value(kind: str, message: str, fields: Mapping[str, int | str | float]) -> dict[str, int | str | float]:
    """An error as it crosses the ABI."""
    return {**fields, "type": kind, "message": message}


def over(what: str, used: int, cap: int, fix: str) -> Refusal:
    """A budget is used up."""
    return Refusal("BudgetExceeded", f"{what}: {used} in use, the cap is {cap}; {fix}", {"used": used, "cap": cap})
