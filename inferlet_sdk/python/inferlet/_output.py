"""Outputs of an epilogue: what is awaited for a value, and refuses to be taken for it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ._loop import loop
from ._refusals import COMPARED, SHOWN, USED, refuse
from ._values import decode
from .errors import NotAwaited, NotSubmitted, UsageError, again

if TYPE_CHECKING:
    from ._forward import ForwardPass

_UNSETTLED = object()


def _unawaited(self: object, what: str) -> NotAwaited:
    return NotAwaited(f"{type(self).__name__}: {what} needs the value; await it first, for example value = await out")


def _equals(self: object, other: object) -> bool:
    """Identity, which containers need; anything else is meant for the value."""
    if self is other:
        return True
    raise NotAwaited(
        f"{type(self).__name__}: == needs the value; await it first, for example value = await out (`is` compares the objects)"
    )


def _differs(self: object, other: object) -> bool:
    return not _equals(self, other)


def _watched(self: object, callback: object, *, context: object = None) -> NoReturn:
    """What asyncio.wait asks of its futures, which it returns as they are: it needs tasks."""
    name = type(self).__name__
    raise UsageError(f"{name}: asyncio.wait takes tasks; give it asyncio.ensure_future(out), or use asyncio.gather or as_completed")


def _guarded(cls: type, *uses: Mapping[str, tuple[str, ...]]) -> None:
    """Make `cls` refuse to be used as its value. Without this `if out == 30` would silently be false, and `if out` true, for ever."""
    refuse(cls, _unawaited, *uses)
    own = {"__eq__": _equals, "__ne__": _differs, "__hash__": object.__hash__, "add_done_callback": _watched}
    for name, function in own.items():
        setattr(cls, name, function)


class Output:
    """The value of one tensor that an epilogue returns; `await` it, any number of times, for a number or nested lists."""

    __slots__ = ("__weakref__", "_error", "_pass", "_value", "_waiters", "id")

    def __init__(self, fid: int, owner: ForwardPass) -> None:
        self.id = fid
        self._pass: ForwardPass | None = owner  # until the value is there
        self._value: Any = _UNSETTLED
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return "<Output: await it>"

    def done(self) -> bool:
        """Whether awaiting would return at once."""
        return self._value is not _UNSETTLED or self._error is not None

    def __await__(self) -> Generator[Any, None, Any]:
        if self._value is _UNSETTLED and self._error is None:
            owner = self._pass
            if owner is not None and not owner.submitted:
                raise NotSubmitted("this output belongs to a ForwardPass that was never submitted; call pipe.submit(fwd) first")
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            loop.awaited[self.id] = self
            try:
                yield from waiter
            except BaseException:  # this waiter was cancelled; others may still wait
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                if not self._waiters and loop.awaited.pop(self.id, None) is not None:
                    loop.unawaited[self.id] = self
                del waiter  # it may hold the error, which holds this frame
                raise
        if self._error is not None:
            raise again(self._error)
        return self._value

    def known(self) -> Any:
        """The value, None where it is still to come. Raises what awaiting would raise at once."""
        if self._error is not None:
            raise again(self._error)
        if self._value is not _UNSETTLED:
            return self._value
        if self._pass is not None and not self._pass.submitted:
            raise NotSubmitted("this output belongs to a ForwardPass that was never submitted; call pipe.submit(fwd) first")
        return None

    def settle(self, value: Any, error: BaseException | None) -> None:
        """The host's outcome."""
        self._pass = None
        if error is None:
            self._value = decode(value)
        else:
            self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def interrupt(self, error: BaseException) -> None:
        """Fail those who wait now; awaiting again waits anew."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(again(error))


class Outputs(tuple[Output, ...]):
    """The outputs of an epilogue that returns several tensors; await each, or all at once for a tuple of values."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, tuple[Any, ...]]:
        values = []
        for out in self:
            values.append((yield from out.__await__()))
        return tuple(values)


class NoOutputs(Outputs):
    """What an epilogue that returns nothing gives: awaiting it waits for the end of the pass, for ()."""

    end: Output  # of the pass; the host is asked for it only where somebody keeps this

    def __await__(self) -> Generator[Any, None, tuple[Any, ...]]:
        yield from self.end.__await__()
        return ()


_guarded(Output, COMPARED, SHOWN, USED)
_guarded(Outputs, COMPARED, SHOWN)
