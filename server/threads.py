"""Blocking work off the event loop, in a thread that does not keep a stopping program alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`work(*args, **kwargs)` in a daemon thread. Cancelling the caller abandons the work; nothing waits for its end.

    (asyncio.to_thread uses the loop's executor, whose threads are joined at exit: Ctrl-C in a long load would hang.)
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def body(outcome: asyncio.Future[T]) -> None:
        nonlocal work, args, kwargs
        result, error = None, None
        try:
            result = work(*args, **kwargs)
        except BaseException as err:  # carried over to the awaiting task
            error = err
        del work, args, kwargs  # who is told may count on their being free
        try:
            loop.call_soon_threadsafe(_settle, outcome, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return
        finally:
            del outcome, result, error  # its traceback has this frame

    threading.Thread(target=body, args=(outcome,), name=f"pie-{getattr(work, '__name__', 'work')}", daemon=True).start()
    try:
        return await outcome
    finally:
        del outcome  # it holds an error, whose traceback has this frame too


def _settle(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
