"""The HTTP application: routes, middleware and limits around one backend."""

from __future__ import annotations

from aiohttp import web

from pie_server import metrics_timeline, model_files
from pie_server import web as page
from pie_server.api import openai
from pie_server.api.backend import BACKEND, METRICS, SETTINGS, Backend
from pie_server.api.readiness import health
from pie_server.config import Settings
from pie_server.drain import DRAIN, Drain
from pie_server.metrics import CONTENT_TYPE, Metrics
from pie_server.middleware import BODY_LIMIT, observe, stamp


async def metrics_page(request: web.Request) -> web.Response:
    """GET /metrics in the Prometheus text format."""
    return web.Response(body=request.app[METRICS].render(), headers={"Content-Type": CONTENT_TYPE})


def create_app(backend: Backend, settings: Settings) -> web.Application:
    """The application; it can serve while `backend` still loads. Starting and closing the backend is the caller's part."""
    limit = int(settings.max_body_mb * 2**20)
    metrics = Metrics(backend.stats)
    app = web.Application(middlewares=[observe(metrics, settings)], client_max_size=limit)
    app[BACKEND], app[METRICS], app[BODY_LIMIT], app[DRAIN], app[SETTINGS] = backend, metrics, limit, Drain(), settings

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        await stamp(request, response, settings.cors_origins)

    app.on_response_prepare.append(on_prepare)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics_page)
    metrics_timeline.add_routes(app, settings)
    openai.add_routes(app, settings)
    model_files.add_routes(app)
    page.add_routes(app, settings.page)
    return app
