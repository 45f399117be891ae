"""Host values that are consumed when they arrive: a cancelled wait must not lose one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _host
from ._loop import loop


class _Slot:
    """One host future in flight for a mailbox."""

    __slots__ = ("__weakref__", "box", "id")

    def __init__(self, box: Mailbox, fid: int) -> None:
        self.box, self.id = box, fid

    def settle(self, value: Any, error: BaseException | None) -> None:
        self.box.arrived(self, value, error)

    def interrupt(self, error: BaseException) -> None:
        self.box.interrupted(error)


class Mailbox:
    """Pairs waiters with host futures in order, as asyncio.Queue does: an arrival whose waiter was cancelled goes to the next one.

    A refusal says that so many cannot be served, whichever future it comes by: it is the last waiter's, and nobody's where there are no
    more waiters than futures in flight.
    """

    __slots__ = ("_kept", "_request", "_slots", "_waiters")

    def __init__(self, request: Callable[[int], object]) -> None:
        self._request = request  # posts the op for a future id
        self._slots: list[_Slot] = []
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._kept: deque[Any] = deque()

    async def get(self) -> Any:
        """The next value; raises what the host answered instead."""
        while not self._kept:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                if len(self._slots) < len(self._waiters):
                    slot = _Slot(self, _host.new_id())
                    self._request(slot.id)
                    self._slots.append(slot)
                self._listen()
                await waiter
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                if self._kept:
                    self._wake()
                self._listen()
                del waiter  # it holds the error, which holds this frame
                raise
        return self._kept.popleft()

    def arrived(self, slot: _Slot, value: Any, error: BaseException | None) -> None:
        """One host future settled."""
        self._slots.remove(slot)
        if error is None:
            self._kept.append(value)
            self._wake()
            return
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        if len(waiting) > len(self._slots):
            self._waiters.remove(waiting[-1])
            waiting[-1].set_exception(error)

    def interrupted(self, error: BaseException) -> None:
        """The wait of one future ends with `error`; the future stays in flight, for the next waiter."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                return

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _listen(self) -> None:
        """As many of the futures in flight count as awaited as there are waiters."""
        for k, slot in enumerate(self._slots):
            if k < len(self._waiters):
                loop.unawaited.pop(slot.id, None)
                loop.awaited[slot.id] = slot
            else:
                loop.awaited.pop(slot.id, None)
                loop.unawaited[slot.id] = slot
