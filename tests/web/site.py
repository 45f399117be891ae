"""Serves folders to a browser in tests: the built page's files and bundles of the tests, from one origin, under the page's CSP."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CSP = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'"
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".json": "application/json",
    ".html": "text/html",
}


@contextmanager
def site(folders: Mapping[str, Path]) -> Iterator[str]:
    """The origin that serves `folders` by path prefix ("/web/"); any other path is an empty page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            data, kind, status = b"<!doctype html><title>tests</title>", "text/html", 200
            for prefix, folder in folders.items():
                if path.startswith(prefix):
                    file = (folder / path.removeprefix(prefix)).resolve()
                    if file.is_file() and file.is_relative_to(folder.resolve()):
                        data, kind = file.read_bytes(), TYPES.get(file.suffix, "application/octet-stream")
                    else:
                        data, status = b"", 404
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), "Content-Security-Policy": CSP}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
