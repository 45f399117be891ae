"""Counters of the engine in a plain object, and a bounded timeline of its last steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

TIMELINE_STEPS = 1024


class StepRecord(NamedTuple):
    """One step that was read. Times are seconds of the loop's clock; `device_s` is what the device itself measured (None where it
    cannot), `busy_s` the time from when it could begin until its results were here."""

    number: int
    submitted: float
    settled: float
    busy_s: float
    device_s: float | None
    epilogue_s: float | None
    tokens: int  # rows, guessed ones included
    decode_tokens: int
    prefill_tokens: int
    reused_tokens: int  # skipped by passes that started in it, because shared pages hold them
    passes: int  # that ended with it
    guesses: int
    instances: int
    kernels: int  # epilogue launches
    queue_wait_s: float  # the longest of a pass that started in it
    pages_used: int
    pages_shared: int
    pages_cached: int
    pages_free: int  # those kept for what they hold included
    waiting: int  # passes that wait for pages
    failed: bool


class Metrics:
    """Counted since the engine was made. Waits are seconds between a pass's acceptance and its first step."""

    __slots__ = (
        "adopted",
        "busy_s",
        "decode_tokens",
        "dropped",
        "failed_passes",
        "failed_steps",
        "host_waits",
        "lingers",
        "passes",
        "paused",
        "predicted",
        "prefill_tokens",
        "queue_wait_max",
        "queue_wait_sum",
        "read_back_bytes",
        "read_backs",
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
        self.read_backs = 0  # results regions asked for, one a step: on webgpu each is a map
        self.read_back_bytes = 0
        self.host_waits = 0  # passes that were scheduled only after the one before of their pipeline was read
        self.busy_s = 0.0  # seconds in which the device had a step
        self.lingers = 0  # lingers that ran out with a pipeline still silent
        self.predicted = 0  # passes run before they were submitted: adopted, dropped or not claimed yet
        self.adopted = 0
        self.dropped = 0
        self.timeline: deque[StepRecord] = deque(maxlen=TIMELINE_STEPS)

    def waited(self, seconds: float) -> None:
        """A pass entered its first step after `seconds` in the queue."""
        self.queue_wait_sum += seconds
        self.queue_wait_max = max(self.queue_wait_max, seconds)

    def snapshot(self) -> dict[str, int | float]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "timeline"}

    def export(self, since: int = -1) -> dict[str, object]:
        """The timeline as JSON values, in columns order: steps with a number over `since`. No text of any user is in it."""
        rows = [list(record) for record in self.timeline if record.number > since]
        return {"columns": list(StepRecord._fields), "steps": rows, "most": TIMELINE_STEPS}
