"""Streams: pipelines in a decode loop, which will submit their next token any moment though they have nothing here now."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pie_core.engine.pipeline import Pipeline

ALIVE = 0.2  # seconds after its last answer in which a stream is still counted


class Streams:
    """Who was answered lately. A pipeline that stays away longer is no stream until it is answered again."""

    __slots__ = ("_answered",)

    def __init__(self) -> None:
        self._answered: dict[Pipeline, float] = {}

    def answered(self, pipe: Pipeline, now: float) -> None:
        """A short pass of `pipe` was answered."""
        self._answered[pipe] = now

    def forget(self, pipe: Pipeline) -> None:
        """`pipe` was closed."""
        self._answered.pop(pipe, None)

    def count(self, now: float) -> int:
        """Streams now."""
        self._age(now)
        return len(self._answered)

    def away(self, now: float) -> bool:
        """Whether a stream has nothing queued and nothing in flight."""
        self._age(now)
        return any(not pipe.queue and not pipe.flying for pipe in self._answered)

    def _age(self, now: float) -> None:
        answered = self._answered
        for pipe in [pipe for pipe, then in answered.items() if now - then > ALIVE]:
            del answered[pipe]
