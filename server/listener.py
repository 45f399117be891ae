"""Connections of the server: requests that cannot even be parsed are answered in the error shape, with one log line."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from pie_server.errors import ApiError, one_sentence
from pie_server.logs import log, where

BODY_FAULTS = (web.RequestPayloadError, HttpProcessingError)  # raised where a body is read that its head describes wrongly


class Connection(web.RequestHandler):
    """aiohttp's connection, whose own answer to a broken request would be plain text, and a traceback in the log."""

    def log_exception(self, *_: Any, exc_info: object = None, **__: Any) -> None:
        """One line instead of a traceback; a body that cannot be decoded was the client's, and its answer tells of it."""
        if isinstance(exc_info, BaseException) and not isinstance(exc_info, BODY_FAULTS):
            log("connection_fault", logging.ERROR, error=where(exc_info))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that no handler sees. The connection is closed after it."""
        known = status < 500
        level = logging.INFO if known else logging.ERROR
        log("request_refused" if known else "request_fault", level, status=status, error=where(exc) if exc is not None else None)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response is sent already")
        text = f"the request cannot be read: {_said(exc, message)}" if known else "the server hit an internal error"
        error = ApiError(status, text, code="invalid_http" if known else "internal_error")
        response = web.Response(status=status, text=json.dumps(error.body()), content_type="application/json")
        response.force_close()
        return response


def _said(error: BaseException | None, message: str | None) -> str:
    if isinstance(error, LineTooLong):
        return f"a line of its head is longer than {error.args[1]} bytes"
    if isinstance(error, ContentEncodingError):
        return f"it is no {one_sentence(error.message)[:40]}, which its Content-Encoding names"
    return one_sentence((message or "").partition("\n")[0])[:200].rstrip(":") or "it is no HTTP request"


async def listen(runner: web.AppRunner, sock: socket.socket) -> asyncio.Server:
    """Serve `runner`, which is set up, on a bound socket."""
    server = runner.server
    assert server is not None  # the runner was set up
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {"access_log": None}  # the middleware writes the one line of a request
    return await loop.create_server(lambda: Connection(server, loop=loop, **options), sock=sock)
