"""After an engine is lost: what is said meanwhile, and when it is rebuilt: at once, then after longer and longer waits, for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from pie_core.engine.errors import EngineError
from pie_server.api.backend import Outage
from pie_server.errors import one_sentence
from pie_server.loading import USER_ERRORS
from pie_server.logs import fault, log

FIRST_S, MOST_S = 1.0, 60.0  # the wait before the second try, and the longest one
LASTING_S = 60.0  # a loss after so long is no sign that the next engine will be lost too
_EXPECTED: tuple[type[Exception], ...] = (*USER_ERRORS, EngineError)  # sentences about devices and files


class Backoff:
    """Waits before rebuilds: 0, 1, 2, 4 … 60 seconds; one more for a rebuild that failed, and for a loss soon after one that did not."""

    def __init__(self) -> None:
        self._tries = 0

    def lost(self, lived_s: float) -> None:
        """An engine was lost that had been ready for `lived_s` seconds."""
        if lived_s >= LASTING_S:
            self._tries = 0

    def next(self) -> float:
        """Seconds to wait before the next try."""
        tries, self._tries = self._tries, self._tries + 1
        return min(MOST_S, FIRST_S * 2.0 ** min(tries - 1, 16)) if tries else 0.0


class Recovery:
    """`drop` frees what is left of an engine, `rebuild` makes the next one ready and says what it runs on; each may be called again after
    it failed. `outage` is set from the call of `lost` until a rebuild has succeeded. All on one event loop."""

    def __init__(self, drop: Callable[[], Awaitable[None]], rebuild: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._drop, self._rebuild = drop, rebuild
        self._backoff = Backoff()
        self._happened = asyncio.Event()
        self._ready_at = 0.0  # on the monotonic clock
        self._takes_s = 1.0  # that the last start took
        self._told = ""  # the last traceback that the log has
        self.outage: Outage | None = None
        self.losses = self.rebuilds = self.failures = 0

    def ready(self, took_s: float) -> None:
        """An engine is ready, after `took_s` seconds of loading."""
        self._ready_at, self._takes_s, self.outage = time.monotonic(), took_s, None

    def lost(self, cause: str) -> None:
        """The engine that was ready is lost."""
        self.losses += 1
        self._backoff.lost(time.monotonic() - self._ready_at)
        now = time.time()
        self.outage = Outage(one_sentence(cause), now, now + self._takes_s)
        self._happened.set()

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "engine_losses_total": self.losses,
            "engine_rebuilds_total": self.rebuilds,
            "engine_rebuilds_failed_total": self.failures,
        }

    async def run(self) -> None:
        """Rebuild after each loss, until cancelled."""
        while True:
            await self._happened.wait()
            self._happened.clear()
            wait = self._backoff.next()
            outage = self._next(wait)
            log("engine_lost", logging.ERROR, error=outage.cause, losses=self.losses, rebuild_in_s=wait)
            while not await self._try(wait):
                wait = self._backoff.next()
                outage = self._next(wait)
                log("rebuild_failed", logging.ERROR, error=outage.failure, failures=outage.failures, rebuild_in_s=wait, **self._trace)

    def _next(self, wait: float) -> Outage:
        now = time.time()
        assert self.outage is not None  # `lost` set it
        self.outage = replace(self.outage, retry_at=now + wait if wait else None, ready_at=now + wait + self._takes_s)
        return self.outage

    async def _try(self, wait: float) -> bool:
        self._trace: dict[str, str] = {}
        try:
            await self._drop()  # before the wait: what is dead takes no memory meanwhile
            if wait:
                await asyncio.sleep(wait)
                self._next(0.0)
            began = time.monotonic()
            facts = await self._rebuild()
        except _EXPECTED as error:
            self._failed(str(error))
        except Exception as error:  # the boundary of a rebuild: whatever it was, the next one may go well
            found = fault(error)
            if found["traceback"] != self._told:
                self._told, self._trace = found["traceback"], {"traceback": found["traceback"]}
            self._failed(f"{type(error).__name__}: {error}")
        else:
            outage = self.outage
            assert outage is not None  # only `ready` clears it
            self.rebuilds += 1
            took = time.monotonic() - began
            self.ready(took)
            down = round(time.time() - outage.since, 2)
            log("rebuilt", failures=outage.failures, seconds=round(took, 2), down_s=down, **facts)
            return True
        return False

    def _failed(self, message: str) -> None:
        assert self.outage is not None  # only `ready` clears it
        self.failures += 1
        self.outage = replace(self.outage, failures=self.outage.failures + 1, failure=one_sentence(message))
