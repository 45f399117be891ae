"""Process: the engine's half of one inferlet. Executes its posts, turns what settles into events, drives the guest to its result."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.instance import InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.host.answer import Answer, InferletFailed, read_answer
from pie_core.host.budget import Budget
from pie_core.host.executor import Executor
from pie_core.host.port import GuestPort
from pie_core.host.services import LogSink, Services

__all__ = ["Guest", "InferletFailed", "Process"]

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
ARENA_SHARE = 4  # one inferlet's channels take at most one part in so many of the arena


class Guest(Protocol):
    """A sandboxed inferlet that calls `GuestPort.call` while it runs. Each method runs it until it waits, is done or has failed."""

    async def start(self, request: str) -> str: ...
    async def resume(self, events: str) -> str: ...
    def close(self) -> object:
        """Free it; a step that runs ends soon. May return an awaitable."""
        ...


class Process:
    """One run of one inferlet. Make it on the engine's loop, open the guest over `port`, then `await run(guest, request)` once.

    `receives` is False where `deliver` is never called: then an inferlet that only waits in `receive` is told so."""

    def __init__(
        self,
        engine: Engine,
        services: Services,
        name: str = "inferlet",
        *,
        tenant: str = "",
        budget: Budget | None = None,
        on_log: LogSink | None = None,
        receives: bool = True,
    ) -> None:
        budget = budget or Budget()
        cell_words = min(budget.cell_words, engine.limits.arena_words // ARENA_SHARE)
        budget = replace(budget, cell_words=cell_words)
        self._loop = asyncio.get_running_loop()
        self._services = services
        self._name = name
        limits = InstanceLimits(pages=budget.pages, outstanding=budget.outstanding + 1, handles=budget.handles + 1, cell_words=cell_words)
        self.instance = engine.open_instance(name, tenant, limits)
        self.port = GuestPort(services, engine.limits, budget, self._wake_from_guest)
        self._inbox_cap = budget.inbox
        self._ready: asyncio.Future[None] | None = None
        self._messages: deque[tuple[Any, int]] = deque()
        self._message: asyncio.Event = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._cancelled: str | None = None
        self._ended = False
        self._executor = Executor(self.instance, self.port, self._poke, self._sent, on_log, receives=receives)

    def request(self, source: str, input: Any, name: str | None = None) -> dict[str, Any]:
        """The start request for `source`, with this model's facts."""
        model = self._services.model
        return {
            "source": source,
            "name": name or self._name,
            "input": input,
            "model": {
                "name": model.name, "vocab": model.vocab, "hidden": model.hidden, "context": model.context, "eos": list(model.eos),
                "pages": model.pages, "page_tokens": PAGE_TOKENS,
            },
            "chat": {"prefix": self._services.chat.prefix()},
        }  # fmt: skip

    async def run(self, guest: Guest, request: Mapping[str, Any]) -> Any:
        """Drive `guest` to its result (a JSON value). Raises InferletFailed; whatever happens, guest, pages and handles are freed."""
        if self._task is not None or self._ended:
            raise RuntimeError("a Process runs once")
        self._task = asyncio.current_task()
        try:
            if self._cancelled is not None:
                raise InferletFailed("Cancelled", self._cancelled)
            return await self._drive(guest, request)
        except asyncio.CancelledError:
            if self._cancelled is None or self._task is None:
                raise
            self._task.uncancel()
            raise InferletFailed("Cancelled", self._cancelled) from None
        finally:
            self._task = None
            self.close()
            closing = guest.close()
            if isinstance(closing, Awaitable):
                await closing

    def cancel(self, reason: str = "the inferlet was cancelled") -> None:
        """End the run with InferletFailed("Cancelled"). Harmless when it has ended."""
        if self._ended or self._cancelled is not None:
            return
        self._cancelled = reason
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Free what the process holds in the engine and end `messages`. Twice is harmless; `run` does it."""
        if self._ended:
            return
        self._ended = True
        self._executor.finish()
        self._executor.close()
        self.port.close()
        self.instance.close()
        self._message.set()

    async def messages(self) -> AsyncIterator[Any]:
        """What the inferlet sends, in order, until it ends. One reader."""
        while True:
            while self._messages:
                value, size = self._messages.popleft()
                self.port.read_bytes += size
                yield value
            if self._ended:
                return
            self._message.clear()
            await self._message.wait()

    def deliver(self, value: Any) -> None:
        """A JSON value of the client, for the inferlet's `receive`. Raises InferletFailed when too many wait unread."""
        if len(self._executor.inbox) >= self._inbox_cap:
            raise InferletFailed("BudgetExceeded", f"{self._inbox_cap} values wait to be received, which is the cap")
        self._executor.deliver(_dumps(value))

    # --- inside

    async def _drive(self, guest: Guest, request: Mapping[str, Any]) -> Any:
        executor = self._executor
        state, value = await self._step(guest.start, _dumps(request))
        while state == "pending":
            state, value = await self._step(guest.resume, await self._wait(executor, executor.in_flight(value)))
        return value

    async def _step(self, call: Callable[[str], Awaitable[str]], text: str) -> Answer:
        try:
            said = await call(text)
        except InferletFailed:
            raise
        except Exception as error:  # the guest's boundary: a trap or a limit ends this inferlet only
            kind = getattr(error, "kind", None) or type(error).__name__
            raise InferletFailed(str(kind), str(error)) from error
        return await read_answer(said)

    async def _wait(self, executor: Executor, awaited: set[int]) -> str:
        """The events to resume with, once one of them is awaited: a deadlock is one. Raises InferletFailed where nothing is in flight."""
        executor.drain()
        while not executor.has_any(awaited):
            if executor.fault is not None:
                raise InferletFailed("HostError", f"the host failed to carry out an op: {type(executor.fault).__name__}: {executor.fault}")
            if not self._flying() and not executor.may_settle(awaited):
                if executor.tell_deadlock(awaited):
                    break
                raise InferletFailed("Deadlock", "the inferlet waits for something that no pass, message or timer will bring")
            self._ready = self._loop.create_future()
            await self._ready
            self._ready = None
            executor.drain()
        return executor.take_events()

    def _flying(self) -> bool:
        """Whether a pass is in flight: its end will ask again, which costs less than asking now at each token."""
        return any(pipe.flying for pipe in self.instance.pipelines)

    def _poke(self) -> None:
        ready = self._ready
        if ready is not None and not ready.done():
            ready.set_result(None)

    def _wake_from_guest(self) -> None:
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if not self._ended:
            self._executor.drain()

    def _sent(self, value: Any, size: int) -> None:
        self._messages.append((value, size))
        self._message.set()
