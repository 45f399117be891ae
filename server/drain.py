"""The end of a server's requests: they get some seconds to finish, then each is told, while there is still time to be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from aiohttp import web

from pie_server.errors import ApiError


class Drain:
    """Counts the requests that run; `finish` waits for them and ends the rest."""

    def __init__(self) -> None:
        self.cut_off = False  # the process ends at once: what still runs is told nothing
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._scopes: set[asyncio.Timeout] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a whole request."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def stoppable(self) -> AsyncIterator[None]:
        """Around work that a stop may break off. Raises ApiError 503 then, and at once when the server is stopping already."""
        if self._stopping:
            raise _stopped("the server is shutting down and takes no new requests")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise _stopped("the server is shutting down and did not finish this request in time") from None

    async def finish(self, seconds: float) -> None:
        """Give what runs `seconds` to end, then break it off: what it answers then is for the caller to wait for."""
        self._stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        now = asyncio.get_running_loop().time()
        for scope in list(self._scopes):
            scope.reschedule(now)


def _stopped(message: str) -> ApiError:
    return ApiError(503, message, code="shutting_down", headers={"Connection": "close"})


DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
