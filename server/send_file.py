"""Sends one file with conditions and ranges (RFC 9110): what the page's files and the model's file have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from aiohttp import hdrs, web

from pie_server.threads import in_thread

CHUNK = 1 << 20
_ONE_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,19})-([0-9]{0,19})[ \t]*", re.ASCII | re.IGNORECASE)


class Unsatisfiable(Exception):
    """The range lies outside the file."""


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """(start, end) of a Range header, end exclusive. None means the whole file: for what is no single range of bytes the header
    counts as absent. Raises Unsatisfiable."""
    match = _ONE_RANGE.fullmatch(value.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = int(match[2])
        if length == 0 or size == 0:
            raise Unsatisfiable
        return max(0, size - length), size
    start = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < start:
        return None
    if start >= size:
        raise Unsatisfiable
    return start, min(last + 1, size)


def names_tag(header: str, etag: str, weak: bool = True) -> bool:
    """Whether a list of entity tags (or `*`) has this one. A strong comparison takes no weak tags."""
    tags = [tag.strip() for tag in header.split(",")]
    return "*" in tags or etag in (tag.removeprefix("W/") if weak else tag for tag in tags)


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


async def send_file(request: web.Request, path: Path, etag: str, headers: Mapping[str, str]) -> web.StreamResponse:
    """`path` as the answer to a GET or HEAD. `etag` is the strong tag, with its quotes, of exactly these bytes.

    A range counts only where If-Range names the tag. Raises OSError when the file cannot be opened.
    """
    asked = request.headers
    shared = {**headers, hdrs.ETAG: etag, hdrs.ACCEPT_RANGES: "bytes"}
    if hdrs.IF_MATCH in asked and not names_tag(asked[hdrs.IF_MATCH], etag, weak=False):
        return web.Response(status=412, headers=shared)
    if hdrs.IF_NONE_MATCH in asked and names_tag(asked[hdrs.IF_NONE_MATCH], etag):
        return web.Response(status=304, headers=shared)
    with await in_thread(_open, path) as file:
        size = file.seek(0, 2)
        part: tuple[int, int] | None = None
        if request.method == hdrs.METH_GET and hdrs.RANGE in asked and asked.get(hdrs.IF_RANGE, etag) == etag:
            try:
                part = parse_range(asked[hdrs.RANGE], size)
            except Unsatisfiable:
                return web.Response(status=416, headers={**shared, hdrs.CONTENT_RANGE: f"bytes */{size}"})
        start, end = part or (0, size)
        response = web.StreamResponse(status=206 if part else 200, headers=shared)
        if part:
            response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{end - 1}/{size}"
        response.content_length = end - start
        await response.prepare(request)
        if request.method == hdrs.METH_HEAD:
            return response
        file.seek(start)
        while start < end:
            data = await in_thread(file.read, min(CHUNK, end - start))
            if not data:  # the file was cut meanwhile: the client sees an answer that is too short
                raise ConnectionResetError(f"{path} became shorter while it was sent")
            await response.write(data)
            start += len(data)
        await response.write_eof()
        return response
