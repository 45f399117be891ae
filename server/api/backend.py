"""What the HTTP layer asks of the engine behind it; `service.Service` is the real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from aiohttp import web

from pie_server.config import Settings
from pie_server.metrics import Metrics

OnMessage = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Progress:
    """How far loading is: `done` of `total` (0 = unknown) in the unit of the stage (bytes, tokens). `ends_at`: when the stage is
    expected to end at the pace so far, in Unix seconds; None where nothing tells."""

    stage: str
    done: int = 0
    total: int = 0
    ends_at: float | None = None


@dataclass(frozen=True)
class ModelCard:
    """The served model as the API shows it; `created` is in Unix seconds. `checkpoint` is its file, which pages fetch."""

    name: str
    created: int
    architecture: str
    context: int
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Outage:
    """An engine that was lost, while it is rebuilt; times in Unix seconds. `since`: of the loss. `failures`: rebuilds that failed since
    then, the last with `failure`. `retry_at`: of the next try, None while one goes on. `ready_at`: when it is expected to serve again."""

    cause: str
    since: float
    ready_at: float
    failures: int = 0
    failure: str | None = None
    retry_at: float | None = None


@dataclass(frozen=True)
class Status:
    """`ready`, `loading` with its progress, `failed` with one sentence, or `recovering` from an outage."""

    state: Literal["loading", "ready", "failed", "recovering"]
    progress: Progress
    error: str | None = None
    device: Mapping[str, Any] | None = None
    outage: Outage | None = None


class InferletError(Exception):
    """An inferlet failed: the author's exception (`file` and `line` are theirs) or a limit of the sandbox or the engine."""

    def __init__(self, kind: str, message: str, file: str | None = None, line: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.file, self.line, self.traceback = kind, message, file, line, traceback

    def __str__(self) -> str:
        place = f" ({self.file}, line {self.line})" if self.file and self.line else ""
        return f"{self.kind}: {self.message}{place}" if self.message else f"{self.kind}{place}"


class Backend(Protocol):
    """One served model."""

    @property
    def status(self) -> Status: ...
    @property
    def card(self) -> ModelCard: ...
    def stats(self) -> Mapping[str, float]:
        """Counters (`*_total`) and gauges of the engine; empty while loading. Counters go on when the engine is rebuilt."""
        ...

    def timeline(self, since: int) -> Mapping[str, object]:
        """The engine's steps after number `since` as JSON values; empty while loading."""
        ...

    async def run(self, source: str, name: str, input: Mapping[str, Any], on_message: OnMessage | None = None, *, tenant: str = "") -> Any:
        """Run an inferlet to its result. `on_message` gets what it sends, in order. Only runs of one `tenant` share cached prefixes
        and saved sets. Cancelling the task ends the inferlet and frees what it held. Raises InferletError."""
        ...


BACKEND: web.AppKey[Backend] = web.AppKey("backend", object)  # type: ignore[arg-type]  # a protocol has no runtime class
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)
SETTINGS: web.AppKey[Settings] = web.AppKey("settings", Settings)
