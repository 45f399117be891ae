"""What a request leaves behind, from its connection to its guest, is freed by its references: nothing waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_backend import FakeBackend

from pie_core.host.process import InferletFailed, Process
from pie_server.api.backend import InferletError
from pie_server.app import create_app
from pie_server.config import Settings
from pie_server.connection import Patience
from pie_server.listener import listen
from pie_server.sandbox import Limits, Sandbox
from pie_server.serve import bind
from pie_server.service import Service
from pie_server.threads import in_thread
from tests.engine.fake_runner import FakeRunner
from tests.engine.support import running
from tests.host.support import SERVICES, alive, nothing_older

PATIENCE_S = 10.0  # with threads that still run

Scene = Callable[[], Awaitable[None]]


def ours() -> Counter[str]:
    """What there is of what a request is made of."""
    return alive("pie_core.", "pie_server.", "wasmtime")


async def left_behind(scene: Scene, sandbox: Sandbox) -> Counter[str]:
    """What a second run of `scene` leaves that stays without the collector."""
    await scene()  # what is kept for the next one is there now
    await in_thread(sandbox.warm)
    gc.collect()
    before = ours()
    gc.disable()
    try:
        await scene()
        async with asyncio.timeout(PATIENCE_S):
            while left := ours() - before:
                await asyncio.sleep(0.02)
    except TimeoutError:
        return left
    finally:
        gc.enable()
    return left


# --- the sandbox

ENDLESS = "async def main(i):\n while True: pass"
GUESTS: dict[str, tuple[str, str | None]] = {
    "a result": ("async def main(i): return 1", None),
    "an exception": ("async def main(i): return 1 / 0", "ZeroDivisionError"),
    "a deadlock": ("import asyncio\nasync def main(i): await asyncio.Event().wait()", "Deadlock"),
    "no end": (ENDLESS, "CpuBudgetExceeded"),
    "a deep stack": (
        "import json\nasync def main(i):\n x = []\n for _ in range(10**5): x = [x]\n return x == json.loads(repr(x))",
        "StackLimitExceeded",
    ),
    "too long an answer": ("async def main(i): return ' ' * (1 << 17)", "OutputLimitExceeded"),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=Limits(step_cpu_s=0.3, text_chars=1 << 16), spares=0)
    yield made
    made.close()


@pytest.mark.parametrize(("source", "kind"), GUESTS.values(), ids=list(GUESTS))
async def test_a_guest_that_ends_in(source: str, kind: str | None, sandbox: Sandbox) -> None:
    async def scene() -> None:
        process = Process(engine, SERVICES)
        try:
            await process.run(sandbox.open(process.port), process.request(source, {}))
        except InferletFailed as error:
            assert error.type == kind
        else:
            assert kind is None

    with nothing_older():
        async with running(FakeRunner()) as engine:
            assert not await left_behind(scene, sandbox)


async def test_a_guest_that_is_closed_in_a_step(sandbox: Sandbox) -> None:
    async def scene() -> None:
        process = Process(engine, SERVICES)
        guest = sandbox.open(process.port)
        task = asyncio.ensure_future(process.run(guest, process.request(ENDLESS, {})))
        while guest._machine is None:
            await asyncio.sleep(0.002)
        process.cancel("enough")
        await asyncio.wait([task])
        assert isinstance(task.exception(), InferletFailed)
        while guest._machine is not None:
            await asyncio.sleep(0.002)

    with nothing_older():
        async with running(FakeRunner()) as engine:
            assert not await left_behind(scene, sandbox)


# --- the whole server

Address = tuple[str, int]
HELLO = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 6, "temperature": 0}
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nConnection: close\r\n"


def post(**fields: Any) -> bytes:
    """A request for a chat completion."""
    body = json.dumps({**HELLO, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def get(path: str) -> bytes:
    """A request for a path."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


