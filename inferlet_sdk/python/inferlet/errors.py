"""Typed errors an inferlet can catch; an error of the host arrives as {"type", "message", ...} and becomes the class of that name."""

from __future__ import annotations

from typing import Any


class InferletError(Exception):
    """Base of every error the SDK and the host raise. `fields` holds the host's extra values (numbers, ids) by name."""

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class UsageError(InferletError, ValueError):
    """An argument or an order of calls is wrong; the message names the field, the value and the fix."""


class NotSubmitted(UsageError):
    """An output was awaited although its pass was never submitted, so it can never have a value."""


class AlreadySubmitted(UsageError):
    """A ForwardPass is used once; it was submitted, or changed, a second time."""


class PipelineClosed(UsageError):
    """A pass was submitted to a pipeline after close()."""


class ChannelFull(InferletError):
    """A put found no free cell in the channel's ring."""


class ChannelEmpty(InferletError):
    """A take or read can never be filled by a pass that was submitted."""


class PassSkipped(InferletError):
    """The pass was cancelled whole: its pipeline had stopped (`pipe.stop_when`) or was dropped."""


class ContextLengthExceeded(InferletError):
    """The pass would make its sequence longer than the model's context."""


class OutOfPages(InferletError):
    """The sequence can never fit into the engine's KV pages."""


class PassFailed(InferletError):
    """The pass itself failed: a NaN row, a token id outside the vocabulary, a device error."""


class BudgetExceeded(InferletError):
    """One of the inferlet's budgets (handles, outstanding passes, output) is used up."""


class ResultNotJson(InferletError, TypeError):
    """What `main` returned cannot be written as JSON; the message names the place."""


class MainMissing(InferletError):
    """The source defines no function `main(input)`."""


class Deadlock(InferletError):
    """Everything waits and nothing that is awaited can ever happen."""


_BY_NAME: dict[str, type[InferletError]] = {c.__name__: c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, InferletError)}
__all__ = sorted([*_BY_NAME, "from_wire"])


def from_wire(error: Any) -> InferletError:
    """The exception for a host's {"type", "message", ...}; a type this SDK does not know becomes a new subclass of InferletError of that name."""
    if not isinstance(error, dict):
        return InferletError(str(error))
    name = str(error.get("type", "InferletError"))
    cls = _BY_NAME.get(name)
    if cls is None:
        cls = _BY_NAME[name] = type(name, (InferletError,), {"__doc__": "An error of the host.", "__module__": __name__})
    return cls(str(error.get("message", "")), **{k: v for k, v in error.items() if k not in ("type", "message")})
