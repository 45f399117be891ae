"""Says in words, at the author's line, what a sandboxed inferlet cannot do; the host would only trap."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, NoReturn


def _refuse(what: str, fix: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise PermissionError(f"{what} is not available in an inferlet; {fix}")

    return refused


def install() -> None:
    """Replace blocking and ambient calls of the standard library by ones that raise PermissionError."""
    time.sleep = _refuse("time.sleep()", "use `await inferlet.sleep(seconds)`")
    network = "it has no network of its own"
    for name in (
        "socket",
        "create_connection",
        "create_server",
        "socketpair",
        "getaddrinfo",
        "gethostbyname",
        "gethostbyname_ex",
        "getnameinfo",
    ):
        if hasattr(socket, name):
            setattr(socket, name, _refuse(f"socket.{name}()", network))
    threading.Thread.start = _refuse("threading.Thread.start()", "use `asyncio.create_task`")  # type: ignore[method-assign]
    for name in ("system", "popen", "fork", "kill", "_exit", "abort", "execv"):
        if hasattr(os, name):
            setattr(os, name, _refuse(f"os.{name}()", "an inferlet has no processes"))
