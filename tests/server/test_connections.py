"""Clients that stall, and more connections than there is room for."""

from __future__ import annotations

import asyncio
import json
import os
import re
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
from fake_backend import FakeBackend, Script

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
async def serving(
    patience: Patience, room: Room | None = None, *, script: Script = slowly, backend: FakeBackend | None = None
) -> AsyncIterator[Address]:
    app = create_app(backend or FakeBackend(script), Settings())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
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
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


POST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
STREAM = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (HEALTH, [b"HTTP/1.1 200 OK"]),
        (HEALTH.replace(b"GET", b"HEAD"), [b"HTTP/1.1 200 OK"]),
        (HEALTH.replace(b"/health", b"/nowhere"), [b"HTTP/1.1 404 Not Found"]),
        (b"garbage\r\n\r\n", [b"HTTP/1.0 400 Bad Request"]),
        (POST, [b"HTTP/1.1 200 OK"]),
        (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), [b"HTTP/1.0 200 OK"]),
        (CHUNKED, [b"HTTP/1.1 200 OK"]),
        (POST.replace(b"localhost", b"evil.example"), [b"HTTP/1.1 403 Forbidden"]),
        (POST.replace(b'"hi"', b'"h\r\n'), [b"HTTP/1.1 400 Bad Request"]),
        (HEAD + b"Expect: 100-continue\r\n" + POST.removeprefix(HEAD), [b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK"]),
        (HEALTH + POST, [b"HTTP/1.1 200 OK"] * 2),
        (POST + POST + HEALTH, [b"HTTP/1.1 200 OK"] * 3),
        (HEAD + b"Content-Length: 200\r\n\r\n{", []),  # the rest will not come
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", []),
        (POST + POST[:-1], []),
        (b"", []),
        (HEALTH[:20], []),
    ],
)
async def test_a_half_closed_connection_gets_the_answers_of_whole_requests(request_bytes: bytes, statuses: list[bytes]) -> None:
    async with serving(Patience()) as address:
        answer = await said_behind_a_half_close(address, request_bytes)
    assert re.findall(rb"HTTP/1.*", answer.replace(b"\r", b"")) == statuses
    assert answer.startswith(statuses[0] if statuses else b"")
    assert answer.count(b"}HTTP/") == max(len(statuses) - 1, 0) - statuses.count(b"HTTP/1.1 100 Continue"), "the answers are whole"


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_a_half_closed_connection_gets_its_stream(pause: float) -> None:
    async def events(payload: Mapping[str, Any], send: OnMessage) -> Any:
        for i in range(5):
            await asyncio.sleep(pause)
            await send({"i": i})
        return {}

    async with serving(Patience(), script=events) as address:
        answer = await said_behind_a_half_close(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert re.findall(rb"data: (.*)\n", answer) == [*(b'{"i":%d}' % i for i in range(5)), b"[DONE]"]


class Steps:
    """An inferlet that sends a message a step."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self, payload: Mapping[str, Any], send: OnMessage) -> Any:
        while True:
            await asyncio.sleep(0.1)
            self.taken += 1
            await send({"i": self.taken})


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 120])
async def test_a_client_that_leaves_costs_one_step_more_at_most(body: bytes, turns: int) -> None:
    """It left without a word, at any moment: what it closes looks like a half-close at first."""
    steps = Steps()
    backend = FakeBackend(steps)
    async with serving(Patience(), backend=backend) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not backend.running:
            await asyncio.sleep(0.001)
        for _ in range(turns):
            await asyncio.sleep(0.001)
        before = steps.taken
        writer.close()
        async with asyncio.timeout(5):
            while backend.running:
                await asyncio.sleep(0.001)
        assert steps.taken <= before + 1 and backend.cancelled == 1
        assert reader.at_eof() or body is STREAM


@pytest.mark.parametrize(("body", "wait"), [(BODY, 0.2), (STREAM, 0.0), (STREAM, 0.05)])
async def test_a_client_that_half_closes_and_leaves_later_is_noticed(body: bytes, wait: float) -> None:
    steps = Steps()
    backend = FakeBackend(steps)
    async with serving(Patience(), backend=backend) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.write_eof()
        async with asyncio.timeout(5):
            first = await (reader.readexactly(1) if body is BODY else reader.readuntil(b'"i":1'))
        assert b"HTTP/1.1 200".startswith(first[:12])
        await asyncio.sleep(wait)
        assert backend.running == 1
        writer.close()
        async with asyncio.timeout(5):
            while backend.running:
                await asyncio.sleep(0.001)
    assert backend.cancelled == 1


@asynccontextmanager
async def relayed(address: Address) -> AsyncIterator[Address]:
    """A relay in front of `address` that passes each half of a connection on by itself, as port forwarders do."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:  # refused: nobody is there
            other.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, onward = await asyncio.open_connection(*address)
        await asyncio.gather(pump(reader, onward, writer), pump(behind, writer, onward))
        for each in (onward, writer):
            each.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_client_that_leaves_behind_a_relay_is_noticed(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """What is sent first reaches only the relay, which learns with the next that its client is gone. A stream may learn it in a write."""
    backend = FakeBackend(Steps())
    async with serving(Patience(), backend=backend) as address, relayed(address) as front:
        _, writer = await asyncio.open_connection(*front)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not backend.running:
            await asyncio.sleep(0.001)
        writer.close()
        async with asyncio.timeout(10):
            while backend.running:
                await asyncio.sleep(0.001)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [], "it is no fault of ours"


async def test_a_half_close_passes_a_relay() -> None:
    async with serving(Patience()) as address, relayed(address) as front:
        assert (await said_behind_a_half_close(front, POST)).endswith(b'{"fine":true}')


async def test_a_half_close_in_the_middle_of_a_stream_ends_it() -> None:
    backend = FakeBackend(Steps())
    async with serving(Patience(), backend=backend) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        await reader.readuntil(b"data:")
        writer.write_eof()
        async with asyncio.timeout(5):
            assert b"[DONE]" not in await reader.read()
            while backend.running:
                await asyncio.sleep(0.001)
        writer.close()


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
from fake_backend import FakeBackend, Script
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
