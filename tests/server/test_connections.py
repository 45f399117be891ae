"""Clients that stall, and more connections than there is room for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_backend import FakeBackend

from pie_server.api.backend import OnMessage
from pie_server.app import create_app
from pie_server.config import Settings
from pie_server.connection import Patience
from pie_server.listener import Room, listen
from pie_server.logs import configure
from pie_server.serve import bind

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Address = tuple[str, int]


async def slowly(payload: Mapping[str, Any], send: OnMessage) -> Any:
    await asyncio.sleep(0.6)
    return {"body": {"fine": True}}


@asynccontextmanager
async def serving(patience: Patience, room: Room | None = None) -> AsyncIterator[Address]:
    runner = web.AppRunner(create_app(FakeBackend(slowly), Settings()), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    with bind("127.0.0.1", 0) as sock:
        address: Address = sock.getsockname()
        listener = await listen(runner, sock, patience, room)
        try:
            yield address
        finally:
            listener.close()
            await runner.cleanup()


async def said(address: Address, *parts: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to `parts` until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


async def said_behind_a_half_close(address: Address, request: bytes) -> bytes:
    """What the server answers to a client that shuts down its writing half behind its request."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    writer.write_eof()
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEALTH, b" 200 "),
        (HEALTH.replace(b"GET", b"HEAD"), b" 200 "),
        (HEALTH.replace(b"/health", b"/nowhere"), b" 404 "),
        (b"garbage\r\n\r\n", b" 400 "),
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, None),  # as one that left: its run would go on for nobody
        (HEALTH + HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, None),
        (b"", None),
        (HEALTH[:20], None),
    ],
)
async def test_a_half_closed_connection_gets_what_runs_nothing(request_bytes: bytes, status: bytes | None) -> None:
    async with serving(Patience()) as address:
        answer = await said_behind_a_half_close(address, request_bytes)
    assert (answer == b"") == (status is None)
    assert status is None or status in answer.splitlines()[0]


async def test_a_half_close_behind_earlier_requests_is_as_one_behind_the_first() -> None:
    async with serving(Patience()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert b" 400 " in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.05)  # its body has come
        writer.write(HEALTH)
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
    assert b"HTTP/1.1 200 " in answer


@pytest.mark.parametrize(
    ("patience", "parts"),
    [
        pytest.param(Patience(0.2, 60, 60), (), id="nothing"),
        pytest.param(Patience(0.2, 60, 60), (b"POST /v1/chat/comple",), id="half a head"),
        pytest.param(Patience(0.2, 60, 60), (b"GET /health HTTP/1.1\r\n", b"Host: loc", b"alhost\r\n"), id="a head by and by"),
    ],
)
async def test_who_sends_no_whole_head_is_let_go(patience: Patience, parts: tuple[bytes, ...]) -> None:
    async with serving(patience) as address:
        assert await said(address, *parts, pause=0.05) == b""


async def test_a_kept_connection_that_asks_nothing_is_let_go() -> None:
    async with serving(Patience(60, 0.2, 60)) as address:
        assert (await said(address, HEALTH)).startswith(b"HTTP/1.1 200 ")


async def test_a_second_head_that_stays_half_is_let_go() -> None:
    async with serving(Patience(0.2, 60, 60)) as address:
        assert (await said(address, HEALTH, HEALTH[:20], pause=0.1)).count(b"HTTP/1.1 200 ") == 1


async def test_half_a_body_is_a_408_in_the_error_shape() -> None:
    async with serving(Patience(60, 60, 0.2)) as address:
        answer = await said(address, HEAD + b"Content-Length: 1000\r\n\r\n", b'{"mess')
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"] == {
        "message": "no byte of the request body came for 0.2 seconds",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }


async def test_a_body_that_comes_slowly_and_an_answer_that_takes_long_are_waited_for() -> None:
    async with serving(Patience(0.3, 0.3, 0.3)) as address:
        parts = [HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode(), *(BODY[i : i + 8] for i in range(0, len(BODY), 8))]
        answer = await said(address, *parts, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"fine":true}')


async def test_those_that_wait_longest_make_room(capfd: pytest.CaptureFixture[str]) -> None:
    configure()
    async with serving(Patience(), Room(40)) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(120)]
        busy = asyncio.create_task(said(address, HEAD + f"Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY))
        silent += [await asyncio.open_connection(*address) for _ in range(60)]
        async with asyncio.timeout(5):
            assert (await said(address, HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).startswith(b"HTTP/1.1 200 ")
            assert (await busy).startswith(b"HTTP/1.1 200 "), "who is at work is not closed"
            assert await silent[0][0].read() == b"", "the oldest was closed"
        for _, writer in silent:
            writer.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "no_room_for_connections" in line]
    assert len(lines) == 1 and "40 connections are all that the limit of open files leaves" in lines[0]


async def test_where_all_are_at_work_new_ones_wait_their_turn() -> None:
    request = HEAD + f"Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    async with serving(Patience(), Room(2)) as address:
        answers = await asyncio.gather(*(said(address, request) for _ in range(4)))
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)


SERVER = """
import asyncio, resource, sys
sys.path.insert(0, sys.argv[1])
from fake_backend import FakeBackend
from pie_server import listener
from pie_server.config import Settings
from pie_server.logs import configure
from pie_server.serve import bind, serve, url_of

class Ready(FakeBackend):
    async def load(self): pass
    async def keep(self): await asyncio.Event().wait()
    async def close(self): pass

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
listener.OWN_FILES = 0  # so that the system itself refuses
configure()
with bind("127.0.0.1", 0) as sock:
    print(sock.getsockname()[1], flush=True)
    asyncio.run(serve(sock, Ready(), Settings(), lambda url: None))
"""


def test_without_descriptors_it_goes_on_and_logs_one_line() -> None:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        silent: list[socket.socket] = []
        try:
            address = ("127.0.0.1", int(process.stdout.readline()))
            silent += [socket.create_connection(address, 10) for _ in range(150)]
            with socket.create_connection(address, 10) as asking:
                asking.sendall(HEALTH)
                assert asking.recv(64).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.2)  # more lines would come
        finally:
            for one in silent:
                one.close()
            os.kill(process.pid, signal.SIGTERM)
            log = process.stderr.read()
    assert process.returncode == 0, log
    assert log.count("no_room_for_connections") == 1 and "Too many open files" in log, log
    assert len(log.splitlines()) <= 6, log
