"""The guest's asyncio event loop: runs until every task waits, then hands control back to the host."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from . import _host
from ._call import Call
from .errors import Deadlock, from_wire

_LONGEST_MS = 86_400_000  # of one host sleep; a timer that is later than this, even at infinity, sleeps again
_ROUNDS = 256  # rounds of ready callbacks in one step; a task that spins on sleep(0) then lets the host's events in


class Settleable(Protocol):
    """What the loop delivers a host future's outcome to."""

    def settle(self, value: Any, error: BaseException | None) -> None: ...
    def interrupt(self, error: BaseException) -> None:
        """End the waits with `error`; the future itself is still in flight and may yet settle."""
        ...


class HostFuture:
    """One host future with one waiter; `await` it once."""

    __slots__ = ("_future", "id")

    def __init__(self, fid: int) -> None:
        self.id = fid
        self._future: asyncio.Future[Any] | None = loop.create_future()

    def __await__(self) -> Any:
        assert self._future is not None  # awaited once
        loop.awaited[self.id] = self
        try:
            return (yield from self._future)
        finally:
            loop.awaited.pop(self.id, None)
            self._future = None  # an error that it holds was raised through this frame, and holds it

    def settle(self, value: Any, error: BaseException | None) -> None:
        if self._future is None or self._future.done():
            return
        if error is None:
            self._future.set_result(value)
        else:
            self._future.set_exception(error)

    def interrupt(self, error: BaseException) -> None:
        self.settle(None, error)


class StepLoop(asyncio.AbstractEventLoop):
    """An event loop without a selector: `resume` brings what the host settled, `pump` runs what is ready.

    `awaited` maps the host futures that something waits for now; its keys are what a step reports to the host. `unawaited` holds,
    weakly, results nobody waits for yet: dropping one costs nothing and an early value is kept only while its owner lives.
    """

    def __init__(self) -> None:
        self.awaited: dict[int, Settleable] = {}
        self.unawaited: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.background_tasks = 0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_order = 0
        self._alarms: dict[int, float] = {}  # host sleeps in flight: future id -> when it ends
        self._closed = False

    # --- driven by the host -------------------------------------------------------------------------------------------

    def resume(self, events: list[list[Any]]) -> None:
        """Deliver [[id, ok, value], ...]; ids that nobody knows any more are results that were dropped."""
        for fid, ok, value in events:
            if self._alarms.pop(fid, None) is not None:
                continue
            error = None if ok else from_wire(value)
            if isinstance(error, Deadlock):  # like a cancelled wait: what the author does next may still bring the value
                if fid in self.awaited:
                    self.awaited[fid].interrupt(error)
                continue
            target: Settleable | None = self.awaited.pop(fid, None)
            if target is None:
                target = self.unawaited.pop(fid, None)
            if target is not None:
                target.settle(value if ok else None, error)

    def pump(self) -> None:
        """Run until nothing is ready, or for a bounded number of rounds."""
        ready = self._ready
        asyncio._set_running_loop(self)
        try:
            for _ in range(_ROUNDS):
                if self._timers:
                    self._fire_timers()
                if not ready:
                    return
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle._cancelled:
                        handle._run()
        finally:
            asyncio._set_running_loop(None)

    def waiting(self) -> list[int]:
        """The host futures to be resumed for; arms a host sleep when a timer, or a spinning task, needs one."""
        ids = list(self.awaited)
        alarm = self._alarm()
        if alarm is not None:
            ids.append(alarm)
        return ids

    def _alarm(self) -> int | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._ready and not self._timers:
            return None
        now = self.time()
        when = now if self._ready else self._timers[0][0]
        for fid, end in self._alarms.items():
            if end <= when + 0.001:
                return fid
        ms = math.ceil(min(max(0.0, (when - now) * 1000), _LONGEST_MS))
        fid = _host.new_id()
        _host.call_with("sleep", ms=ms, f=fid)
        self._alarms[fid] = now + ms / 1000
        return fid

    def _fire_timers(self) -> None:
        timers, now = self._timers, self.time() + 0.0005
        while timers and (timers[0][2].cancelled() or timers[0][0] <= now):
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)

    # --- asyncio's interface ------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Debug mode does not exist here."""

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """The host owns the loop; an inferlet cannot close it."""

    def time(self) -> float:
        return time.monotonic()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_order += 1
        heapq.heappush(self._timers, (when, self._timer_order, handle))
        if len(self._timers) > 64 and self._timers[0][2].cancelled():
            self._timers = [t for t in self._timers if not t[2].cancelled()]
            heapq.heapify(self._timers)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when the heap is next looked at."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        self.background_tasks += 1
        if isinstance(coro, Call):
            coro = coro.native()
        elif not asyncio.iscoroutine(coro) and hasattr(type(coro), "__await__"):  # an Output; asyncio's own loops take only coroutines
            coro = _awaited(coro)
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"an inferlet has one thread; call {getattr(func, '__name__', func)} directly instead of in an executor")

    def run_until_complete(self, future: Any) -> Any:
        raise RuntimeError("the inferlet's loop is already running; use `await`")

    def run_forever(self) -> None:
        raise RuntimeError("the inferlet's loop is already running; use `await`")

    def _close_asyncgen(self, agen: Any) -> None:
        self.create_task(agen.aclose())

    def get_exception_handler(self) -> None:
        return None

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log what no code can catch any more: an exception in a task that nobody awaits, or in a callback."""
        error = context.get("exception")
        detail = "".join(traceback.format_exception(error)) if error is not None else ""
        task = context.get("task") or context.get("future")
        named = f" ({task.get_name()})" if isinstance(task, asyncio.Task) else ""
        text = f"{context.get('message', 'unhandled exception')}{named}\n{detail}".rstrip()
        _host.call_with("log", level="error", text=text.encode("utf-8", "backslashreplace").decode())


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


loop = StepLoop()  # type: ignore[abstract]  # what is missing needs a selector, threads or processes
sys.set_asyncgen_hooks(finalizer=loop._close_asyncgen)  # no other loop runs here
