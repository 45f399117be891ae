"""The server process's life: binding, loading in the background, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_backend import FakeBackend

import pie_server.web
from pie_server.api.backend import OnMessage, Progress, Status
from pie_server.build.cpu_module import BuildError
from pie_server.config import Settings, load_settings
from pie_server.errors import UserError
from pie_server.logs import configure
from pie_server.serve import bind, serve, url_of

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


class SlowBackend(FakeBackend):
    """Loads until told otherwise."""

    def __init__(self, outcome: Status | None = None) -> None:
        super().__init__(self._forever)
        self.ready = self.status
        self.status = Status("loading", Progress("weights"))
        self.outcome = outcome
        self.go_on = asyncio.Event()
        self.closed = False

    async def _forever(self, payload: Mapping[str, Any], send: OnMessage) -> Any:
        await asyncio.sleep(60)

    async def load(self) -> None:
        await self.go_on.wait()
        self.status = self.outcome or self.ready

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def status_of(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return response.status


async def test_listens_while_loading_and_ends_on_sigterm() -> None:
    backend, ready = SlowBackend(), []
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        running = asyncio.create_task(serve(sock, backend, Settings(shutdown_s=0.2), ready.append))
        async with asyncio.timeout(5):
            assert await status_of(url) == 503
            backend.go_on.set()
            await until(lambda: ready)
            assert ready == [url]
            assert await status_of(url) == 200
            async with aiohttp.ClientSession() as session:
                request = asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=HELLO))
                await until(lambda: backend.running == 1)
                os.kill(os.getpid(), signal.SIGTERM)
                await running
                assert (backend.running, backend.cancelled, backend.closed) == (0, 1, True)
                assert (await request).status == 503


class Endless(SlowBackend):
    """Answers that never end."""

    async def _forever(self, payload: Mapping[str, Any], send: OnMessage) -> Any:
        while True:
            await send({"i": 0})
            await asyncio.sleep(0.01)


async def test_a_stop_is_told_to_streams_and_whole_requests_within_its_time() -> None:
    backend = Endless()
    backend.go_on.set()
    with bind("127.0.0.1", 0) as sock:
        chat = f"{url_of(sock)}/v1/chat/completions"
        running = asyncio.create_task(serve(sock, backend, Settings(shutdown_s=1), lambda _: None))
        await until(lambda: backend.status.state == "ready")

        async def ask(stream: bool) -> tuple[int, str]:
            async with aiohttp.ClientSession() as session, session.post(chat, json={**HELLO, "stream": stream}) as response:
                return response.status, await response.text()

        whole, stream = asyncio.create_task(ask(False)), asyncio.create_task(ask(True))
        await until(lambda: backend.running == 2)
        began = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await running
            assert 0.5 < asyncio.get_running_loop().time() - began < 1.3
            status, text = await whole
            assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
            status, text = await stream
    last = text.rstrip().split("\n\n")[-1].removeprefix("data: ")
    assert (status, json.loads(last)["error"]["code"]) == (200, "shutting_down")


INTERRUPTED = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pie_server.config import Settings
from pie_server.logs import configure
from pie_server.serve import bind, serve
from test_serve import Endless

configure()
backend = Endless()
backend.go_on.set()
with bind("127.0.0.1", 0) as sock:
    asyncio.run(serve(sock, backend, Settings(shutdown_s=30), lambda url: print(url, flush=True)))
"""


