"""Waits of asyncio's own that nothing will end: Deadlock is raised where each stands, can be caught, and `finally` runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive

HEAD = "import asyncio\nfrom inferlet.errors import Deadlock\n"
WAITS = {
    "event": "await asyncio.Event().wait()",
    "queue": "await asyncio.Queue().get()",
    "lock": "lock = asyncio.Lock(); await lock.acquire(); await lock.acquire()",
    "future": "await asyncio.get_running_loop().create_future()",
    "condition": "condition = asyncio.Condition()\n        async with condition: await condition.wait()",
    "gather": "await asyncio.gather(asyncio.Event().wait(), asyncio.Queue().get())",
    "task": "await asyncio.create_task(asyncio.Event().wait())",
    "wait": "done, _ = await asyncio.wait([asyncio.create_task(asyncio.Event().wait())]); done.pop().result()",
    "shield": "await asyncio.shield(asyncio.create_task(asyncio.Event().wait()))",
}


def tried(wait: str) -> str:
    return f"""{HEAD}
async def main(input):
    said = []
    try:
        {wait}
    except Deadlock as error:
        said.append(str(error))
    finally:
        said.append("finally")
    return said
"""


@pytest.mark.parametrize("name", WAITS)
async def test_a_wait_that_nothing_ends_can_be_caught(guest: Local, host: ScriptedHost, name: str) -> None:
    answer = await drive(guest, host, tried(WAITS[name]))
    assert answer["s"] == "done", answer
    told, last = answer["r"]
    assert "waits for something that no pass, message or timer will bring" in told and last == "finally"


async def test_a_task_group_tells_what_its_tasks_waited_for(guest: Local, host: ScriptedHost) -> None:
    source = f"""{HEAD}
async def main(input):
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            group.create_task(asyncio.Queue().get())
    except* Deadlock as found:
        told = len(found.exceptions)
    return told
"""
    assert (await drive(guest, host, source))["r"] == 2


async def test_what_is_caught_may_go_on(guest: Local, host: ScriptedHost) -> None:
    """A consumer that catches it ends the wait of main, which then goes on to the next."""
    source = f"""{HEAD}
async def consume(queue, gone):
    try:
        await queue.get()
    except Deadlock:
        gone.set()

async def main(input):
    queue, gone = asyncio.Queue(), asyncio.Event()
    task = asyncio.create_task(consume(queue, gone))
    await gone.wait()
    await task
    try:
        await queue.get()
    except Deadlock:
        return "twice"
"""
    assert (await drive(guest, host, source))["r"] == "twice"


async def test_nobody_is_interrupted_while_something_can_come(guest: Local, host: ScriptedHost) -> None:
    source = """import asyncio
from inferlet import sleep
async def main(input):
    event = asyncio.Event()
    async def later():
        await sleep(0.01)
        event.set()
    task = asyncio.create_task(later())
    await event.wait()
    return "set"
"""
    assert (await drive(guest, host, source))["r"] == "set"


async def test_not_caught_it_names_the_innermost_line(guest: Local, host: ScriptedHost) -> None:
    source = f"{HEAD}async def inner():\n    await asyncio.Event().wait()\n\nasync def main(input):\n    await inner()\n"
    error: dict[str, Any] = (await drive(guest, host, source))["e"]
    assert (error["type"], error["line"]) == ("Deadlock", 4)
