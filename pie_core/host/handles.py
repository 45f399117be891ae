"""What the ids of one inferlet stand for in the engine, and why one stands for nothing."""

from __future__ import annotations

from pie_core.engine.channel import Channel
from pie_core.engine.errors import EngineError, InvalidState
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.program import Program


class Handles:
    """By id. The port has checked that an id was made and is of the right kind, so one without a thing is one that the engine refused."""

    __slots__ = ("_refused", "channels", "pipes", "programs", "sets")

    def __init__(self) -> None:
        self.sets: dict[int, WorkingSet] = {}
        self.pipes: dict[int, Pipeline] = {}
        self.channels: dict[int, Channel] = {}
        self.programs: dict[int, Program] = {}
        self._refused: dict[int, EngineError] = {}

    def set(self, key: int) -> WorkingSet:
        """A working set. Raises what the engine refused it with."""
        ws = self.sets.get(key)
        if ws is None:
            raise self._why(key, "working set")
        return ws

    def pipe(self, key: int) -> Pipeline:
        """A pipeline. Raises what the engine refused it with."""
        pipe = self.pipes.get(key)
        if pipe is None:
            raise self._why(key, "pipeline")
        return pipe

    def channel(self, key: int) -> Channel:
        """A channel. Raises what the engine refused it with."""
        channel = self.channels.get(key)
        if channel is None:
            raise self._why(key, "channel")
        return channel

    def refuse(self, key: int, error: EngineError) -> None:
        """The engine refused to make `key`, or it must not be used any more: every later use raises the error."""
        self._refused[key] = error.kept()

    def drop(self, key: int) -> WorkingSet | None:
        """A working set is not used any more; None where there was none."""
        self._refused.pop(key, None)
        return self.sets.pop(key, None)

    def drop_channel(self, key: int) -> Channel | None:
        """A channel is not used any more; None where there was none."""
        self._refused.pop(key, None)
        return self.channels.pop(key, None)

    def _why(self, key: int, kind: str) -> EngineError:
        refused = self._refused.get(key)
        return refused.again() if refused is not None else InvalidState(f"{kind} {key} does not exist")
