"""Typed errors of the engine. Each message is one sentence with the numbers; `fields` repeats them for machines."""

from __future__ import annotations

from typing import ClassVar


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of `error`, which somebody keeps, and of what caused it: their frames hold whoever keeps it, and often itself."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


class EngineError(Exception):
    """Base of everything the engine refuses or reports. `type_name` is what an inferlet sees as the error's type."""

    type_name: ClassVar[str] = "EngineError"

    def __init__(self, message: str, **fields: int | str | float) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __init_subclass__(cls) -> None:
        cls.type_name = cls.__name__

    def told_later(self, what: str, advice: str) -> EngineError:
        """The error of who comes behind this one, of its type and fields: `what` failed, because of this, and what to do now."""
        later = type(self)(f"{what}: {self.root().message}; {advice}", **self.fields)
        later.__cause__ = self.root()
        return later

    def again(self) -> EngineError:
        """The same error, to be raised: one that is kept must not collect the frames of everybody whom it was raised to."""
        fresh = type(self)(self.message, **self.fields)
        fresh.__cause__ = self.__cause__
        return fresh

    def kept(self) -> EngineError:
        """This, to be kept: without the frames that it and its causes were raised through."""
        forget_frames(self)
        return self

    def root(self) -> EngineError:
        """What failed first, where this one was told to somebody behind it."""
        return self.__cause__ if isinstance(self.__cause__, EngineError) else self


class InvalidPass(EngineError):
    """A forward pass was malformed: a field, its value and the fix are in the message."""


class InvalidState(EngineError):
    """A handle was used in a state that does not allow it (closed, dropped, already used)."""


class PipelineClosed(InvalidState):
    """A submit to a pipeline after its close."""


class UnsupportedGeometry(EngineError):
    """An attention geometry that this engine does not run."""


class ContextLengthExceeded(EngineError):
    """A pass would grow a sequence past the context: the model's, or what the KV cache holds."""


class OutOfPages(EngineError):
    """A pass needs more KV pages than can ever be free for it, or the pool is exhausted with nobody able to go on."""


class OutOfSlots(EngineError):
    """A pass needs more slots of recurrent state than there are, or all are taken with nobody able to go on."""


class ArenaFull(EngineError):
    """The device memory for channel cells is used up."""


class BudgetExceeded(EngineError):
    """A cap of the instance was passed."""


class ChannelError(EngineError):
    """A channel operation that its role, dtype or shape does not allow."""


class ChannelFull(ChannelError):
    """A host put into a ring without room."""


class ChannelEmpty(ChannelError):
    """A submit that needs a host-written cell which was not put, or a take that nothing can ever fill."""


class PassSkipped(EngineError):
    """The pass was cancelled whole because its pipeline had stopped."""


class InstanceClosed(EngineError):
    """The instance was closed before the result arrived."""


class PassFailed(EngineError):
    """The pass failed on the device: a NaN row, an id outside the vocabulary, or the step that it ran in."""


class SavedSetError(EngineError):
    """A working set could not be saved or opened."""


class UnknownSavedSet(SavedSetError):
    """Nothing is saved under this name."""


class SavedSetMismatch(SavedSetError):
    """The set was saved from another model, or in another layout."""


class SavedSetDamaged(SavedSetError):
    """What was saved is not whole any more."""


class SavedSetsFull(SavedSetError):
    """There is no room to save a set of this size."""


class EngineLost(EngineError):
    """The device is gone; no pass can run on this engine any more."""


class EngineStopped(EngineError):
    """The engine was stopped."""
