"""GET /debug/timeline: what the engine's last steps held, as JSON for tools and the playground; only with `--timeline`.

An endpoint and not a file: it can be drawn while the server runs, costs nothing when nobody asks, and needs no place on disk.
"""

from __future__ import annotations

from aiohttp import web

from pie_server.api.backend import BACKEND
from pie_server.config import Settings
from pie_server.errors import one_sentence


async def timeline(request: web.Request) -> web.Response:
    """{"columns", "steps": one list a step, "most", "now"}; `?since=N` gives the steps after number N. Empty while loading."""
    text = request.query.get("since", "-1")
    try:
        since = int(text)
    except ValueError:
        message = one_sentence(f"since is {text[:40]!r}; use the number of a step, such as the last one you have")
        error = {"message": message, "type": "invalid_request_error", "param": "since", "code": "unsupported_value"}
        return web.json_response({"error": error}, status=400)
    return web.json_response(request.app[BACKEND].timeline(since))


def add_routes(app: web.Application, settings: Settings) -> None:
    """The route, where the operator asked for it."""
    if settings.timeline:
        app.router.add_get("/debug/timeline", timeline)
