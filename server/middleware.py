"""What every HTTP request passes: an id, the origin rule, errors in the OpenAI shape, one log line, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from pie_core.engine.errors import forget_frames
from pie_server import metrics_timeline
from pie_server.config import Settings
from pie_server.connection import BODY_FAULTS, CODINGS, BodyTimeout, unread_coding, wrong_coding
from pie_server.drain import DRAIN
from pie_server.errors import ApiError, one_sentence
from pie_server.hosts import host_allowed
from pie_server.logs import fault, log
from pie_server.metrics import Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
LOG_FIELDS: web.RequestKey[dict[str, Any]] = web.RequestKey("log_fields", dict)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES = {"/health", "/metrics"}  # asked every few seconds by machines
CLIENT_CLOSED = 499  # status in logs and metrics when the client left before an answer was sent
CUT_OFF = 503  # when it was the server that ended before


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id where it is a plain word, else a fresh one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def error_response(error: ApiError) -> web.Response:
    """`error` as an HTTP response."""
    return web.json_response(error.body(), status=error.status, headers=error.headers)


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        hint = "; it is there when the server is started with --timeline" if request.path == metrics_timeline.PATH else ""
        return ApiError(404, f"no such endpoint: {request.method} {one_sentence(request.path)[:200]}{hint}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if error.status == 413:
        limit = request.app[BODY_LIMIT]
        return ApiError(413, f"the request body is over the limit of {limit} bytes", code="request_too_large")
    return ApiError(error.status, error.reason or "the request was refused")


BODY_LIMIT: web.AppKey[int] = web.AppKey("body_limit", int)


def _same_origin(request: web.Request, origin: str) -> bool:
    return urlsplit(origin).netloc.lower() == request.headers.get("Host", "").lower()


def _cors_headers(request: web.Request, origins: Sequence[str]) -> dict[str, str]:
    origin = request.headers.get("Origin")
    if origin is None or not ("*" in origins or origin in origins):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Vary": "Origin",
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, ETag, Content-Range",
    }


def _preflight(request: web.Request, cors: dict[str, str]) -> web.Response:
    headers = {
        **cors,
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "Content-Type"),
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)


def _check_host(request: web.Request, settings: Settings) -> None:
    for host in request.headers.getall("Host", []):
        if not host_allowed(host, settings.host, settings.allowed_hosts):
            shown = json.dumps(host[:80])
            message = f"the Host {shown} is not one of this server's; start the server with --allowed-host to serve that name"
            raise ApiError(403, message, code="host_not_allowed")


async def _answer(request: web.Request, handler: Handler, settings: Settings) -> web.StreamResponse:
    try:
        _check_host(request, settings)
    except ApiError as error:
        return error_response(error)
    origins = settings.cors_origins
    cors = _cors_headers(request, origins)
    if cors and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return _preflight(request, cors)
    origin = request.headers.get("Origin")
    try:
        # A page elsewhere on the web can send simple POSTs to a server on this machine even where it may not read the answer.
        if origin is not None and not cors and request.method not in ("GET", "HEAD", "OPTIONS") and not _same_origin(request, origin):
            raise ApiError(
                403, "requests from this web origin are not allowed; start the server with --cors-origin", code="origin_not_allowed"
            )
        if request.can_read_body and request.headers.get("Content-Encoding", "identity").strip().lower() not in CODINGS:
            raise unread_coding()  # the parser passes what it does not know on as it is
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        forget_frames(error)  # the router keeps that of an unknown path
        return error_response(_from_http(request, error))
    except BodyTimeout as error:
        return error_response(ApiError(408, str(error), code="request_timeout", headers={"Connection": "close"}))
    except BODY_FAULTS:
        coding = request.headers.get("Content-Encoding")
        if coding is not None:
            return error_response(wrong_coding(coding))
        message = "the request body cannot be read: it does not end as its head says"
        return error_response(ApiError(400, message, code="invalid_body", headers={"Connection": "close"}))
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception as error:  # the server's last boundary: a fault of one request must not take the connection's answer away
        log("request_fault", logging.ERROR, id=request[REQUEST_ID], **fault(error))
        return error_response(ApiError(500, "the server hit an internal error; its log names the place", code="internal_error"))


def observe(metrics: Metrics, settings: Settings) -> Middleware:
    """The one middleware: answers errors in shape and writes one log line and the metrics of each request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        request[REQUEST_ID] = request_id(request)
        fields: dict[str, Any] = {}
        request[LOG_FIELDS] = fields
        status = CLIENT_CLOSED
        try:
            with request.app[DRAIN].request():
                response = await _answer(request, handler, settings)
            status = response.status
            return response
        finally:
            seconds = time.perf_counter() - started
            if status == CLIENT_CLOSED and request.app[DRAIN].cut_off:
                status, fields["error"] = CUT_OFF, "cut_off"
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unmatched"
            metrics.request(request.method, route, status, seconds)
            level = logging.DEBUG if route in _PROBES else logging.INFO
            facts = {"id": request[REQUEST_ID], "method": request.method[:16], "route": route, "status": status}
            log("request", level, **facts, ms=round(seconds * 1000, 1), **fields)

    return middleware


async def stamp(request: web.Request, response: web.StreamResponse, origins: Sequence[str]) -> None:
    """Puts the request id and the CORS headers on every response before its head is sent."""
    response.headers.setdefault("X-Request-Id", request.get(REQUEST_ID, ""))
    for name, value in _cors_headers(request, origins).items():
        response.headers.setdefault(name, value)