# What is sent, the status that comes, and what of the answer the client reads before it leaves (None: all of it).
REQUESTS: dict[str, tuple[bytes, int, bytes | None]] = {
    "an answer": (post(), 200, None),
    "a stream": (post(stream=True), 200, None),
    "three choices": (post(stream=True, n=3, temperature=1, seed=4, top_p=0.9, logprobs=True, top_logprobs=2), 200, None),
    "left in a stream": (post(stream=True, max_tokens=400, stop="\0"), 200, b"data:"),
    "left before the answer": (post(max_tokens=400, stop="\0"), 0, b""),
    "a bad field": (post(temperature=9), 400, None),
    "no JSON": (POST + b"Content-Length: 2\r\n\r\n{]", 400, None),
    "over the context": (post(messages=[{"role": "user", "content": "hello " * 600}]), 400, None),
    "over the context, as a stream": (post(messages=[{"role": "user", "content": "hello " * 600}], stream=True), 400, None),
    "an unknown path": (get("/nowhere"), 404, None),
    "a method that is not taken": (get("/v1/chat/completions"), 405, None),
    "a foreign host": (get("/health").replace(b"localhost", b"evil.example"), 403, None),
    "no model": (post(model="other"), 404, None),
    "half a body": (POST + b"Content-Length: 200\r\n\r\n{", 0, b""),
    "a body that is not what its head says": (POST + b"Content-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnonsense", 400, None),
    "a broken chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n", 400, None),
    "an answer, half-closed": (post(), 200, None),
    "a stream, half-closed": (post(stream=True), 200, None),
    "left half-closed in a stream": (post(stream=True, max_tokens=400, stop="\0"), 200, b"data:"),
    "left half-closed before the answer": (post(max_tokens=400, stop="\0"), 0, b""),
    "no HTTP": (b"\0\1nonsense\r\n\r\n", 400, None),
    "health": (get("/health"), 200, None),
    "metrics": (get("/metrics"), 200, None),
    "the model's file": (get("/models/default/tiny.gguf"), 200, b"GGUF"),
}


FAILING = [
    "from inferlet import send\nasync def main(i):\n send('heard')\n raise ValueError('too late')",
    "from inferlet import receive\nasync def main(i): await receive()",
    "def main(i): return {1, 2}",
]


async def fails(service: Service, source: str) -> None:
    """Run an inferlet that fails, maybe behind a message."""

    async def hear(message: Any) -> None:
        assert message == "heard"

    try:
        await service.run(source, "failing.py", {}, hear)
    except InferletError:
        return
    pytest.fail("it did not fail")


async def ask(address: Address, request: bytes, status: int, until: bytes | None, half: bool) -> None:
    """Send `request`, and no more if `half`, look at the status, and read all, or up to `until`; then the connection is closed."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        if half:
            writer.write_eof()
        if status:
            assert (await reader.readline()).split()[1] == str(status).encode()
        if until is None:
            await reader.read()
        else:
            await (reader.readuntil(until) if until else asyncio.sleep(0.02))
    finally:
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Address]:
    """The server's own way from the socket to `service`."""
    runner = web.AppRunner(create_app(service, Settings()), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    with bind("127.0.0.1", 0) as sock:
        listener = await listen(runner, sock)
        try:
            yield sock.getsockname()[:2]
        finally:
            listener.close()
            await runner.cleanup()


async def test_a_request(tiny_model: Path) -> None:
    with nothing_older():
        await requests_of_all_kinds(tiny_model)


async def requests_of_all_kinds(tiny_model: Path) -> None:
    """Each of REQUESTS, at one server."""
    service = Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    await service.load()
    try:
        assert service.status.state == "ready" and service._sandbox is not None
        async with serving(service) as address:
            for name, (request, status, until) in REQUESTS.items():

                async def scene(
                    request: bytes = request, status: int = status, until: bytes | None = until, half: bool = "half-closed" in name
                ) -> None:
                    await ask(address, request, status, until, half)

                assert not await left_behind(scene, service._sandbox), name
        for source in FAILING:
            assert not await left_behind(partial(fails, service, source), service._sandbox), source
    finally:
        await service.close()


async def test_a_connection_that_was_looked_at() -> None:
    runner = web.AppRunner(create_app(FakeBackend(), Settings()), handler_cancellation=True, access_log=None)
    await runner.setup()
    with nothing_older(), bind("127.0.0.1", 0) as sock:
        listener = await listen(runner, sock, Patience(body_s=0.04))  # looks every 10 ms
        gc.disable()
        try:
            _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            await asyncio.sleep(0.1)
            assert ours()["Connection"] == 1
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                while ours()["Connection"]:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
            listener.close()
            await runner.cleanup()
