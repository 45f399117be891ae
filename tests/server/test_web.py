"""The page's files and the model's file over HTTP: types, encodings, conditions, ranges, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from fake_backend import FakeBackend
from yarl import URL

from pie_server import file_digest
from pie_server.api.backend import Progress, Status
from pie_server.app import create_app
from pie_server.build.cpu_module import BuildError
from pie_server.config import Settings
from pie_server.send_file import CHUNK, Unsatisfiable, names_tag, parse_range
from pie_server.web import ASSETS, Assets, accepted

SCRIPT = b"export const answer = 42;\n" * 100
MODEL = os.urandom(CHUNK * 2 + 12_345)
SHA = hashlib.sha256(MODEL).hexdigest()
NAME = "tiny model/Q8.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files as the build leaves them. The .br is no Brotli: nothing here decodes it."""
    page = tmp_path / "page"
    for name, data in {
        "hello.html": b"<!doctype html>",
        "pie.js": SCRIPT,
        "pie.js.br": b"as brotli",
        "pie.js.gz": gzip.compress(SCRIPT),
        "only-gz.wasm": b"\0asm" + bytes(2000),
        "only-gz.wasm.gz": gzip.compress(b"\0asm" + bytes(2000)),
        "pyodide/pyodide.mjs": b"export {};",
        "wheels/pyodide-lock.json": b"{}",
        "wheels/a.whl": b"zip",
        "sw.js": b"// service worker",
        "notes.txt": b"of no known type",
        "empty.js": b"",
    }.items():
        path = page / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "secret.js").write_bytes(b"not for you")
    (tmp_path / "Q8.gguf").write_bytes(MODEL)
    return page


@pytest.fixture
async def client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient]:
    """The whole application around a backend that is still loading."""
    monkeypatch.setenv("PIE_CACHE", str(folder.parent / "cache"))
    async with TestClient(TestServer(application(folder, lambda: folder)), auto_decompress=False) as client:
        yield client


def application(folder: Path, find: Callable[[], Path | None]) -> aiohttp.web.Application:
    backend = FakeBackend()
    backend.status = Status("loading", Progress("loading weights", 1, 2))
    backend.card = replace(backend.card, name=NAME, checkpoint=folder.parent / "Q8.gguf")
    app = create_app(backend, Settings())
    app[ASSETS] = Assets(find)
    return app


# The page.


async def test_hello_is_html_under_a_strict_policy(client: TestClient) -> None:
    async with client.get("/hello") as response:
        assert response.status == 200
        assert await response.read() == b"<!doctype html>"
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
        assert "script-src 'self' 'wasm-unsafe-eval';" in policy
        assert "unsafe-inline" not in policy and "'unsafe-eval'" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Cross-Origin-Opener-Policy" not in response.headers
        assert "Cross-Origin-Embedder-Policy" not in response.headers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pie.js", "text/javascript; charset=utf-8"),
        ("pyodide/pyodide.mjs", "text/javascript; charset=utf-8"),
        ("only-gz.wasm", "application/wasm"),
        ("wheels/pyodide-lock.json", "application/json"),
        ("wheels/a.whl", "application/octet-stream"),
    ],
)
async def test_types(client: TestClient, name: str, kind: str) -> None:
    async with client.get(f"/web/{name}") as response:
        assert (response.status, response.headers["Content-Type"]) == (200, kind)
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]  # workers have the policy of their own file
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("name", "accept", "coding"),
    [
        ("pie.js", "gzip, deflate, br, zstd", "br"),
        ("pie.js", "gzip", "gzip"),
        ("pie.js", "BR;q=0.1", "br"),
        ("pie.js", "br;q=0, gzip ; q=0.5", "gzip"),
        ("pie.js", "br;q=nonsense", None),
        ("pie.js", "identity", None),
        ("pie.js", "", None),
        ("only-gz.wasm", "br, gzip", "gzip"),
        ("empty.js", "br, gzip", None),
    ],
)
async def test_encodings(client: TestClient, folder: Path, name: str, accept: str, coding: str | None) -> None:
    async with client.get(f"/web/{name}", headers={"Accept-Encoding": accept}) as response:
        assert response.status == 200
        assert response.headers.get("Content-Encoding") == coding
        assert response.headers["Vary"] == "Accept-Encoding"
        suffix = {"br": ".br", "gzip": ".gz", None: ""}[coding]
        assert await response.read() == (folder / (name + suffix)).read_bytes()
        assert int(response.headers["Content-Length"]) == (folder / (name + suffix)).stat().st_size


