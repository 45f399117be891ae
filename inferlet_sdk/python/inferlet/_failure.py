"""Words a failure of the author's code: type, message and the line to look at, of groups and chains too."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ._call import asks
from ._signatures import call_hint

_MAX_TEXT = 20_000  # characters of a traceback or message that leave the sandbox
_MOST_NAMED = 4  # errors of a group


class Source(NamedTuple):
    """Whose failure it is: the author's file, its `main` once there is one, and the code that calls `main`."""

    file: str
    main: Callable[..., Any] | None
    caller: CodeType


def describe(error: BaseException, source: Source) -> dict[str, Any]:
    """An exception as {"type", "message", "file", "line", "traceback"}; the line is the innermost one of the author's source, and
    that of `main` where none of it runs any more. A group (of asyncio.TaskGroup) also tells what is in it, with the line of the first."""
    message, line = _words(error, source)
    if isinstance(error, BaseExceptionGroup):
        first, *others = _leaves(error)
        told, inner = _words(first, source)
        line = inner or line
        message += f": {'the first is ' if others else ''}{type(first).__name__}: {told}"
        for other in others[: _MOST_NAMED - 1]:
            message += f"; then {type(other).__name__}{_at(_place(other, source)[0])}"
        if len(others) >= _MOST_NAMED:
            message += f"; and {len(others) - _MOST_NAMED + 1} more"
    if line is None and not isinstance(error, MemoryError):  # which may have lost its traceback, and with it another line
        line = _main_line(source)
    return {
        "type": type(error).__name__,
        "message": _cut(message),
        "file": source.file,
        "line": line,
        "traceback": _cut(_trace(error, source.file)),
    }


def _words(error: BaseException, source: Source) -> tuple[str, int | None]:
    """The message of one error, with advice and its cause, and the author's line that raised it."""
    line, frame = _place(error, source)
    if isinstance(error, SyntaxError) and error.filename == source.file:
        line, message = error.lineno, str(error.msg)
    elif isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r}) does not end an inferlet; return from main"
    elif isinstance(error, asyncio.CancelledError):
        message = str(error) or "main was cancelled"
    elif isinstance(error, MemoryError):
        message = str(error) or "the inferlet's memory limit is reached"
    else:
        message = _text(error)
    if isinstance(error, ModuleNotFoundError):
        message += "; only `inferlet` and the standard library's modules that need no operating system are there"
    if isinstance(error, NameError) and error.name == "log":  # which a star import of eta does not bring
        message += "; eta.log(x) after `from inferlet import eta` is the logarithm, `from inferlet import log` writes a log line"
    if isinstance(error, TypeError) and frame is not None:
        if frame.f_code is source.caller:
            message += "; main takes the input as its one argument: `async def main(input: dict) -> dict`"
        elif frame.f_code.co_filename == source.file:  # the call itself failed: nothing of what was called has run
            message += call_hint(message, frame.f_globals)
    cause = error.__cause__
    origin = _place(cause, source)[0] if cause is not None else None
    if cause is not None and origin is not None:  # raised by the author's code, and what to look at
        text = _text(cause)
        message += f" (from {type(cause).__name__}{_at(origin) if line else ''}{': ' if text else ''}{text})"
        line = line or origin  # a coroutine lets no StopIteration through: the error that stands for it has no line
    return message, line


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The errors in a group and in the groups in it, in order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _at(line: int | None) -> str:
    return "" if line is None else f" at line {line}"


def _place(error: BaseException, source: Source) -> tuple[int | None, FrameType | None]:
    """The innermost line of the author's source that the error passed, and the frame that raised it."""
    line, frame = getattr(error, "fields", {}).get("line"), None
    for inner, lineno in traceback.walk_tb(error.__traceback__):
        if inner.f_code.co_filename == asks.__code__.co_filename:  # wrong arguments of an async function: its caller raised it
            continue
        frame = inner
        if frame.f_code.co_filename == source.file:
            line = lineno
    return line, frame


def _main_line(source: Source) -> int | None:
    code = getattr(inspect.unwrap(source.main), "__code__", None) if source.main is not None else None
    return code.co_firstlineno if code is not None and code.co_filename == source.file else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the author's own __str__ may raise
        return f"<{type(error).__name__} whose __str__ raises {type(broken).__name__}>"


def _trace(error: BaseException, file: str) -> str:
    """The traceback from the author's first frame on."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != file:
        tb = tb.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, tb))
    except Exception as broken:  # formatting runs the author's __str__ and __repr__
        return f"{type(error).__name__} (its traceback cannot be written: {type(broken).__name__})"


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot cross the ABI
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
