"""A backend that answers with a coroutine function of the test instead of running an inferlet: the layer below HTTP, replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pie_server.api.backend import ModelCard, OnMessage, Progress, Status

Script = Callable[[Mapping[str, Any], OnMessage], Awaitable[Any]]


async def answer_body(payload: Mapping[str, Any], send: OnMessage) -> Any:
    """Echoes the checked request."""
    return {"body": {"id": payload["id"], "request": payload["request"]}, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


class FakeBackend:
    """`running` and `cancelled` count the runs, so that a test sees what a disconnect did."""

    def __init__(self, script: Script = answer_body) -> None:
        self.script = script
        self.status = Status("ready", Progress("ready"), device={"kind": "cpu", "name": "fake"})
        self.card = ModelCard("tiny", 1_700_000_000, "llama", 512)
        self.running = 0
        self.cancelled = 0

    def stats(self) -> Mapping[str, float]:
        return {"pages_used": 7.0, "steps_total": 3.0}

    def timeline(self, since: int) -> Mapping[str, object]:
        return {"columns": ["number"], "steps": [[n] for n in range(3) if n > since], "most": 1024, "now": 1.0}

    async def run(self, source: str, name: str, input: Mapping[str, Any], on_message: OnMessage | None = None, *, tenant: str = "") -> Any:
        async def drop(_: Any) -> None:
            return None

        self.running += 1
        try:
            return await self.script(input, on_message or drop)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