async def test_a_copy_is_asked_about_and_not_sent_again(client: TestClient) -> None:
    tags = {}
    for accept in ("br", "gzip", ""):
        async with client.get("/web/pie.js", headers={"Accept-Encoding": accept}) as response:
            assert response.headers["Cache-Control"] == "no-cache"
            tags[accept] = response.headers["ETag"]
    assert len(set(tags.values())) == 3
    for asked in (tags["br"], f"W/{tags['br']}", f'"x", {tags["br"]}', "*"):
        async with client.get("/web/pie.js", headers={"Accept-Encoding": "br", "If-None-Match": asked}) as response:
            assert (response.status, await response.read()) == (304, b"")
            assert response.headers["ETag"] == tags["br"]
    async with client.get("/web/pie.js", headers={"Accept-Encoding": "br", "If-None-Match": tags["gzip"]}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/missing.js",
        "/web/notes.txt",
        "/web/pie.js.br",
        "/web/pyodide",
        "/web/pyodide/",
        "/web/../secret.js",
        "/web/%2e%2e/secret.js",
        "/web/..%2fsecret.js",
        "/web/pyodide/../../secret.js",
        "/web/pyodide/..%5c..%5csecret.js",
        "/web//etc/passwd",
        "/web/%2fetc%2fpasswd",
        "/web/pie.js%00",
        "/web/pie.js/",
    ],
)
async def test_only_built_files(client: TestClient, path: str) -> None:
    async with client.get(path) as response:
        assert response.status == 404
        assert b"not for you" not in await response.read()


async def test_a_raw_request_cannot_climb_out(client: TestClient) -> None:
    """Clients normalise paths; an attacker does not."""
    import asyncio

    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"GET /web/../../secret.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert b" 404 " in answer.split(b"\r\n")[0]
    assert b"not for you" not in answer


async def test_other_methods_are_refused(client: TestClient) -> None:
    async with client.post("/web/pie.js", data=b"x") as response:
        assert response.status == 405
    async with client.head("/web/pie.js", headers={"Accept-Encoding": ""}) as response:
        assert (response.status, response.headers["Content-Length"], await response.read()) == (200, str(len(SCRIPT)), b"")


async def test_a_service_worker_may_control_the_site(client: TestClient) -> None:
    async with client.get("/web/sw.js") as response:
        assert response.headers["Service-Worker-Allowed"] == "/"
    async with client.get("/web/pie.js") as response:
        assert "Service-Worker-Allowed" not in response.headers


def _cannot_build() -> Path:
    raise BuildError("the sources of the page are not here")


@pytest.mark.parametrize(("find", "words"), [(lambda: None, "make web"), (_cannot_build, "the sources of the page are not here")])
async def test_a_page_that_is_not_built(folder: Path, find: Callable[[], Path | None], words: str) -> None:
    async with TestClient(TestServer(application(folder, find))) as client, client.get("/hello") as response:
        assert response.status == 503
        error = (await response.json())["error"]
        assert words in error["message"] and error["code"] == "page_not_built"


async def test_a_folder_of_ones_own(folder: Path, tmp_path: Path) -> None:
    for page, status in ((folder, 200), (tmp_path / "missing", 503)):
        app = create_app(FakeBackend(), Settings(page=page))
        async with TestClient(TestServer(app)) as client, client.get("/hello") as response:
            assert response.status == status
            if status == 503:
                assert "does not hold the files" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "accept", "location"),
    [
        ("/hello/", "*/*", "/hello"),
        ("/hello/?device=cpu&model=%2Fa%0D%0Ab", "", "/hello?device=cpu&model=%2Fa%0D%0Ab"),
        ("/", "text/html,application/xhtml+xml;q=0.9", "/hello"),
        ("/?device=cpu", "TEXT/HTML", "/hello?device=cpu"),
    ],
)
async def test_addresses_that_people_type_lead_to_the_page(client: TestClient, path: str, accept: str, location: str) -> None:
    async with client.get(URL(path, encoded=True), headers={"Accept": accept}, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, location)
        assert response.headers["Vary"] == "Accept" and response.headers["Cache-Control"] == "no-cache"


