"""The HTTP layer over a scripted backend: shapes of answers and errors, limits, disconnects."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_backend import FakeBackend, Script

from pie_server.api.backend import InferletError, OnMessage, Progress, Status
from pie_server.app import create_app
from pie_server.config import Settings

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def serving(backend: FakeBackend, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    runner = web.AppRunner(create_app(backend, Settings(**settings)), handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield session
    finally:
        await runner.cleanup()


async def chat(session: aiohttp.ClientSession, body: Any = None, **changes: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    async with session.post(CHAT, json={**HELLO, **changes} if body is None else body) as response:
        return response.status, await response.json(), response.headers


async def until(condition: Any, seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def assert_error_shape(body: dict[str, Any]) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]


async def test_answers_with_the_body_of_the_inferlet_and_passes_the_checked_request() -> None:
    async with serving(FakeBackend()) as session:
        status, body, headers = await chat(session, temperature=0)
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["request"]["messages"] == [{"role": "user", "content": "hi"}]
    assert body["request"]["temperature"] == 0.0
    assert headers["X-Request-Id"].startswith("req_")


async def test_request_id_of_the_client_is_kept_only_when_it_is_a_plain_word() -> None:
    async with serving(FakeBackend()) as session:
        async with session.get("/health", headers={"X-Request-Id": "abc-1"}) as response:
            assert response.headers["X-Request-Id"] == "abc-1"
        async with session.get("/health", headers={"X-Request-Id": "a b=c"}) as response:
            assert response.headers["X-Request-Id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "code"),
    [
        ("GET", "/nowhere", None, 404, "unknown_url"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", None, 404, "model_not_found"),
        ("POST", CHAT, b"", 400, "invalid_json"),
        ("POST", CHAT, b"{", 400, "invalid_json"),
        ("POST", CHAT, b"\xff{}", 400, "invalid_json"),
        ("POST", CHAT, b"[" * 200_000, 400, "invalid_json"),
        ("POST", CHAT, b'{"seed": ' + b"1" * 5_000 + b"}", 400, "invalid_json"),
        ("POST", CHAT, b'{"temperature": NaN}', 400, "invalid_json"),
        ("POST", CHAT, b"[1]", 400, None),
        ("POST", CHAT, b"x" * 2_000_000, 413, "request_too_large"),
        ("POST", CHAT, json.dumps({**HELLO, "model": "gpt-4o"}).encode(), 404, "model_not_found"),
    ],
)
async def test_every_refusal_has_the_openai_error_shape(method: str, path: str, data: bytes | None, status: int, code: str | None) -> None:
    async with (
        serving(FakeBackend(), max_body_mb=1) as session,
        session.request(method, path, data=None if data is None else io.BytesIO(data)) as response,
    ):
        assert response.status == status
        error = assert_error_shape(await response.json())
        assert error["code"] == code
        assert error["type"] == "invalid_request_error"
        if status == 405:
            assert response.headers["Allow"]


async def test_models() -> None:
    async with serving(FakeBackend()) as session:
        async with session.get("/v1/models") as response:
            listed = await response.json()
        async with session.get("/v1/models/tiny") as response:
            assert await response.json() == listed["data"][0]
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["object"] == "model"


async def test_health_and_chat_while_loading_and_after_a_failure() -> None:
    backend = FakeBackend()
    backend.status = Status("loading", Progress("weights", 5, 10))
    async with serving(backend, retry_after_s=7) as session:
        async with session.get("/health") as response:
            assert response.status == 503
            assert await response.json() == {"status": "loading", "progress": {"stage": "weights", "done": 5, "total": 10}}
        status, body, headers = await chat(session)
        assert (status, headers["Retry-After"]) == (503, "7")
        assert assert_error_shape(body)["code"] == "model_loading"

        for left_s, told in ((25.0, "25"), (3.0, "7"), (900.0, "60")):
            backend.status = Status("loading", Progress("weights", 5, 10, time.time() + left_s))
            assert (await chat(session))[2]["Retry-After"] == told
            async with session.get("/health") as response:
                assert response.headers["Retry-After"] == told

        backend.status = Status("failed", Progress("weights"), error="no memory")
        async with session.get("/health") as response:
            assert response.status == 503
            assert await response.json() == {"status": "failed", "error": "no memory"}
        status, body, headers = await chat(session)
        assert (status, headers["X-Should-Retry"]) == (503, "false")
        assert "no memory" in assert_error_shape(body)["message"]

        backend.status = Status("ready", Progress("ready"), device={"kind": "cpu"})
        async with session.get("/health") as response:
            assert response.status == 200
            body = await response.json()
            assert (body["status"], body["model"], body["device"]) == ("ok", "tiny", {"kind": "cpu"})


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    events = [event.removeprefix("data: ") for event in raw.removesuffix("\n\n").split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def test_stream_frames_each_message_and_ends_with_done() -> None:
    async def script(payload: Mapping[str, Any], send: OnMessage) -> Any:
        await send({"text": "가\n\ndata: x"})
        await send({"text": "🙂"})
        return {"body": None, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    async with serving(FakeBackend(script)) as session, session.post(CHAT, json={**HELLO, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert await read_events(response) == [{"text": "가\n\ndata: x"}, {"text": "🙂"}, "[DONE]"]


def fail_after(messages: int, result: Any) -> Script:
    async def script(payload: Mapping[str, Any], send: OnMessage) -> Any:
        for i in range(messages):
            await send({"i": i})
        if isinstance(result, BaseException):
            raise result
        return result

    return script


REFUSAL = {"status": 400, "error": {"message": "too long", "code": "context_length_exceeded", "param": "messages"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("result", "status", "code"),
    [
        (REFUSAL, 400, "context_length_exceeded"),
        (InferletError("ContextLengthExceeded", "600 > 512"), 400, "context_length_exceeded"),
        (InferletError("EngineLost", "the device is gone"), 503, "engine_lost"),
        (InferletError("GuestTrap", "unreachable"), 500, "inferlet_failed"),
        (None, 500, "inferlet_failed"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_a_failure_before_the_first_byte_has_a_status(stream: bool, result: Any, status: int, code: str) -> None:
    async with serving(FakeBackend(fail_after(0, result))) as session:
        got, body, _ = await chat(session, stream=stream)
    assert got == status
    error = assert_error_shape(body)
    assert error["code"] == code
    assert "secret" not in error["message"]


@pytest.mark.parametrize("result", [REFUSAL, InferletError("GuestTrap", "unreachable"), None])
async def test_a_failure_after_the_first_byte_is_an_event_and_the_stream_ends(result: Any) -> None:
    async with serving(FakeBackend(fail_after(2, result))) as session, session.post(CHAT, json={**HELLO, "stream": True}) as response:
        assert response.status == 200
        events = await read_events(response)
    assert events[:2] == [{"i": 0}, {"i": 1}]
    assert_error_shape(events[2])
    assert len(events) == 3


async def test_an_internal_fault_after_the_first_byte_is_told_without_its_text() -> None:
    async with (
        serving(FakeBackend(fail_after(1, RuntimeError("secret")))) as session,
        session.post(CHAT, json={**HELLO, "stream": True}) as response,
    ):
        raw = (await response.read()).decode()
    assert "[DONE]" not in raw and "secret" not in raw
    assert_error_shape(json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: ")))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_run(stream: bool) -> None:
    async def script(payload: Mapping[str, Any], send: OnMessage) -> Any:
        while True:
            await send({"i": 0})
            await asyncio.sleep(0.005)

    backend = FakeBackend(script)
    async with serving(backend) as session:
        request = asyncio.create_task(session.post(CHAT, json={**HELLO, "stream": stream}))
        await until(lambda: backend.running == 1)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: backend.running == 0)
        assert backend.cancelled == 1


async def test_one_request_too_many_is_told_when_to_come_back() -> None:
    release = asyncio.Event()

    async def script(payload: Mapping[str, Any], send: OnMessage) -> Any:
        await release.wait()
        return {"body": {}}

    backend = FakeBackend(script)
    async with serving(backend, max_concurrent=2, retry_after_s=3) as session:
        running = [asyncio.create_task(chat(session)) for _ in range(2)]
        await until(lambda: backend.running == 2)
        status, body, headers = await chat(session)
        assert (status, headers["Retry-After"]) == (429, "3")
        assert assert_error_shape(body)["type"] == "rate_limit_error"
        release.set()
        assert [(await task)[0] for task in running] == [200, 200]
        assert (await chat(session))[0] == 200


async def test_metrics_count_requests_by_route_and_read_the_engine() -> None:
    async with serving(FakeBackend()) as session:
        await chat(session)
        await session.get("/x" * 50)
        async with session.get("/metrics") as response:
            text = await response.text()
    assert 'pie_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'pie_requests_total{method="GET",route="unmatched",status="404"} 1.0' in text
    assert "/x/x" not in text
    assert "pie_pages_used 7.0" in text
    assert "pie_steps_total 3.0" in text
    assert 'pie_api_tokens_total{kind="prompt"} 3.0' in text
    assert "pie_requests_active 0.0" in text


@pytest.mark.parametrize(
    ("origins", "origin", "status", "allowed"),
    [
        ([], None, 200, None),
        ([], "https://evil.example", 403, None),
        (["https://my.example"], "https://evil.example", 403, None),
        (["https://my.example"], "https://my.example", 200, "https://my.example"),
        (["*"], "https://any.example", 200, "https://any.example"),
    ],
)
async def test_web_origins(origins: list[str], origin: str | None, status: int, allowed: str | None) -> None:
    headers = {} if origin is None else {"Origin": origin}
    async with serving(FakeBackend(), cors_origins=origins) as session:
        async with session.post(CHAT, json=HELLO, headers=headers) as response:
            assert response.status == status
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
        async with session.options(CHAT, headers={**headers, "Access-Control-Request-Method": "POST"}) as response:
            assert response.status == (204 if allowed else 405)
            assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_a_page_of_the_same_origin_may_post() -> None:
    async with serving(FakeBackend()) as session:
        origin = str(session._base_url).rstrip("/")
        async with session.post(CHAT, json=HELLO, headers={"Origin": origin}) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("evil.com", {}, 403),
        ("evil.com:8080", {}, 403),
        ("localhost.evil.com", {}, 403),
        ("127.0.0.1.evil.com", {}, 403),
        ("10.1.2.3", {}, 403),
        ("[broken", {}, 403),
        ("localhost:8080", {}, 200),
        ("LOCALHOST.", {}, 200),
        ("127.0.0.5", {}, 200),
        ("[::1]:8080", {}, 200),
        ("10.1.2.3:80", {"host": "10.1.2.3"}, 200),
        ("box.lan", {"host": "box.lan"}, 200),
        ("10.1.2.3", {"host": "0.0.0.0"}, 200),
        ("evil.com", {"host": "0.0.0.0"}, 403),
        ("pie.example", {"allowed_hosts": ["Pie.example"]}, 200),
        ("other.example", {"allowed_hosts": ["pie.example"]}, 403),
        ("any.example", {"allowed_hosts": ["*"]}, 200),
    ],
)
async def test_a_host_name_that_is_not_ours_is_refused_though_the_origin_is_the_same(
    host: str, settings: dict[str, Any], status: int
) -> None:
    async with serving(FakeBackend(), **settings) as session:
        for method, path in (("POST", CHAT), ("GET", "/health")):
            headers = {"Host": host, "Origin": f"http://{host}"}
            async with session.request(method, path, json=HELLO if method == "POST" else None, headers=headers) as response:
                assert response.status == status
                if status == 403:
                    error = assert_error_shape(await response.json())
                    assert error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]


async def test_log_lines_hold_no_user_text_and_cannot_be_forged(capfd: pytest.CaptureFixture[str]) -> None:
    from pie_server.logs import configure

    configure("json")
    async with serving(FakeBackend()) as session:
        await chat(session, messages=[{"role": "user", "content": "my secret"}])
        await session.get("/%0aforged")
        await session.post(CHAT, data="secret", headers={"X-Request-Id": "ok"})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["event"], line["status"]) for line in lines] == [("request", 200), ("request", 404), ("request", 400)]
    assert lines[0]["prompt_tokens"] == 3
    assert "secret" not in json.dumps(lines) and "forged" not in json.dumps(lines)


async def test_the_timeline_is_there_when_asked_for() -> None:
    async with serving(FakeBackend()) as session, session.get("/debug/timeline") as response:
        assert response.status == 404
        assert "started with --timeline" in assert_error_shape(await response.json())["message"]
    async with serving(FakeBackend(), timeline=True) as session:
        for query, steps in (("", [[0], [1], [2]]), ("?since=1", [[2]])):
            async with session.get(f"/debug/timeline{query}") as response:
                body = await response.json()
                assert (response.status, body["columns"], body["steps"]) == (200, ["number"], steps)
        for query, param, code in (
            ("since=x", "since", "unsupported_value"),
            ("since=-2", "since", "unsupported_value"),
            ("since=", "since", "unsupported_value"),
            ("bogus=1", "bogus", "unknown_parameter"),
        ):
            async with session.get(f"/debug/timeline?{query}") as response:
                error = assert_error_shape(await response.json())
                assert (response.status, error["param"], error["code"]) == (400, param, code)


class Tenants(FakeBackend):
    """Keeps whom each run was for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    async def run(self, *args: Any, tenant: str = "", **kwargs: Any) -> Any:
        self.seen.append(tenant)
        return await super().run(*args, tenant=tenant, **kwargs)


async def test_a_key_is_the_same_however_it_is_presented() -> None:
    backend = Tenants()
    same = [{"Authorization": text} for text in ("Bearer A", "bearer A", "BEARER   A", "Bearer\tA")] + [{"X-Api-Key": "A"}]
    none = [{}, {"Authorization": "Bearer"}, {"Authorization": ""}]
    others = [{"X-Api-Key": "a"}, {"Authorization": "Basic A"}, {"Authorization": "Bearer B", "X-Api-Key": "A"}, {"Authorization": "AA"}]
    async with serving(backend) as session:
        for headers in (*same, *none, *others):
            async with session.post(CHAT, json=HELLO, headers=headers) as response:
                assert response.status == 200
    seen = iter(backend.seen)
    (key,) = {next(seen) for _ in same}
    assert {next(seen) for _ in none} == {""}
    assert len({key, "", *seen}) == 2 + len(others)