async def test_what_a_second_interrupt_cuts_off_is_not_called_the_clients_doing() -> None:
    command = (sys.executable, "-c", INTERRUPTED, str(Path(__file__).parent))
    pipe = asyncio.subprocess.PIPE
    async with asyncio.timeout(60):
        server = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert server.stdout is not None and server.stderr is not None
        lines: list[str] = []

        async def logged(*words: str) -> None:
            while not any(all(word in line for word in words) for line in lines):
                read = await server.stderr.readline()  # type: ignore[union-attr]
                assert read, f"{words} in none of {lines}"
                lines.append(read.decode())

        try:
            url = (await server.stdout.readline()).decode().strip()
            chat = f"{url}/v1/chat/completions"
            async with aiohttp.ClientSession() as session:
                async with session.post(chat, json={**HELLO, "stream": True}) as left:
                    await left.content.readany()
                await logged(" request ", " status=499 ")  # this one was the client's
                async with session.post(chat, json={**HELLO, "stream": True}) as cut:
                    await cut.content.readany()
                    server.send_signal(signal.SIGINT)
                    await logged(" stopping ")
                    server.send_signal(signal.SIGINT)
                    await logged(" request ", " status=503 ", " error=cut_off")
                    await logged(" stopped_at_once ", 'reason="a second SIGINT"')
            await server.stderr.read()
            assert await server.wait() == -signal.SIGINT  # of a bare KeyboardInterrupt; `pie` makes it 130
        finally:
            if server.returncode is None:
                server.kill()
                await server.wait()


def no_page() -> Path | None:
    raise BuildError("there are no sources")


def half_written() -> Path | None:
    raise SyntaxError("of a source that is being edited")


@pytest.mark.parametrize("found", ["built", "not built", "not buildable", "half-written"])
async def test_the_page_is_named_where_there_is_one(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hello.html").write_text("<!doctype html>")
    finds = {"built": lambda: tmp_path, "not built": lambda: None, "not buildable": no_page, "half-written": half_written}
    monkeypatch.setattr(pie_server.web, "built_assets", finds[found])
    backend = SlowBackend()
    backend.go_on.set()
    told: list[str] = []
    kept = asyncio.Event()

    async def keep() -> None:
        kept.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "keep", keep)
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        running = asyncio.create_task(serve(sock, backend, Settings(), lambda url: told.append(f"ready {url}"), told.append))
        async with asyncio.timeout(5):
            await kept.wait()
            async with aiohttp.ClientSession() as session, session.get(f"{url}/hello") as response:
                assert (response.status == 200) == (found == "built")
            os.kill(os.getpid(), signal.SIGTERM)
            await running
    assert told == [f"ready {url}", *([url] if found == "built" else [])]


