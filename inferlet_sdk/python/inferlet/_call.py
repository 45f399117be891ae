"""Calls of the SDK's async functions: awaited like coroutines, no values themselves, and not forgotten in silence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ._refusals import COMPARED, SHOWN, USED, refuse
from .errors import NotAwaited

P = ParamSpec("P")
T = TypeVar("T")


class Told(NamedTuple):
    """What errors say of a call: the public name of what is called, and how a program writes it."""

    name: str
    form: str


_forgotten: list[str] = []  # what is said of the first call that was dropped without being awaited


class Call(Coroutine[Any, Any, T]):
    """One call of an async function of the SDK: a coroutine. `await` it, once, or make it a task."""

    __slots__ = ("__weakref__", "_coro", "_used", "told")
    __hash__ = object.__hash__

    def __init__(self, coro: Coroutine[Any, Any, T], told: Told) -> None:
        self._coro = coro
        self.told, self._used = told, False

    def __await__(self) -> Generator[Any, None, T]:
        if self._used:  # a coroutine's own check does not see who awaits it through this object
            raise RuntimeError(f"{self.told.name}: this call was awaited already; await it once, and keep the value")
        self._used = True
        return self._coro.__await__()

    def send(self, value: Any) -> Any:
        self._used = True
        return self._coro.send(value)

    def throw(self, *error: Any) -> Any:
        self._used = True
        return self._coro.throw(*error)

    def close(self) -> None:
        self._used = True
        self._coro.close()

    def native(self) -> Coroutine[Any, Any, T]:
        """The coroutine itself, for a task, which would ask this object whether it is true to show itself."""
        self._used = True
        coro: Any = self._coro
        coro.__qualname__ = self.told.name
        return self._coro

    def __del__(self) -> None:
        if not self._used:
            self._coro.close()  # else Python warns of it, by its internal name
            if not _forgotten:
                _forgotten.append(f"{self.told.name} was called and never awaited: nothing of it was done; write {self.told.form}")

    def __eq__(self, other: object) -> bool:
        """Identity, which containers need; anything else is meant for the value."""
        if self is other:
            return True
        raise _unawaited(self, "a comparison (==)")

    def __repr__(self) -> str:
        return f"<{self.told.name}: await it>"


def asks(name: str, form: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Call[T]]]:
    """Make an async function return a Call; errors name it `name`, and say to write `form`."""
    told = Told(name, form)

    def wrapped(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Call[T]]:
        @functools.wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> Call[T]:
            return Call(function(*args, **kwargs), told)

        return getattr(inspect, "markcoroutinefunction", lambda f: f)(made)  # type: ignore[no-any-return]  # Python 3.12

    return wrapped


def take_forgotten() -> NotAwaited | None:
    """The error for the first call since the last time that nobody awaited."""
    return NotAwaited(_forgotten.pop()) if _forgotten else None


def _unawaited(self: Any, what: str) -> NotAwaited:
    return NotAwaited(f"{self.told.name} was not awaited: {what} needs its value; write value = {self.told.form}")


refuse(Call, _unawaited, COMPARED, SHOWN, USED)
