"""A server of one model for tests: manifest and file with ranges and a validator, as slow as asked, and a log of what was asked for."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PIECE = 1 << 18


@dataclass
class Served:
    """What is served now; change it between requests."""

    folder: Path  # of the page's files
    origin: str = ""
    content: bytes = b""
    sha256: str = ""  # what the manifest says
    etag: str = ""
    rate: float | None = None  # bytes a second, of requests from now on
    asked: list[str | None] = field(default_factory=list)  # the Range of each request for the file

    def new(self, size: int, rate: float | None = None) -> None:
        """Another file."""
        self.content, self.rate = os.urandom(size), rate
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.etag = f'"{self.sha256}"'
        self.asked.clear()


@contextmanager
def serve(folder: Path) -> Iterator[Served]:
    """At /m/manifest.json and /m/m.gguf the model, at /<name> the files of `folder`, else an empty page."""
    served = Served(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/m/manifest.json":
                size = len(served.content)
                text = json.dumps({"name": "m", "file": "m.gguf", "size": size, "sha256": served.sha256})
                self.answer(text.encode(), "application/json")
            elif self.path == "/m/m.gguf":
                self.send_file()
            elif (file := served.folder / self.path.lstrip("/")).is_file():
                self.answer(file.read_bytes(), "text/javascript")
            else:
                self.answer(b"<!doctype html><title>tests</title>", "text/html")

        def answer(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send_file(self) -> None:
            content, rate, asked = served.content, served.rate, self.headers.get("Range")
            served.asked.append(asked)
            start = 0
            if asked and self.headers.get("If-Range") in (None, served.etag):
                found = re.fullmatch(r"bytes=(\d+)-", asked)
                assert found is not None, asked
                start = int(found[1])
            self.send_response(206 if start else 200)
            self.send_header("ETag", served.etag)
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            try:
                for at in range(start, len(content), PIECE):
                    self.wfile.write(content[at : at + PIECE])
                    if rate:
                        time.sleep(PIECE / rate)
            except ConnectionError:  # the page cancelled
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.origin = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
