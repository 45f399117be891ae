"""What a guest says at the end of a step (docs/architecture.md, section 7), checked."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any, Final, Literal

from pie_core.eta.json_text import TooLarge, loads
from pie_core.host.brief import brief
from pie_core.host.ops import MAX_ID

MAX_VALUES: Final = 1 << 21  # of a result, as `loads` counts them
MAX_LISTS: Final = 1 << 18  # of these, lists and objects
MAX_PENDING: Final = 1 << 18  # characters of an answer that comes at every step: the ids of all futures that there may be, several times
_BRIEF: Final = 1 << 16  # characters that are parsed in a millisecond or two; longer ones do not keep the event loop waiting
_MAX_NAME: Final = 200  # characters of an error's type and of its file
_MAX_WORDS: Final = 1 << 16  # of its message and its traceback; the libraries of guests send less
_WAITS = re.compile(r'\{"s":"pending","w":\[([1-9][0-9]{0,15})\]\}')  # the answer of a step loop at each token

Answer = tuple[Literal["pending"], set[int]] | tuple[Literal["done"], Any]


class InferletFailed(Exception):
    """An inferlet ended without a result. `type` names the author's exception, or what the host did to it (Deadlock, Cancelled,
    a budget, a trap); file and line are the author's where they are known."""

    def __init__(self, type: str, message: str, file: str | None = None, line: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.type, self.message, self.file, self.line, self.traceback = type, message, file, line, traceback

    def __str__(self) -> str:
        place = f" ({self.file}, line {self.line})" if self.file and self.line else ""
        return f"{self.type}: {self.message}{place}"


async def read_answer(text: str) -> Answer:
    """("pending", future ids) or ("done", JSON value). Raises InferletFailed: the author's error, GuestFault for what is no answer,
    OutputLimitExceeded for one that is too large."""
    if (waits := _WAITS.fullmatch(text)) is not None:
        return "pending", {int(waits[1])}
    if len(text) > MAX_PENDING and '"pending"' in text[:64]:
        raise _too_long(text)
    try:
        if len(text) > _BRIEF and sys.platform != "emscripten":  # where there are no threads
            answer = await asyncio.to_thread(loads, text, values=MAX_VALUES, lists=MAX_LISTS)
        else:
            answer = loads(text, values=MAX_VALUES, lists=MAX_LISTS)
    except TooLarge as error:
        raise InferletFailed("OutputLimitExceeded", f"the inferlet's answer of {len(text)} characters is too large: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InferletFailed("GuestFault", f"the guest answered {brief(text, 200)}, which is not JSON: {error}") from None
    state = answer.get("s") if isinstance(answer, dict) else None
    if state == "done":
        return "done", answer.get("r")
    if state == "failed":
        raise _author_error(answer.get("e"))
    if state != "pending":
        raise InferletFailed("GuestFault", f"the guest answered {brief(answer, 200)}, which is no state of the ABI")
    if len(text) > MAX_PENDING:
        raise _too_long(text)
    waits_for = answer.get("w")
    if not isinstance(waits_for, list) or not set(map(type, waits_for)) <= {int} or not all(0 < key <= MAX_ID for key in waits_for):
        raise InferletFailed("GuestFault", f"the guest waits for {brief(waits_for, 200)}: a list of future ids is needed")
    return "pending", set(waits_for)


def _too_long(text: str) -> InferletFailed:
    return InferletFailed(
        "OutputLimitExceeded", f"the guest waits, in {len(text)} characters; an answer of a step takes at most {MAX_PENDING}"
    )


def _author_error(error: Any) -> InferletFailed:
    fields = error if isinstance(error, dict) else {}
    kind, message = fields.get("type", "Error"), fields.get("message", "")
    if not (isinstance(error, dict) and isinstance(kind, str) and isinstance(message, str)):
        return InferletFailed("GuestFault", f"the guest failed with {brief(error, 200)}, which is no error of the ABI")
    file, line, trace = fields.get("file"), fields.get("line"), fields.get("traceback")
    return InferletFailed(
        kind[:_MAX_NAME],
        _cut(message),
        file[:_MAX_NAME] if isinstance(file, str) else None,
        line if type(line) is int and 0 < line <= MAX_ID else None,
        _cut(trace) if isinstance(trace, str) else "",
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}…"
