"""What is said while no request can be served: GET /health in full, and the 503 of everything that needs the engine."""

from __future__ import annotations

import math
import time
from importlib.metadata import version
from typing import Any

from aiohttp import web

from pie_server.api.backend import BACKEND, SETTINGS, Backend, Outage, Status
from pie_server.errors import ApiError

MOST_RETRY_S = 60  # what clients are told at most: the official ones take a longer time for none


def retry_after(status: Status, least: int) -> int:
    """Whole seconds after which it is worth asking again, `least` or more: what is left of the stage of loading, or of the wait for a
    rebuild and what one takes."""
    ready_at = status.progress.ends_at if status.outage is None else status.outage.ready_at
    return least if ready_at is None else max(least, min(MOST_RETRY_S, math.ceil(ready_at - time.time())))


def require_ready(backend: Backend, retry_after_s: int) -> None:
    """Raises ApiError 503 while the model loads or its lost engine is rebuilt (with Retry-After), and after loading failed (clients should
    not retry)."""
    status = backend.status
    if status.state == "loading":
        message = f"the model is loading ({status.progress.stage}); GET /health shows the progress"
        raise ApiError(503, message, code="model_loading", headers={"Retry-After": str(retry_after(status, retry_after_s))})
    if status.state == "failed":
        raise ApiError(503, f"the model could not be loaded: {status.error}", code="model_failed", headers={"X-Should-Retry": "false"})
    if status.state == "recovering":
        message = f"{status.error}; it is being rebuilt, and GET /health shows the progress"
        raise ApiError(503, message, code="engine_lost", headers={"Retry-After": str(retry_after(status, retry_after_s))})


def _outage_facts(outage: Outage) -> dict[str, Any]:
    now = time.time()
    return {
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(outage.since)),
        "down_s": round(max(0.0, now - outage.since), 1),
        "failed_rebuilds": outage.failures,
        "last_failure": outage.failure,
        "next_rebuild_s": None if outage.retry_at is None else round(max(0.0, outage.retry_at - now), 1),
    }


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 when ready; 503 with the progress while loading, with the reason after loading failed, and with both, and since
    when, while a lost engine is rebuilt."""
    backend = request.app[BACKEND]
    status = backend.status
    if status.state == "ready":
        card = backend.card
        body = {"status": "ok", "model": card.name, "device": status.device, "context": card.context, "version": version("pie-webgpu")}
        return web.json_response(body)
    if status.state == "failed":
        return web.json_response({"status": "failed", "error": status.error}, status=503)
    progress = status.progress
    stage = {"stage": progress.stage, "done": progress.done, "total": progress.total}
    least = request.app[SETTINGS].retry_after_s
    headers = {"Retry-After": str(retry_after(status, least))}
    if status.outage is None:
        return web.json_response({"status": "loading", "progress": stage}, status=503, headers=headers)
    body = {"status": "recovering", "error": status.error, **_outage_facts(status.outage), "progress": stage}
    return web.json_response(body, status=503, headers=headers)
