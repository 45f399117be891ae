"""How a failure that no single line of `main` raised is told: groups of errors, chains, StopIteration, tasks that nobody awaits."""

from __future__ import annotations

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive

HEAD = """import asyncio
async def one(): raise ValueError("first")
async def two(): raise KeyError("second")
async def main(input):
"""
GROUP = "unhandled errors in a TaskGroup"
CASES: list[tuple[str, str, int, list[str]]] = [  # type, message, line, body from line 5 on
    ("ExceptionGroup", f"{GROUP} (1 sub-exception): ValueError: first", 2,
     ["async with asyncio.TaskGroup() as group: group.create_task(one())"]),
    ("ExceptionGroup", f"{GROUP} (2 sub-exceptions): the first is ValueError: first; then KeyError at line 3", 2,
     ["async with asyncio.TaskGroup() as group: group.create_task(one()); group.create_task(two())"]),
    ("ExceptionGroup", f"{GROUP} (1 sub-exception): KeyError: 'second'", 3,
     ["async def inner():", "    async with asyncio.TaskGroup() as group: group.create_task(two())",
      "async with asyncio.TaskGroup() as group: group.create_task(inner())"]),
    ("ExceptionGroup", "x (6 sub-exceptions): the first is ValueError: 0; then ValueError; then ValueError; then ValueError; and 2 more", 5,
     ["raise ExceptionGroup('x', [ValueError(k) for k in range(6)])"]),
    ("ExceptionGroup", "x (2 sub-exceptions): the first is OSError: a; then KeyError; then ValueError", 5,
     ["raise ExceptionGroup('x', [ExceptionGroup('y', [OSError('a'), KeyError('b')]), ValueError('c')])"]),
    ("ExceptionGroup", f"{GROUP} (1 sub-exception): UsageError: model.encode: text is 3; use a str", 6,
     ["from inferlet import model", "async def wrong(): model.encode(3)",
      "async with asyncio.TaskGroup() as group: group.create_task(wrong())"]),
    ("RuntimeError", "no answer (from ValueError at line 2: first)", 6,
     ["try: await one()", "except ValueError as error: raise RuntimeError('no answer') from error"]),
    ("RuntimeError", "no answer", 6, ["try: await one()", "except ValueError: raise RuntimeError('no answer') from None"]),
    ("RuntimeError", "no answer", 5, ["raise RuntimeError('no answer') from ValueError('never raised')"]),
    ("ExceptionGroup", f"{GROUP} (1 sub-exception): OSError: gone (from KeyError at line 3: 'second')", 7,
     ["async def chained():", "    try: await two()", "    except KeyError as error: raise OSError('gone') from error",
      "async with asyncio.TaskGroup() as group: group.create_task(chained())"]),
    ("RuntimeError", "coroutine raised StopIteration (from StopIteration)", 5, ["next(iter([]))"]),
    ("RuntimeError", "coroutine raised StopIteration (from StopIteration: 3)", 6,
     ["from inferlet.eta import ForwardPass", "def epilogue(): raise StopIteration(3)", "ForwardPass().epilogue(epilogue)"]),
    ("ValueError", "first", 2, ["await asyncio.create_task(one())"]),
    ("ValueError", "first", 2, ["await asyncio.gather(one(), asyncio.sleep(0))"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{kind} {message[:60]}" for kind, message, _, _ in CASES])
async def test_what_a_failure_names(guest: Local, host: ScriptedHost, case: tuple[str, str, int, list[str]]) -> None:
    kind, message, line, body = case
    error = (await drive(guest, host, HEAD + "".join(f"    {part}\n" for part in body)))["e"]
    assert (error["type"], error["message"], error["line"]) == (kind, message, line)


async def test_an_error_in_a_task_that_nobody_awaits_is_logged_with_its_line(guest: Local, host: ScriptedHost) -> None:
    answer = await drive(guest, host, HEAD + "    asyncio.create_task(one(), name='lost')\n    await asyncio.sleep(0)\n    return 1\n")
    assert answer == {"s": "done", "r": 1}
    ((level, text),) = host.logs
    assert level == "error"
    assert text.startswith("Task exception was never retrieved (lost)\n")
    assert 'File "program.py", line 2, in one' in text
    assert text.endswith("ValueError: first")
