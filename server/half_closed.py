"""A client that shut down its writing half behind its request, or left: only bytes that are sent to it tell which of the two."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

STATUS_LINE = b"HTTP/1."  # how every answer begins, whatever its status: sent ahead byte by byte, it promises nothing
FIRST_S = 0.01  # to the first look at whether a byte was refused; then twice as long each time, a byte at every other: the last after 41 s


class HalfClosed:
    """Stands in for the `transport` of such a client. The system of one that left refuses whatever comes, and the connection is lost.

    `look` says whether the next byte is the first of an answer; it is called at every write, too. `end` has to be called at the loss."""

    def __init__(self, transport: asyncio.Transport, look: Callable[[], bool]) -> None:
        self._transport, self._look = transport, look
        self._sent = 0  # bytes of the status line of the next answer
        self._wait_s = FIRST_S
        self._turn = False  # whether `ask` sent a byte the last time
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def ask(self) -> bool:
        """Send a byte ahead where no answer has begun, now and from time to time. Whether the client may be there."""
        self._turn = not self._turn
        if self._look() and self._turn and self._sent < len(STATUS_LINE):
            self._transport.write(STATUS_LINE[self._sent : self._sent + 1])
            self._sent += 1
        if self._left():
            return False
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self.ask)
        self._wait_s *= 2
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """What is left of `data` behind the bytes that were sent ahead."""
        rest = memoryview(data).cast("B")[self._sent :]
        self._sent -= min(self._sent, len(data))
        self._transport.write(rest)
        self._look()
        self._left()

    def writelines(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """The same for all of `parts`."""
        self.write(b"".join(parts))

    def end(self) -> None:
        """The connection is lost: nobody is asked any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _left(self) -> bool:
        """Whether the client has refused something. On one machine it does so at once, else the next write is refused."""
        if not self._transport.is_closing():
            peer: socket.socket = self._transport.get_extra_info("socket")
            if not peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return False
            self._transport.abort()
        return True
