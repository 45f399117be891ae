"""Threads that run guests' steps. Less ceremony than an executor: a step's two hand-overs are on the path of every token."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class StepPool:
    """`workers` daemon threads; `run` may be called from any event loop."""

    def __init__(self, workers: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """`function(*args)` in a thread; a cancelled future does not stop it. Call on a running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((loop, future, function, args))
        return future

    def close(self) -> None:
        """Wait for the jobs handed over so far and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function, args = job
            try:
                outcome, error = function(*args), None
            except BaseException as caught:  # carried over to whoever awaits the future
                outcome, error = None, caught
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                continue
            finally:
                del job, loop, future, function, args, outcome, error  # an idle thread keeps nothing alive


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
