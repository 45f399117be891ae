"""GET /debug/timeline: what the engine's last steps held, as JSON for tools and the playground; only with `--timeline`.

An endpoint and not a file: it can be drawn while the server runs, costs nothing when nobody asks, and needs no place on disk.
"""

from __future__ import annotations

from aiohttp import web

from pie_server.api.backend import BACKEND
from pie_server.config import Settings
from pie_server.errors import ApiError, one_sentence

PATH = "/debug/timeline"


def _refused(message: str, param: str, code: str) -> ApiError:
    return ApiError(400, one_sentence(message), param=param, code=code)


async def timeline(request: web.Request) -> web.Response:
    """{"columns", "steps": one list a step, "most", "now"}; `?since=N` gives the steps after number N, -1 (the default) all that are kept.
    Empty while loading."""
    for name in request.query:
        if name != "since":
            raise _refused(f"the parameter {name[:40]!r} is not known here; since is the only one", name[:40], "unknown_parameter")
    text = request.query.get("since", "-1")
    try:
        since = int(text)
    except ValueError:
        since = -2
    if since < -1:
        message = f"since is {text[:40]!r}; use the number of a step, such as the last one you have, or -1 for all"
        raise _refused(message, "since", "unsupported_value")
    return web.json_response(request.app[BACKEND].timeline(since))


def add_routes(app: web.Application, settings: Settings) -> None:
    """The route, where the operator asked for it."""
    if settings.timeline:
        app.router.add_get(PATH, timeline)
