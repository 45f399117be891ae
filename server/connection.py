"""One connection of the server: what cannot be parsed is answered in the error shape, and a client that stalls is not waited for."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from pie_core.engine.errors import forget_frames
from pie_server.errors import ApiError, one_sentence
from pie_server.half_closed import HalfClosed
from pie_server.logs import log, where

BODY_FAULTS = (web.RequestPayloadError, HttpProcessingError)  # raised where a body is read that its head describes wrongly

SHORT = ("GET", "HEAD")  # methods whose requests run no inferlet
CODINGS = {"identity", "gzip", "deflate", "br", "zstd"}  # of bodies; the parser refuses of these what it has no decoder for


@dataclass(frozen=True)
class Patience:
    """Seconds that a client may take: `head_s` for a whole request head, from its first byte or from the connection's start; `idle_s`
    between two requests; `body_s` without a byte of a body that was announced."""

    head_s: float = 30.0
    idle_s: float = 75.0
    body_s: float = 60.0

    @property
    def look_s(self) -> float:
        """Between two looks at all connections."""
        return min(1.0, self.head_s / 4, self.idle_s / 4, self.body_s / 4)


class BodyTimeout(web.RequestPayloadError):
    """The client stopped in the middle of a body."""


class Connection(web.RequestHandler):
    """aiohttp's connection, whose own answer to a broken request would be plain text, and a traceback in the log, and which waits an hour
    for what a client began to send. It is in `open` for as long as it lives; `look` has to be called now and then."""

    def __init__(self, server: web.Server, open: set[Connection], patience: Patience, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # the middleware writes the one line of a request
        self._all, self._patience = open, patience
        self.since = self._heard = loop.time()  # since when it waits for a head, or for the rest of one; the last byte
        self._in_head = True  # of the first request, which may come at once
        self._short = False  # none of the requests at work, or in line, has a body or runs an inferlet
        self._half: HalfClosed | None = None  # the transport, once the client said that it sends no more
        self._last_body: StreamReader | None = None  # of the requests that wait for answers
        self._answered = 0  # requests of this connection

    @property
    def idle(self) -> bool:
        """Whether no request is at work: it waits for a head, or for the rest of one."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone."""
        self._all.discard(self)
        if self._half is not None:
            self._half.end()
            self._half = None
        self._last_body = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        self._heard = self._loop.time()
        idle = self.idle
        begun = self._request_count > 0 and not idle
        super().data_received(data)
        if self._messages:  # of a broken request there is no method
            self._last_body = self._messages[-1][1]
            self._short = (self._short or not begun) and all(getattr(m, "method", "GET") in SHORT for m, _ in self._messages)
        if not idle or self.idle:
            if idle and not self._in_head:
                self._in_head, self.since = True, self._heard
            return
        self._in_head, self.since = False, self._heard

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks whether to keep the transport, aiohttp never does
        """The client shut down its writing half, or left. Requests that are whole are answered, if it takes what it is sent of the answer
        ahead; a stream that has begun ends, which could go on for minutes for nobody: who half-closes does so behind the request."""
        if self._half is not None:
            return True  # told twice, where reading was paused
        if self.idle or self.transport is None or not (self._short or self._answerable()):
            return False  # the transport closes
        if self._short:
            self.close()  # behind the answer
            return True
        self._half = HalfClosed(self.transport, self._next_unanswered)
        self.transport = cast(asyncio.Transport, self._half)
        return self._half.ask()

    def _answerable(self) -> bool:
        """Whether the last body, and so every one, is here, and no stream of a run is under way."""
        request = self._current_request
        streams = request is not None and request.method not in SHORT and request.writer.output_size > 0
        return self._last_body is not None and self._last_body.is_eof() and not streams

    def _next_unanswered(self) -> bool:
        """Whether what is sent next is the beginning of an answer. Behind the last one the connection is closed."""
        if self.idle:
            self.force_close()
        elif not self._messages:
            self.close()
        if self._request_in_progress:
            request = self._current_request  # None when its handler is done: its answer is on the way
            return request is not None and not request.writer.output_size
        return self._request_count > self._answered

    async def finish_response(self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None) -> tuple[Any, bool]:
        """Send the answer, or what is left of it."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered += 1
            if not self._messages:
                self._last_body = None

    def look(self, now: float) -> None:
        """Let the client go if it has kept the server waiting for too long at the loop's time `now`."""
        if self.idle:
            if now - self.since > (self._patience.head_s if self._in_head else self._patience.idle_s):
                self.force_close()
            return
        self.since = now
        request = self._current_request
        if request is None or self._reading_paused or self._buffer_paused:  # it is not the client that stalls
            return
        content = request.content
        if not content.is_eof() and content.exception() is None and now - self._heard > self._patience.body_s:
            content.set_exception(BodyTimeout(f"no byte of the request body came for {self._patience.body_s:g} seconds"))

    def log_exception(self, *_: Any, exc_info: object = None, **__: Any) -> None:
        """One line instead of a traceback; a body that cannot be decoded was the client's, and its answer tells of it."""
        if isinstance(exc_info, BaseException) and not isinstance(exc_info, BODY_FAULTS):
            log("connection_fault", logging.ERROR, error=where(exc_info))
        if isinstance(exc_info, BaseException):
            forget_frames(exc_info)  # a body's are kept by the body

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that no handler sees. The connection is closed after it."""
        if isinstance(exc, ConnectionResetError) and (self.transport is None or self.transport.is_closing()):
            forget_frames(exc)  # a body's
            raise ConnectionResetError("the client left") from None  # met by a write before its loss was told; no fault of ours
        known = status < 500
        level = logging.INFO if known else logging.ERROR
        log("request_refused" if known else "request_fault", level, status=status, error=where(exc) if exc is not None else None)
        if exc is not None:
            forget_frames(exc)  # the parser's, one of which holds it
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response is sent already")
        if isinstance(exc, ContentEncodingError):
            error = _bad_coding(exc.message.removeprefix("Can not decode content-encoding: "))
        elif known:
            error = ApiError(status, f"the request cannot be read: {_said(exc, message)}", code="invalid_http")
        else:
            error = ApiError(status, "the server hit an internal error", code="internal_error")
        response = web.Response(status=status, text=json.dumps(error.body()), content_type="application/json")
        response.force_close()
        return response


def unread_coding() -> ApiError:
    """The answer to a body of a Content-Encoding that nobody here reads. It has no name: the parser does not tell it."""
    text = "the request body cannot be read: its Content-Encoding is none that this server takes; send it as it is, or as gzip or deflate"
    return ApiError(400, text, code="invalid_body", headers={"Connection": "close"})


def wrong_coding(name: str) -> ApiError:
    """The answer to a body that is not in the coding that its head names."""
    text = f"the request body cannot be read: it is no {one_sentence(name)[:40]}, which its Content-Encoding names"
    return ApiError(400, text, code="invalid_body", headers={"Connection": "close"})


def _bad_coding(name: str) -> ApiError:
    return wrong_coding(name) if name in CODINGS else unread_coding()  # not the name but advice, where there is no decoder


def _said(error: BaseException | None, message: str | None) -> str:
    if isinstance(error, LineTooLong):
        return f"a line of its head is longer than {error.args[1]} bytes"
    return one_sentence((message or "").partition("\n")[0])[:200].rstrip(":") or "it is no HTTP request"
