"""Counters of the engine in a plain object, and a bounded timeline of its last steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step that was read: times in seconds of the loop's clock, and what it held."""

    number: int
    submitted: float
    settled: float
    tokens: int
    passes: int


class Metrics:
    """Counted since the engine was made. Waits are seconds between a pass's acceptance and its first step."""

    __slots__ = (
        "adopted",
        "decode_tokens",
        "dropped",
        "failed_passes",
        "failed_steps",
        "lingers",
        "passes",
        "paused",
        "predicted",
        "prefill_tokens",
        "queue_wait_max",
        "queue_wait_sum",
        "reused_tokens",
        "revived",
        "skipped_passes",
        "steps",
        "timeline",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.passes = 0
        self.failed_passes = 0
        self.skipped_passes = 0
        self.decode_tokens = 0  # tokens of short passes
        self.prefill_tokens = 0
        self.reused_tokens = 0  # tokens that shared pages held, so that nothing was computed
        self.paused = 0  # working sets whose pages were given back under memory pressure, and those computed again
        self.revived = 0
        self.queue_wait_sum = 0.0
        self.queue_wait_max = 0.0
        self.lingers = 0  # lingers that ran out with a pipeline still silent
        self.predicted = 0  # passes run before they were submitted: adopted, dropped or not claimed yet
        self.adopted = 0
        self.dropped = 0
        self.timeline: deque[StepRecord] = deque(maxlen=1024)

    def waited(self, seconds: float) -> None:
        """A pass entered its first step after `seconds` in the queue."""
        self.queue_wait_sum += seconds
        self.queue_wait_max = max(self.queue_wait_max, seconds)

    def snapshot(self) -> dict[str, int | float]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "timeline"}