async def test_the_root_lists_the_endpoints_for_programs_and_where_there_is_no_page(client: TestClient, folder: Path) -> None:
    async with client.get("/", headers={"Accept": "*/*"}) as response:
        assert response.status == 200 and response.headers["Vary"] == "Accept"
        body = await response.json()
    assert body["name"] == "pie" and body["version"]
    assert {"GET /health", "POST /v1/chat/completions", "GET /hello", "GET /web/{name}"} <= set(body["endpoints"])
    assert not [each for each in body["endpoints"] if each.startswith("HEAD")]
    async with (
        TestClient(TestServer(application(folder, lambda: None))) as bare,
        bare.get("/", headers={"Accept": "text/html"}) as response,
    ):
        assert response.status == 200 and await response.json() == body
    async with client.head("/", headers={"Accept": "*/*"}) as response:
        assert response.status == 200
    async with client.post("/") as response:
        assert response.status == 405


async def test_a_page_built_after_the_start_is_found(folder: Path) -> None:
    answers: list[Path | None] = [None, folder]
    async with TestClient(TestServer(application(folder, lambda: answers.pop(0)))) as client:
        for status in (503, 200, 200):
            async with client.get("/hello") as response:
                assert response.status == status


# The model.


@pytest.mark.parametrize("name", ["default", quote(NAME, safe="")])
async def test_manifest_while_loading(client: TestClient, name: str) -> None:
    async with client.get("/health") as response:
        assert response.status == 503
    async with client.get(f"/models/{name}/manifest.json") as response:
        assert response.status == 200
        assert await response.json() == {"name": NAME, "file": "Q8.gguf", "size": len(MODEL), "sha256": SHA}
    async with client.get(f"/models/{name}/Q8.gguf") as response:
        assert response.status == 200
        assert response.headers["ETag"] == f'"{SHA}"'
        assert response.headers["Accept-Ranges"] == "bytes"
        assert await response.read() == MODEL


SIZE = len(MODEL)
WHOLE = (200, None, MODEL)
BEYOND = (416, f"bytes */{SIZE}", b"")
RANGES = [
    ("bytes=0-0", (206, f"bytes 0-0/{SIZE}", MODEL[:1])),
    ("bytes=0-", (206, f"bytes 0-{SIZE - 1}/{SIZE}", MODEL)),
    ("bytes=100-199", (206, f"bytes 100-199/{SIZE}", MODEL[100:200])),
    (f"bytes={CHUNK - 1}-{CHUNK}", (206, f"bytes {CHUNK - 1}-{CHUNK}/{SIZE}", MODEL[CHUNK - 1 : CHUNK + 1])),
    (f"bytes={SIZE - 1}-", (206, f"bytes {SIZE - 1}-{SIZE - 1}/{SIZE}", MODEL[-1:])),
    (f"bytes=5-{SIZE * 10}", (206, f"bytes 5-{SIZE - 1}/{SIZE}", MODEL[5:])),
    ("bytes=-7", (206, f"bytes {SIZE - 7}-{SIZE - 1}/{SIZE}", MODEL[-7:])),
    (f"bytes=-{SIZE * 2}", (206, f"bytes 0-{SIZE - 1}/{SIZE}", MODEL)),
    ("Bytes= 1-2 ", (206, f"bytes 1-2/{SIZE}", MODEL[1:3])),
    (f"bytes={SIZE}-", BEYOND),
    (f"bytes={SIZE}-{SIZE + 5}", BEYOND),
    ("bytes=-0", BEYOND),
    ("bytes=9-5", WHOLE),
    ("bytes=0-1,5-6", WHOLE),  # one range only: the whole file is allowed as an answer
    ("bytes=", WHOLE),
    ("bytes=-", WHOLE),
    ("bytes=a-b", WHOLE),
    ("bytes=1--2", WHOLE),
    ("bytes=+1-2", WHOLE),
    ("bytes=0x1-2", WHOLE),
    ("bytes=1 - 2", WHOLE),
    (f"bytes={'9' * 4000}-", WHOLE),
    ("items=0-1", WHOLE),
    ("", WHOLE),
]


@pytest.mark.parametrize(("header", "expected"), RANGES, ids=[header[:24] for header, _ in RANGES])
async def test_ranges(client: TestClient, header: str, expected: tuple[int, str | None, bytes]) -> None:
    async with client.get("/models/default/Q8.gguf", headers={"Range": header}) as response:
        body = await response.read()
        assert (response.status, response.headers.get("Content-Range")) == expected[:2]
        assert body == expected[2]
        assert int(response.headers["Content-Length"]) == len(body)
        assert response.headers["ETag"] == f'"{SHA}"'