async def test_a_stop_waits_no_longer_than_for_the_last_request() -> None:
    class Brief(SlowBackend):
        async def _forever(self, payload: Mapping[str, Any], send: OnMessage) -> Any:
            await asyncio.sleep(0.2)
            return {"body": {"fine": True}}

    backend = Brief()
    backend.go_on.set()
    with bind("127.0.0.1", 0) as sock:
        running = asyncio.create_task(serve(sock, backend, Settings(shutdown_s=30), lambda _: None))
        await until(lambda: backend.status.state == "ready")
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(f"{url_of(sock)}/v1/chat/completions", json=HELLO))
            await until(lambda: backend.running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(3):
                assert (await request).status == 200
                await running


JUNK = b'{"messages": 1}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 15\r\n"
NO_CODING = "its Content-Encoding is none that this server takes; send it as it is, or as gzip or deflate"


@pytest.mark.parametrize(
    ("request_bytes", "match"),
    [
        (POST + b"Content-Encoding: gzip\r\n\r\n" + JUNK, "it is no gzip, which its Content-Encoding names"),
        (POST + b"Content-Encoding: deflate\r\n\r\n" + JUNK, "it is no deflate"),
        *(
            (POST + b"Content-Encoding: " + name + b"\r\n\r\n" + JUNK, NO_CODING)
            for name in (b"br", b"zstd", b"foo", b"gzip, gzip", b"ZSTD")
        ),
        (POST + b"X: " + b"a" * 20_000 + b"\r\n\r\n" + JUNK, "a line of its head is longer than 8190 bytes"),
        (b"garbage\r\n\r\n", "the request cannot be read"),
    ],
)
async def test_what_cannot_be_read_is_a_400_and_at_most_one_line_without_a_traceback(
    request_bytes: bytes, match: str, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = SlowBackend()
    backend.go_on.set()
    configure()
    with bind("127.0.0.1", 0) as sock:
        running = asyncio.create_task(serve(sock, backend, Settings(), lambda _: None))
        await until(lambda: backend.status.state == "ready")
        capfd.readouterr()
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(request_bytes)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        assert len(capfd.readouterr().err.splitlines()) <= 1
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert b" 400 " in head.splitlines()[0]
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and match in error["message"]
    assert error["code"] == ("invalid_body" if "Content-Encoding" in match or "deflate" in match else "invalid_http")


async def test_a_signal_while_loading_ends_at_once() -> None:
    backend = SlowBackend()
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        running = asyncio.create_task(serve(sock, backend, Settings(), lambda _: None))
        assert await status_of(url) == 503
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(2):
            await running
    assert backend.closed


async def test_a_failed_load_is_told_by_health() -> None:
    backend = SlowBackend(Status("failed", Progress("weights"), error="no memory"))
    backend.go_on.set()
    with bind("127.0.0.1", 0) as sock:
        running = asyncio.create_task(serve(sock, backend, Settings(), lambda _: None))
        await until(lambda: backend.status.state == "failed")
        async with aiohttp.ClientSession() as session, session.get(f"{url_of(sock)}/health") as response:
            assert response.status == 503
            assert await response.json() == {"status": "failed", "error": "no memory"}
        os.kill(os.getpid(), signal.SIGTERM)
        await running


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_one_sentence() -> None:
    with pytest.raises(UserError, match="not known"):
        bind("no.such.host.invalid", 8080)
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 8080)


def test_settings_come_from_flags_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_PORT", "9000")
    monkeypatch.setenv("PIE_CORS_ORIGINS", "https://a.example, https://b.example")
    monkeypatch.setenv("PIE_CACHE", "/somewhere")
    settings = load_settings(host="0.0.0.0", port=None)
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)
    assert settings.cors_origins == ["https://a.example", "https://b.example"]
    assert load_settings(port=1).port == 1


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"port": 70_000}, r"^--port \(or PIE_PORT\) is '70000'; use a whole number from 0 to 65535$"),
        ({"kv_pool_mb": 0}, r"^--kv-pool-mb \(or PIE_KV_POOL_MB\) is '0'; use a whole number from 1 to 1048576$"),
        ({"device": "tpu"}, "--device.* is 'tpu'; use one of auto, cpu, webgpu"),
        *(
            ({"cors_origins": [origin]}, f"^--cors-origin \\(or PIE_CORS_ORIGINS\\) is '{origin}'; use an origin such as https://")
            for origin in ("example.com", "localhost:3000", "https://a.example/path", "https://", "https://a:x", "https://u@a.example", "")
        ),
        *(
            ({"allowed_hosts": [host]}, f"^--allowed-host \\(or PIE_ALLOWED_HOSTS\\) is '{host}'; use a bare host name")
            for host in ("http://foo/", "foo:8080", "foo/bar", "b a", "")
        ),
        ({"prewarm": ["a.json", ""]}, r"^--prewarm \(or PIE_PREWARM\) is ''; use the path of a JSON file"),
        ({"max_body_mb": float("nan")}, "--max-body-mb.* is 'nan'; use a number above 0 and at most 1024"),
    ],
)
def test_bad_settings_name_flag_variable_and_value(flags: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_settings(**flags)


def test_hosts_and_origins_are_kept_as_requests_name_them() -> None:
    settings = load_settings(
        cors_origins=["HTTPS://A.Example:443/", "http://localhost:3000", "http://[::1]:80", "*", "null", "app://main"],
        allowed_hosts=["Pie.Example.", "[::1]", "10.0.0.1", "*", "my_box"],
    )
    assert settings.cors_origins == ["https://a.example", "http://localhost:3000", "http://[::1]", "*", "null", "app://main"]
    assert settings.allowed_hosts == ["pie.example", "::1", "10.0.0.1", "*", "my_box"]


def test_a_bad_setting_of_the_environment_names_the_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_PORT", "many")
    with pytest.raises(UserError, match=r"^PIE_PORT \(or --port\) is 'many'; use a whole number"):
        load_settings()


def test_log_lines_are_for_servers_only() -> None:
    """A command that configured no log says in a sentence what there is to say; an event's bare name would mean nothing."""
    code = "import logging; from pie_server.logs import log; log('load_fault', logging.ERROR, error='KeyError')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
