"""Serves the page: /hello and the files under /web, precompressed, under a strict content security policy."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from aiohttp import hdrs, web

from pie_server.build.cpu_module import BuildError
from pie_server.build.web import built_assets
from pie_server.build.web_folders import Held, hold
from pie_server.errors import ApiError
from pie_server.send_file import send_file
from pie_server.threads import in_thread

CSP = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".whl": "application/octet-stream",
    ".zip": "application/octet-stream",
}
SERVICE_WORKER = "sw.js"  # may control the whole site, though it lies under /web
HELLO = "hello.html"
_ENCODINGS = (("br", ".br"), ("gzip", ".gz"))  # the first that the client takes
TOUCH_S = 60.0  # between two notes of when the page was used last
FindAssets = Callable[[], Path | None]


class Assets:
    """The folder of built files. It is looked for once and then kept: a page never mixes two builds. Until `close`, and for as long as
    this process lives, builds of other checkouts leave it alone."""

    def __init__(self, find: FindAssets) -> None:
        self._find, self._lock = find, asyncio.Lock()
        self._held: Held | None = None
        self._used = 0.0
        self._files: dict[str, Path] = {}
        self._tags: dict[Path, str] = {}

    async def file(self, name: str) -> Path | None:
        """The file of that name in the folder. Raises ApiError when nothing is built."""
        async with self._lock:
            if self._held is None:
                try:
                    self._held, self._files = await in_thread(_take, self._find)
                except BuildError as error:
                    raise ApiError(503, f"there is no page: {error}", code="page_not_built") from None
        return self._files.get(name)

    async def used(self) -> None:
        """Somebody opens the page: its folder is in use, also to those who only see times."""
        now = time.monotonic()
        if self._held is not None and now - self._used > TOUCH_S:
            self._used = now
            await in_thread(self._held.touch)

    def close(self) -> None:
        """The folder may be removed from now on."""
        if self._held is not None:
            self._held.close()

    async def built(self) -> bool:
        """Whether there is a page."""
        try:
            return await self.file(HELLO) is not None
        except ApiError:  # why not is told where the page is asked for
            return False

    async def etag(self, path: Path) -> str:
        """The strong tag of a file's bytes."""
        if path not in self._tags:
            self._tags[path] = f'"{await in_thread(_sha256, path)}"'
        return self._tags[path]


def _take(find: FindAssets) -> tuple[Held, dict[str, Path]]:
    """The folder, held, and its files. Raises BuildError, and ApiError where there is no page in it."""
    for _ in range(3):
        folder = find()
        if folder is None:
            raise ApiError(503, "the page is not built for these sources; run `make web` and reload", code="page_not_built")
        held = hold(folder)
        if held is None:  # removed since it was found: another may be there
            continue
        files = _index(folder)
        if HELLO in files:
            return held, files
        held.close()
        break
    raise ApiError(503, f"there is no page: {folder} does not hold the files that `make web` builds", code="page_not_built")


def _index(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _redirect(request: web.Request) -> web.Response:
    query = request.rel_url.raw_query_string
    headers = {hdrs.LOCATION: f"/hello?{query}" if query else "/hello", hdrs.CACHE_CONTROL: "no-cache", hdrs.VARY: hdrs.ACCEPT}
    return web.Response(status=302, headers=headers)


def accepted(header: str) -> set[str]:
    """The codings that an Accept-Encoding header takes; identity is always taken."""
    codings = set()
    for entry in filter(str.strip, header.split(",")):
        coding, _, parameters = entry.partition(";")
        weight = parameters.replace(" ", "").lower().removeprefix("q=") or "1"
        try:
            wanted = float(weight) > 0
        except ValueError:
            wanted = False
        if wanted:
            codings.add(coding.strip().lower())
    return codings


ASSETS: web.AppKey[Assets] = web.AppKey("assets", Assets)


async def _close(app: web.Application) -> None:
    app[ASSETS].close()


def add_routes(app: web.Application, folder: Path | None = None) -> None:
    """GET /, /hello and /web/… from `folder`, by default the one built for the present sources."""
    app[ASSETS] = Assets(built_assets if folder is None else lambda: folder)
    app.on_cleanup.append(_close)

    async def send(request: web.Request, name: str) -> web.StreamResponse:
        assets = request.app[ASSETS]
        path = await assets.file(name)
        if path is None or path.suffix not in CONTENT_TYPES:
            raise web.HTTPNotFound
        headers = {
            hdrs.CONTENT_TYPE: CONTENT_TYPES[path.suffix],
            hdrs.CACHE_CONTROL: "no-cache",  # kept, and asked about: names stay the same from build to build
            hdrs.VARY: hdrs.ACCEPT_ENCODING,
            "Content-Security-Policy": CSP,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if name == SERVICE_WORKER:
            headers["Service-Worker-Allowed"] = "/"
        codings = accepted(request.headers.get(hdrs.ACCEPT_ENCODING, ""))
        for coding, suffix in _ENCODINGS:
            encoded = await assets.file(name + suffix)
            if encoded is not None and coding in codings:
                path = encoded
                headers[hdrs.CONTENT_ENCODING] = coding
                break
        try:
            return await send_file(request, path, await assets.etag(path), headers)
        except FileNotFoundError:
            raise ApiError(503, "the page's files were removed; start the server again", code="page_not_built") from None

    async def hello(request: web.Request) -> web.StreamResponse:
        """GET /hello: the page that runs an inferlet in the browser."""
        await request.app[ASSETS].used()  # before the answer: who has it may look
        return await send(request, HELLO)

    async def file(request: web.Request) -> web.StreamResponse:
        """GET /web/…: a built file of the page."""
        return await send(request, request.match_info["name"])

    async def to_hello(request: web.Request) -> web.StreamResponse:
        """GET /hello/: to /hello, with its query."""
        return _redirect(request)

    async def root(request: web.Request) -> web.StreamResponse:
        """GET /: browsers go to /hello where there is a page; others get what there is, as JSON."""
        if "text/html" in request.headers.get(hdrs.ACCEPT, "").lower() and await request.app[ASSETS].built():
            return _redirect(request)
        routes = ((route.method, route.resource) for route in request.app.router.routes())
        endpoints = [f"{method} {resource.canonical}" for method, resource in routes if resource is not None and method != hdrs.METH_HEAD]
        body = {"name": "pie", "version": version("pie-webgpu"), "endpoints": endpoints}
        return web.json_response(body, headers={hdrs.VARY: hdrs.ACCEPT, hdrs.CACHE_CONTROL: "no-cache"})

    app.router.add_get("/", root)
    app.router.add_get("/hello", hello)
    app.router.add_get("/hello/", to_hello)
    app.router.add_get("/web/{name:.+}", file)