@pytest.mark.parametrize(
    ("condition", "status"),
    [(f'"{SHA}"', 206), (f'W/"{SHA}"', 200), (SHA, 200), ('"other"', 200), ("Sun, 06 Nov 1994 08:49:37 GMT", 200), ("*", 200)],
)
async def test_a_download_goes_on_only_with_the_same_file(client: TestClient, condition: str, status: int) -> None:
    headers = {"Range": "bytes=10-19", "If-Range": condition}
    async with client.get("/models/default/Q8.gguf", headers=headers) as response:
        assert (response.status, await response.read()) == (status, MODEL[10:20] if status == 206 else MODEL)


async def test_conditions(client: TestClient) -> None:
    url = "/models/default/Q8.gguf"
    async with client.get(url, headers={"If-None-Match": f'"{SHA}"', "Range": "bytes=0-1"}) as response:
        assert (response.status, await response.read()) == (304, b"")
    for tag, status in ((f'"{SHA}"', 200), ("*", 200), (f'W/"{SHA}"', 412), ('"other"', 412)):
        async with client.get(url, headers={"If-Match": tag}) as response:
            assert response.status == status
    async with client.head(url, headers={"Range": "bytes=0-1"}) as response:  # ranges are for GET
        assert (response.status, response.headers["Content-Length"], await response.read()) == (200, str(SIZE), b"")


@pytest.mark.parametrize(
    "path", ["/models/other/manifest.json", "/models/default/other.gguf", "/models/default/..%2fsecret.js", "/models/default/"]
)
async def test_only_the_served_model(client: TestClient, path: str) -> None:
    async with client.get(path) as response:
        assert response.status == 404
        assert "error" in await response.json()


async def test_a_file_that_went_away(client: TestClient, folder: Path) -> None:
    (folder.parent / "Q8.gguf").unlink()
    for path in ("/models/default/manifest.json", "/models/default/Q8.gguf"):
        async with client.get(path) as response:
            assert response.status == 404


async def test_a_client_that_leaves_does_not_keep_the_file_open(client: TestClient, folder: Path) -> None:
    def held() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(folder.parent / "Q8.gguf") for fd in os.listdir("/proc/self/fd"))

    import asyncio

    for _ in range(3):
        response = await client.get("/models/default/Q8.gguf")
        await response.content.read(10)
        response.close()
    for _ in range(100):
        if held() == 0:
            break
        await asyncio.sleep(0.02)
    assert held() == 0


def test_a_digest_is_computed_once_for_each_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIE_CACHE", str(folder.parent / "cache"))
    path, reads = folder.parent / "Q8.gguf", []
    real = file_digest.digest
    monkeypatch.setattr(file_digest, "digest", lambda file: (reads.append(file), real(file))[1])
    assert file_digest.file_sha256(path) == file_digest.file_sha256(path) == SHA
    assert len(reads) == 1
    for memory in (folder.parent / "cache" / "digests").iterdir():
        memory.write_text("{broken")
    assert file_digest.file_sha256(path) == SHA
    path.write_bytes(b"another file")
    assert file_digest.file_sha256(path) == hashlib.sha256(b"another file").hexdigest()
    assert len(reads) == 3


# The parts by themselves.


@pytest.mark.parametrize("size", [0, 1])
def test_ranges_of_files_without_many_bytes(size: int) -> None:
    for header in ("bytes=1-", "bytes=-0"):
        with pytest.raises(Unsatisfiable):
            parse_range(header, size)
    if size == 0:
        for header in ("bytes=0-", "bytes=-1"):
            with pytest.raises(Unsatisfiable):
                parse_range(header, size)
    else:
        assert parse_range("bytes=0-", size) == parse_range("bytes=-5", size) == (0, 1)


def test_entity_tags() -> None:
    assert names_tag('"a", W/"b"', '"b"') and not names_tag('"a", W/"b"', '"b"', weak=False)
    assert names_tag("*", '"b"') and not names_tag("", '"b"') and not names_tag('"bb"', '"b"')


def test_accept_encoding() -> None:
    assert accepted("gzip;q=1.0, br ; Q=0.000, , zstd") == {"gzip", "zstd"}
