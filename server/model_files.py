"""Serves the model's file to pages: its manifest, and its bytes by range under the sha256 as their tag."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import hdrs, web

from pie_server.api.backend import BACKEND, Backend
from pie_server.api.openai_schema import show
from pie_server.errors import ApiError
from pie_server.file_digest import file_sha256
from pie_server.send_file import send_file
from pie_server.threads import in_thread

OWN = "default"  # stands for the served model's name
_SHARED = {"X-Content-Type-Options": "nosniff"}


class _Digests:
    """sha256 of the served file, computed by one request while the others wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def of(self, path: Path) -> str:
        async with self._lock:
            try:
                return await in_thread(file_sha256, path)
            except OSError as error:
                raise ApiError(404, f"the model's file cannot be read: {error.strerror}", code="model_file_missing") from None


def _checkpoint(backend: Backend, name: str) -> Path:
    card = backend.card
    if name not in (OWN, card.name):
        raise ApiError(404, f"this server has no model {show(name)}; it serves {show(card.name)}", code="model_not_found")
    if card.checkpoint is None:
        raise ApiError(404, f"the model {show(card.name)} has no file to be fetched", code="model_not_found")
    return card.checkpoint


def add_routes(app: web.Application) -> None:
    """GET /models/<name>/manifest.json and /models/<name>/<file>; `default` as the name stands for the served model."""
    digests = _Digests()

    async def manifest(request: web.Request) -> web.Response:
        """GET the manifest: name, file, size and sha256."""
        path = _checkpoint(request.app[BACKEND], request.match_info["name"])
        sha256 = await digests.of(path)
        body = {"name": request.app[BACKEND].card.name, "file": path.name, "size": path.stat().st_size, "sha256": sha256}
        return web.json_response(body, headers={**_SHARED, hdrs.CACHE_CONTROL: "no-cache"})

    async def file(request: web.Request) -> web.StreamResponse:
        """GET the file, whole or a range of it."""
        path = _checkpoint(request.app[BACKEND], request.match_info["name"])
        if request.match_info["file"] != path.name:
            raise web.HTTPNotFound
        headers = {
            **_SHARED,
            hdrs.CONTENT_TYPE: "application/octet-stream",
            hdrs.CACHE_CONTROL: "no-cache, no-transform",  # the page keeps its own copy; another file may come under this name
        }
        etag = f'"{await digests.of(path)}"'
        try:
            return await send_file(request, path, etag, headers)
        except FileNotFoundError:
            raise web.HTTPNotFound from None

    app.router.add_get("/models/{name}/manifest.json", manifest)
    app.router.add_get("/models/{name}/{file}", file)
