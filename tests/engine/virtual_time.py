"""An event loop with a clock of its own: the same calls give the same order of events however busy the machine is, and nothing sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

TURN = 20e-6  # seconds that a turn of the loop takes


class VirtualLoop(asyncio.BaseEventLoop):
    """Time passes by `TURN` a turn, and up to the next timer when there is nothing else to do. No sockets, no threads. A wait for
    something that no callback or timer will bring raises RuntimeError instead of lasting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._now = 1000.0

    def time(self) -> float:
        """Seconds of the loop's own clock."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """A turn is over: go to the next timer, `timeout` seconds away (0: something is ready)."""
        if timeout is None:
            raise RuntimeError("the test waits for something that nothing will bring")
        self._now += max(TURN, timeout)
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
