"""Turns of the event loop: all that is ready runs in one task of the browser, and timers are the browser's own.

Pyodide's loop gives every callback a task and a proxy of its own, and runs timers of up to 2 ms at once, so that whoever waits for so
short a while would ask again and again. Work that blocks the worker (a step of the cpu device) runs in tasks of its own, and the loop's
clock stands still meanwhile: an answer that came during a step was not late.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Final, cast

from pyodide.ffi import create_proxy

LONGEST_TURN: Final = 256  # callbacks; then messages that wait are served first


class _Soon:
    """A callback that is ready; what asyncio.Handle is, without its bookkeeping for debugging."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args, self.context = args, context

    def cancel(self) -> None:
        """It will not be called."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self.callback is None


class _Timer(asyncio.Handle):
    """A callback that a timer of the browser will make ready."""

    __slots__ = ("_number", "_turns")

    def __init__(self, turns: Turns, number: int, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None) -> None:
        super().__init__(callback, args, turns.loop, context)
        self._turns, self._number = turns, number

    def ring(self) -> None:
        """Call, unless it was cancelled since it fired."""
        if not self.cancelled():
            self._run()

    def cancel(self) -> None:
        """Also frees the browser's timer."""
        super().cancel()
        self._turns.forget(self._number)


class Turns:
    """Takes over `call_soon`, `call_later` and `time` of the running loop. `ticker` is a Ticker of engine/ticker.ts."""

    def __init__(self, ticker: Any) -> None:
        self.loop = cast(Any, asyncio.get_running_loop())
        self._ticker = ticker
        self._soon, self._after, self._ask = ticker.soon, ticker.after, ticker.alone
        self._ready: deque[_Soon] = deque()
        self._asked = False
        self._timers: dict[int, _Timer] = {}
        self._alone: deque[Callable[[], None]] = deque()
        self._number = 0
        self._blocked = 0.0  # seconds
        self._proxies = (create_proxy(self._turn), create_proxy(self._fired), create_proxy(self._work))
        ticker.open(*self._proxies)
        self.loop.call_soon = self.loop.call_soon_threadsafe = self._call_soon
        self.loop.call_later = self._call_later
        self.loop.time = self._time

    def _call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> _Soon:
        handle = _Soon(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        if not self._asked:
            self._asked = True
            self._soon()
        return handle

    def _call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        self._number = number = self._number + 1
        timer = self._timers[number] = _Timer(self, number, callback, args, context)
        self._after(number, max(0.0, delay * 1000))
        return timer

    def alone(self, work: Callable[[], None]) -> None:
        """Run `work` in a task of its own, behind what this turn posts and the messages that wait. It must not raise, and the time that it
        takes does not pass for the loop."""
        self._alone.append(work)
        self._ask()

    def _time(self) -> float:
        return time.monotonic() - self._blocked

    def _turn(self) -> None:
        self.loop._install_running_loop()
        ready, left = self._ready, LONGEST_TURN
        try:
            while ready and left:
                left -= 1
                handle = ready.popleft()
                callback = handle.callback
                if callback is not None:
                    try:
                        handle.context.run(callback, *handle.args)
                    except Exception as error:
                        self.loop.call_exception_handler({"message": f"Exception in callback {callback!r}", "exception": error})
        finally:
            self._asked = bool(ready)
            if ready:
                self._soon()

    def _work(self) -> None:
        if self._ready:  # what arrived since: its answers leave first, too
            self._turn()
        began = time.monotonic()
        self._alone.popleft()()
        self._blocked += time.monotonic() - began

    def _fired(self, number: int) -> None:
        timer = self._timers.pop(number, None)
        if timer is not None:  # by way of a turn of its own: browsers slow down timers that are set by timers
            self._call_soon(timer.ring)

    def forget(self, number: int) -> None:
        """A timer was cancelled."""
        if self._timers.pop(number, None) is not None:
            self._ticker.cancel(number)
