"""Typed errors an inferlet can catch; an error of the host arrives as {"type", "message", ...} and becomes the class of that name."""

from __future__ import annotations

from typing import Any


class InferletError(Exception):
    """Base of every error the SDK and the host raise. `fields` holds the host's extra values (numbers, ids) by name."""

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


def again(error: BaseException) -> BaseException:
    """The same error, to be raised: one that is kept must not collect the frames that it is raised through, which hold what keeps it."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    if isinstance(error, InferletError) and isinstance(fresh, InferletError):
        fresh.fields = error.fields
    return fresh


class UsageError(InferletError, ValueError):
    """An argument or an order of calls is wrong; the message names the field, the value and the fix."""


class NotSubmitted(UsageError):
    """An output was awaited although its pass was never submitted, so it can never have a value."""


class NotAwaited(UsageError):
    """An output or a call was used as if it were its value, or a call was never awaited; `await` gives the value."""


class AlreadySubmitted(UsageError):
    """A ForwardPass is used once; it was submitted, or changed, a second time."""


class PipelineClosed(UsageError):
    """A pass was submitted to a pipeline after close()."""


class InvalidPass(InferletError):
    """The host refused a pass: a field, its value and the fix are in the message."""


class InvalidState(InferletError):
    """A handle was used in a state that does not allow it."""


class UnsupportedGeometry(InferletError):
    """An attention geometry that this engine does not run."""


class UnsupportedStage(InferletError):
    """A stage of a pass that this engine does not run yet; only the epilogue runs."""


class ChannelError(InferletError):
    """A channel operation that the channel's ends, dtype or shape do not allow."""


class ChannelFull(ChannelError):
    """A put found no free cell in the channel's ring."""


class ChannelEmpty(ChannelError):
    """A pass needs a cell that was not put, or nothing submitted can ever fill what is taken."""


class PassSkipped(InferletError):
    """The pass was cancelled whole: its pipeline had stopped (`pipe.stop_when`)."""


class PassFailed(InferletError):
    """The pass itself failed: a NaN row, a token id outside the vocabulary, a device error."""


class ContextLengthExceeded(InferletError):
    """The pass would make its sequence longer than the model's context."""


class OutOfPages(InferletError):
    """The sequence can never fit into the engine's KV pages."""


class OutOfSlots(InferletError):
    """The pass needs more slots of recurrent state than the engine has."""


class ArenaFull(InferletError):
    """The device memory for channel cells is used up."""


class BudgetExceeded(InferletError):
    """One of the inferlet's budgets (handles, outstanding passes, output) is used up."""


class OutputLimitExceeded(InferletError):
    """One call to the host carries too much text."""


class TokenizerError(InferletError):
    """A text cannot be encoded: it is too long, or no Unicode text."""


class TemplateError(InferletError):
    """The model's chat template cannot be used."""


class TemplateRefused(TemplateError):
    """The model's chat template does not take these messages."""


class MessageError(InferletError):
    """A chat message is malformed; the message names the field."""


class SavedSetError(InferletError):
    """A working set could not be saved or opened."""


class UnknownSavedSet(SavedSetError):
    """Nothing is saved under this name."""


class SavedSetMismatch(SavedSetError):
    """The set was saved from another model."""


class SavedSetDamaged(SavedSetError):
    """What was saved is not whole any more."""


class SavedSetsFull(SavedSetError):
    """There is no room to save a set of this size."""


class EngineLost(InferletError):
    """The device is gone; no pass can run any more."""


class HostError(InferletError):
    """The host failed on its side."""


class ResultNotJson(InferletError, TypeError):
    """What `main` returned cannot be written as JSON; the message names the place."""


class MainMissing(InferletError):
    """The source defines no function `main(input)`."""


class Deadlock(InferletError):
    """Everything waits and nothing that is awaited can ever happen."""


_BY_NAME: dict[str, type[InferletError]] = {
    c.__name__: c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, InferletError)
}
__all__ = [*_BY_NAME, "from_wire"]  # noqa: PLE0604  the classes above


def from_wire(error: Any) -> InferletError:
    """The exception for a host's {"type", "message", ...}; an unknown type becomes a new subclass of InferletError."""
    if not isinstance(error, dict):
        return InferletError(str(error))
    name = str(error.get("type", "InferletError"))
    cls = _BY_NAME.get(name)
    if cls is None:
        cls = _BY_NAME[name] = type(name, (InferletError,), {"__doc__": "An error of the host.", "__module__": __name__})
    return cls(str(error.get("message", "")), **{k: v for k, v in error.items() if k not in ("type", "message")})
