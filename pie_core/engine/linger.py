"""The linger: after a step was read, wait a moment for the pipelines just answered, so that their next passes share a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pie_core.engine.metrics import Metrics

if TYPE_CHECKING:
    from pie_core.engine.pipeline import Pipeline

LONGEST = 0.003  # seconds; the bound on waiting for anybody, where steps are short
SHARE = 0.05  # of the last step: many loops that share one long step take longer to come back, and splitting them costs more
FURTHEST = 0.02  # seconds; the bound where steps are long
SHORTEST = 0.0005
_SMOOTH = 0.2


class Linger:
    """Who is expected back and until when. A pipeline that does not come back in time is silent: it is not waited for again
    until it has once come back quickly."""

    __slots__ = ("_delay", "_metrics", "deadline", "expected", "longest")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.expected: set[Pipeline] = set()
        self.deadline = 0.0
        self.longest = LONGEST
        self._delay = LONGEST / 3  # smoothed seconds between an answer and the next submit

    def stepped(self, seconds: float) -> None:
        """A step kept the device busy for so long."""
        self.longest = min(FURTHEST, max(LONGEST, SHARE * seconds))

    def answered(self, pipe: Pipeline, now: float) -> None:
        """A pass of `pipe` was answered and nothing of it is queued or in flight."""
        pipe.answered_at = now
        if not pipe.silent and not pipe.closed:
            self.expected.add(pipe)
            self.deadline = now + min(self.longest, max(SHORTEST, 3 * self._delay))

    def returned(self, pipe: Pipeline, now: float) -> None:
        """`pipe` submitted a pass."""
        if pipe.answered_at:
            delay = now - pipe.answered_at
            pipe.answered_at = 0.0
            pipe.silent = delay > self.longest
            if not pipe.silent:
                self._delay += _SMOOTH * (delay - self._delay)
            self.expected.discard(pipe)

    def forget(self, pipe: Pipeline) -> None:
        """`pipe` was closed."""
        self.expected.discard(pipe)

    def wait(self, now: float) -> float:
        """Seconds still to wait, 0 when nobody is expected or the time is up (who is late is silent from then on)."""
        if not self.expected:
            return 0.0
        left = self.deadline - now
        if left > 0:
            return left
        self._metrics.lingers += 1
        for pipe in self.expected:
            pipe.silent = True
        self._delay = min(self.longest, self._delay * 1.5)
        self.expected.clear()
        return 0.0
