"""Runs an API inferlet behind an HTTP request: what it sends becomes server-sent events, its result the JSON answer.

An API inferlet takes {"id", "created", "model", "request"} and returns {"body", "usage"} or {"status", "error"}.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from pie_server.api.backend import BACKEND, METRICS, SETTINGS, InferletError
from pie_server.api.readiness import retry_after
from pie_server.drain import DRAIN
from pie_server.errors import ApiError
from pie_server.logs import fault, log
from pie_server.middleware import LOG_FIELDS, REQUEST_ID

# Failures that an inferlet may leave to us, as (status, code); any other is a 500.
_STATUS = {
    "ContextLengthExceeded": (400, "context_length_exceeded"),
    "OutOfPages": (503, "kv_cache_full"),
    "OutOfSlots": (503, "kv_cache_full"),
    "ArenaFull": (503, "kv_cache_full"),
    "EngineLost": (503, "engine_lost"),
    "EngineStopped": (503, "shutting_down"),
}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def as_api_error(error: InferletError) -> ApiError:
    """The HTTP error of a failure that the inferlet did not answer itself."""
    if error.kind in _STATUS:
        status, code = _STATUS[error.kind]
        return ApiError(status, error.message, code=code, param="messages" if status == 400 else None)
    return ApiError(500, f"{error.kind}: {error.message}", code="inferlet_failed")


class EventStream:
    """Server-sent events; the response starts with the first one, so that errors before it can still have a status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def send(self, text: str) -> None:
        """One `data:` event."""
        if self.response is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(self._request)
            self.response = response
        await self.response.write(f"data: {text}\n\n".encode())

    async def send_json(self, value: Any) -> None:
        """One event holding JSON on one line."""
        await self.send(_dumps(value))


def _answer_error(result: Any) -> ApiError | None:
    if not isinstance(result, dict):
        return ApiError(500, "the API inferlet returned no answer", code="inferlet_failed")
    if "error" in result:
        return ApiError.from_body(int(result.get("status", 500)), result["error"])
    return None


def tenant_of(request: web.Request) -> str:
    """Whom a request is from: a digest of the credential it presents, "" without one. Time to first token tells whether a prefix was
    cached, so requests with different keys must not share any. A key is one and the same as a bearer token, however that is written, and
    in X-Api-Key."""
    scheme, *rest = request.headers.get("Authorization", "").split(maxsplit=1) or ("bearer",)
    if scheme.lower() == "bearer":
        presented = rest[0].strip() if rest else request.headers.get("X-Api-Key", "").strip()
    else:
        presented = " ".join((scheme.lower(), *rest)) if rest else scheme
    return hashlib.sha256(presented.encode(errors="surrogateescape")).hexdigest()[:32] if presented else ""


async def run_api(request: web.Request, source: str, name: str, payload: Mapping[str, Any], *, stream: bool) -> web.StreamResponse:
    """Answer `request` by running the inferlet. Raises ApiError while nothing has been sent; later errors become an event."""
    backend = request.app[BACKEND]
    events = EventStream(request)
    failure: ApiError | None
    result: Any = None
    try:
        async with request.app[DRAIN].stoppable():
            result = await backend.run(source, name, payload, events.send_json if stream else None, tenant=tenant_of(request))
        failure = _answer_error(result)
    except ApiError as error:  # the server stops
        failure = error
    except InferletError as error:
        failure = as_api_error(error)
        if failure.code == "engine_lost":
            failure.headers["Retry-After"] = str(retry_after(backend.status, request.app[SETTINGS].retry_after_s))
        log("inferlet_failed", logging.WARNING, id=request[REQUEST_ID], inferlet=name, type=error.kind, line=error.line)
    except ConnectionResetError:
        raise
    except Exception as error:  # once bytes are out no status can tell of a fault, so the stream itself must
        if events.response is None:
            raise
        log("request_fault", logging.ERROR, id=request[REQUEST_ID], **fault(error))
        failure = ApiError(500, "the server hit an internal error; its log names the place", code="internal_error")
    if failure is not None:
        request[LOG_FIELDS]["error"] = failure.code or failure.kind
        if events.response is None:
            try:
                raise failure
            finally:
                del failure  # whose traceback holds this frame
        await events.send_json(failure.body())
        await events.response.write_eof()
        return events.response
    usage = result.get("usage")
    if isinstance(usage, dict):
        request.app[METRICS].usage(usage)
        request[LOG_FIELDS].update({key: usage[key] for key in ("prompt_tokens", "completion_tokens") if key in usage})
        request[LOG_FIELDS].update(usage.get("prompt_tokens_details", {}))
    if not stream:
        return web.json_response(result["body"], dumps=_dumps)
    await events.send("[DONE]")
    assert events.response is not None  # send() set it
    await events.response.write_eof()
    return events.response
