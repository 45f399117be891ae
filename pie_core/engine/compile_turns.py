"""Whose turn it is to compile: while others are at work, one costly program between two steps, so that nobody waits for several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pie_core.engine.loop import Engine

ROOM = 0.02  # seconds of compiling between two steps that hold nobody up: small programs do not wait for each other
PATIENCE = 0.05  # seconds without a step, behind a compile: who is at work would have come back


class CompileTurns:
    """Everything runs on the engine's loop, which compiles. Who may not compile now is called again when it may."""

    __slots__ = ("_engine", "_spent", "_timer", "_waiting")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._spent = 0.0  # seconds since the last step, or since nothing has happened for a while
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer = False

    def ask(self, again: Callable[[], None]) -> bool:
        """Whether the caller may compile now; else `again` is called once, in a turn of the loop, and may ask then."""
        if self._spent < ROOM:
            return True
        self._waiting.append(again)
        self._set_timer()
        return False

    def spend(self, seconds: float) -> None:
        """A program was compiled, or refused, in so many seconds."""
        self._spent += seconds
        if self._spent >= ROOM and self._waiting:
            self._set_timer()

    def stepped(self) -> None:
        """A step was submitted: what is compiled now runs beside it."""
        self._spent = 0.0
        if self._waiting:
            self._soon()

    def rested(self) -> None:
        """Nothing can run until something happens: nobody would be held up."""
        if self._waiting:
            self._spent = 0.0
            self._soon()

    def _set_timer(self) -> None:
        if not self._timer:
            self._timer = True
            loop = self._engine.event_loop()
            if self._engine.idle():
                loop.call_soon(self._rung)
            else:
                loop.call_later(PATIENCE, self._rung)

    def _rung(self) -> None:
        self._timer = False
        self._spent = 0.0
        self._next()

    def _soon(self) -> None:
        self._engine.event_loop().call_soon(self._next)

    def _next(self) -> None:
        """Call who waits longest; the next one, too, if that left room."""
        if self._waiting and self._spent < ROOM:
            self._waiting.popleft()()
            if self._waiting:
                if self._spent < ROOM:
                    self._soon()
                else:
                    self._set_timer()
