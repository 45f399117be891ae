"""Runs the server process: binds first, loads the model meanwhile, ends cleanly on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Protocol

from aiohttp import web

from pie_server.api.backend import Backend
from pie_server.app import create_app
from pie_server.config import Settings
from pie_server.drain import DRAIN, Drain
from pie_server.errors import UserError
from pie_server.listener import listen
from pie_server.logs import log, where
from pie_server.web import ASSETS, Assets

LEAST_TELLING_S, MOST_TELLING_S = 0.2, 1.0  # time for the last answers, within shutdown_s where that is longer
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LoadingBackend(Backend, Protocol):
    """A backend with a life: `load` ends with a status of ready or failed and does not raise for what users can cause; `keep` goes on for
    ever and makes it ready again after a loss."""

    async def load(self) -> None: ...
    async def keep(self) -> None: ...
    async def close(self) -> None: ...


def _bind_error(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} on {host} is in use by another program; stop it or choose another port with --port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(f"port {port} on {host} may not be opened by this user; choose a port over 1023 with --port")
    return UserError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is known before anything is loaded. Raises UserError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as err:
        raise UserError(f"the host {host!r} is not known; use an address of this machine such as 127.0.0.1 or 0.0.0.0") from err
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(256)
        sock.setblocking(False)
    except OSError as err:
        sock.close()
        raise _bind_error(host, port, err) from err
    return sock


def url_of(sock: socket.socket) -> str:
    """The http:// address of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _until_signal() -> str:
    """The name of the first SIGTERM or SIGINT; a second one then has its default effect."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[str] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not arrived.done():
            arrived.set_result(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, note, number)
    try:
        return await arrived
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _interrupted_again(drain: Drain) -> Iterator[None]:
    """A second SIGINT has its default effect in here, and the log says which requests that cut off."""

    def note(number: int, frame: FrameType | None) -> None:
        drain.cut_off = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if drain.cut_off:
            log("stopped_at_once", reason="a second SIGINT")


async def serve(
    sock: socket.socket,
    backend: LoadingBackend,
    settings: Settings,
    on_ready: Callable[[str], None],
    on_page: Callable[[str], None] | None = None,
) -> None:
    """Serve `backend` on `sock` until a signal comes. `on_ready` gets the server's address once the model has loaded; then `on_page` gets
    it, where the page is built.

    Requests that run when the signal comes have `settings.shutdown_s` seconds; who is not done shortly before is told so.
    """
    app = create_app(backend, settings)
    telling = min(MOST_TELLING_S, max(LEAST_TELLING_S, settings.shutdown_s / 10))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=telling / 2)
    await runner.setup()
    try:
        server = await listen(runner, sock)
        url = url_of(sock)
        log("listening", address=url)
        loading = asyncio.create_task(_load(backend, url, on_ready, lambda: _tell_page(app[ASSETS], url, on_page)))
        reason = await _until_signal()
        with _interrupted_again(app[DRAIN]):
            log("stopping", reason=reason)
            server.close()
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            await app[DRAIN].finish(max(0.0, settings.shutdown_s - telling))
    finally:
        await runner.cleanup()  # waits twice at most `shutdown_timeout`: for answers, and for who does not read them
        await backend.close()


async def _tell_page(assets: Assets, url: str, on_page: Callable[[str], None] | None) -> None:
    try:
        if on_page is not None and await assets.built():
            on_page(url)
    except (OSError, SyntaxError) as error:  # of sources that are being edited: no reason to stop
        log("page_not_found", logging.WARNING, error=where(error))


async def _load(
    backend: LoadingBackend, url: str, on_ready: Callable[[str], None], tell_page: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    await backend.load()
    status = backend.status
    if status.state == "ready":
        log("ready", model=backend.card.name, **{f"device_{key}": value for key, value in (status.device or {}).items()})
        on_ready(url)
        await asyncio.gather(backend.keep(), tell_page())
    else:
        log("load_failed", logging.ERROR, error=status.error)
