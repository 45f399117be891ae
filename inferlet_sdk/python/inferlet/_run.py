"""Runs one inferlet: executes its source, steps its loop, words its result or its failure."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import json
import linecache
import os
import random
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from pie_core.eta import Model, trace_epilogue

from . import _host, chat, model
from ._call import take_forgotten
from ._failure import Source, describe
from ._io import LogStream
from ._loop import loop
from ._stuck import interrupt
from ._values import MAX_NESTING, _short, json_fault, nested_over
from .errors import Deadlock, MainMissing, ResultNotJson

MODULE = "inferlet_main"  # the author's module; not "__main__", so that a local test block does not run

_reserve = bytearray(1 << 18)
_task: asyncio.Task[Any] | None = None
_main: Callable[[Any], Any] | None = None
_file = "inferlet.py"


def start(request: str) -> str:
    """Run the source of a start request until everything waits; the answer of docs/architecture.md, section 7."""
    global _task, _main, _file  # noqa: PLW0603  one instance runs one inferlet
    try:
        fields = json.loads(request)
        _file = str(fields.get("name") or "inferlet.py")
        sys.stdout, sys.stderr = LogStream("info"), LogStream("error")
        sys.stdin = io.StringIO()
        take_forgotten()
        random.seed(int.from_bytes(os.urandom(16)))  # the snapshot holds one state for all instances
        model._configure(fields.get("model") or {})
        chat._configure(fields.get("chat") or {})
        _main = _load(str(fields["source"]))
        _task = asyncio.Task(_call(_main, fields.get("input", {})), loop=loop, name="main")
        return _step()
    except BaseException as error:  # the boundary: whatever the author's code raises becomes an answer
        return _failed(error)


def resume(events: str) -> str:
    """Deliver settled host futures and run on; answers as `start`. Empty text before `start` only warms the instance up."""
    if not events and _task is None:
        return _warm()
    try:
        loop.resume(json.loads(events))
        return _step()
    except BaseException as error:  # the boundary, as in start
        return _failed(error)


_SAMPLE = """
import asyncio
from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input: dict) -> dict:
    tokens = [1, *range(8)]
    for _ in range(2):
        epilogue = lambda: reduce_argmax(intrinsics.output(0, "logits"))
        tokens.append(await input["future"])
    return {"epilogue": epilogue}
"""


def _warm() -> str:
    """Touch the memory that a first step touches: each page is copied at its first write, which is most of the time of a start.

    Leaves nothing behind but warm pages: no module, no ids, no host call.
    """
    scope: dict[str, Any] = {}
    exec(compile(_SAMPLE, "warm", "exec", dont_inherit=True), scope)
    future: asyncio.Future[int] = loop.create_future()
    task = asyncio.Task(scope["main"](json.loads('{"prompt": "warm", "n": [1, 2]}') | {"future": future}), loop=loop)
    loop.pump()
    future.set_result(1)
    loop.pump()
    program = trace_epilogue(task.result()["epilogue"], Model(vocab=64, hidden=8)).program
    return _host.dumps({"s": "done", "r": len(program.text)})


def _load(source: str) -> Callable[[Any], Any]:
    linecache.cache[_file] = (len(source), None, source.splitlines(keepends=True), _file)
    module = types.ModuleType(MODULE)
    module.__file__ = _file
    sys.modules[MODULE] = module
    code = compile(source, _file, "exec", dont_inherit=True)
    asyncio._set_running_loop(loop)  # handles made at module level belong to this loop
    try:
        exec(code, module.__dict__)
    finally:
        asyncio._set_running_loop(None)
    main = getattr(module, "main", None)
    if not callable(main):
        found = "no `main`" if main is None else f"`main` as {_short(main)}"
        raise MainMissing(f"{_file} defines {found}; define `async def main(input: dict) -> dict`")
    return main  # type: ignore[no-any-return]


async def _call(main: Callable[[Any], Any], value: Any) -> Any:
    result = main(value)
    return await result if inspect.isawaitable(result) else result


def _step() -> str:
    task = _task
    if task is None:
        raise RuntimeError("resume came before start")
    loop.pump()
    while not task.done():
        waiting = loop.waiting()
        if waiting:
            return f'{{"s":"pending","w":{waiting}}}'
        if not interrupt(task):
            raise _deadlock(task)
        loop.pump()
    if task.cancelled():
        raise asyncio.CancelledError("main was cancelled")
    error = task.exception()
    forgotten = take_forgotten()  # before what ends the other tasks: what they drop then does not matter
    _end_background(task)
    if error is None:
        error = forgotten
    if error is not None:
        return _failed(error)
    _close_lines()
    return f'{{"s":"done","r":{_encode(task.result())}}}'


def _encode(result: Any) -> str:
    if nested_over(result, MAX_NESTING):  # before the encoder, whose recursion would exhaust the stack
        raise ResultNotJson(f"main must return JSON nested at most {MAX_NESTING} levels deep, and result is nested deeper")
    try:
        return _host.dumps(result)
    except (TypeError, ValueError) as error:
        fault = json_fault(result, "result") or str(error)
    raise ResultNotJson(f"main must return JSON (dicts, lists, text, numbers, bools, None): {fault}")


def _deadlock(task: asyncio.Task[Any]) -> Deadlock:
    line: int | None = None
    awaitable: Any = task.get_coro()
    while awaitable is not None:  # down the chain of awaits to the author's innermost line
        frame = getattr(awaitable, "cr_frame", None)
        if frame is not None and frame.f_code.co_filename == _file:
            line = frame.f_lineno
        awaitable = getattr(awaitable, "cr_await", None)
    return Deadlock("main waits for something that no pass, message or timer will bring", line=line)


def _end_background(main: asyncio.Task[Any]) -> None:
    """Cancel what main left running and let its `finally` blocks run; log exceptions that nobody looked at."""
    if not loop.background_tasks:
        return
    for task in asyncio.all_tasks(loop):
        if task is not main:
            task.cancel()
    loop.pump()
    gc.collect()  # cheap: the snapshot is frozen; a forgotten task reports its exception when it is collected


def _close_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LogStream):
            stream.close_line()


def _failed(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        _free(error)
    try:
        _close_lines()
    except Exception as log_error:  # the log's own refusal (its budget) must not hide the author's error
        error.add_note(f"(and the log refused its last line: {log_error})")
    return f'{{"s":"failed","e":{_host.dumps(describe(error, Source(_file, _main, _call.__code__)))}}}'


def _free(error: MemoryError) -> None:
    """Make room to word a MemoryError: give up the reserve and what the author's frames hold."""
    _reserve.clear()
    traceback.clear_frames(error.__traceback__)
    module = sys.modules.get(MODULE)
    if module is not None:
        module.__dict__.clear()
    gc.collect()
