"""Waits that nothing will end, of asyncio's own events, queues, locks and futures: each raises Deadlock where it stands."""

from __future__ import annotations

import asyncio
from typing import Any

from ._loop import loop
from .errors import Deadlock


def interrupt(main: asyncio.Task[Any]) -> bool:
    """Raise Deadlock in what every task but `main` waits for, or, where no other does, in what `main` waits for: it may wait for them, and
    its `except` and `finally` run like theirs. To be called when nothing is ready and nothing comes from the host. False: there is no such
    wait."""
    others = [task for task in asyncio.all_tasks(loop) if task is not main]
    return _fail(others, "a task") or _fail([main], "main")


def _fail(tasks: list[asyncio.Task[Any]], who: str) -> bool:
    found = False
    for task in tasks:
        wait = getattr(task, "_fut_waiter", None)
        if wait is None or wait.done() or isinstance(wait, asyncio.Task) or hasattr(wait, "_children"):
            continue  # of a task, and of gather, whose tasks are looked at themselves
        wait.set_exception(Deadlock(f"{who} waits for something that no pass, message or timer will bring"))
        found = True
    return found
