"""One `pie serve` and one Chromium for these tests; pages of /hello over the default model or a tiny one; nothing may leave the origin."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route

from pie_server.build.web import web_assets
from tests.server.conftest import pie_serve
from tests.support.tiny_gguf import write_tiny_gguf
from tests.web.browser import chromium

READY_MS = 120_000  # on a busy machine
TINY = {"layers": 2, "context": 512, "seed": 3, "vocab": 400}
TINY_URL = "/models/tiny/manifest.json"
KINDS = ("cpu", "webgpu")

RUN = """async ([source, input]) => {
  const messages = [], logs = [];
  try {
    const value = await window.pieHello.pie.run(source, {input, onMessage: (m) => messages.push(m), onLog: (l, t) => logs.push([l, t])});
    return {value, messages, logs};
  } catch (error) {
    const {name, message, type, line, file, traceback} = error;
    return {error: {name, message, type, line, file, traceback}, messages, logs};
  }
}"""


@dataclass
class Tab:
    """A page with what it asked the network for."""

    page: Page
    origin: str
    requests: list[Request] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def hello(self, device: str = "cpu", model: str | None = None, *, ready: bool = True) -> Tab:
        """Open /hello; wait until the model is loaded."""
        query = f"?device={device}" + (f"&model={model}" if model else "")
        self.page.goto(f"{self.origin}/hello{query}")
        if ready:
            self.wait("ready")
        return self

    def front(self) -> Tab:
        """Bring it to the front: a browser draws a tab behind others once a second, and clicks wait for that."""
        self.page.bring_to_front()
        return self

    def at(self, name: str) -> Any:
        """The element with this data-testid."""
        return self.page.get_by_test_id(name)

    def wait(self, state: str, timeout: float = READY_MS) -> None:
        """Until the load is in this state; fails with what the page says when the load failed instead."""
        ends = [state, "failed"]
        self.page.wait_for_function(
            "ends => ends.includes(document.querySelector('[data-testid=status]').dataset.state)", arg=ends, timeout=timeout
        )
        found = self.at("status").get_attribute("data-state")
        said = f"{self.at('error-type').text_content()}: {self.at('error-message').text_content()} {self.console[-5:]}"
        assert found == state, f"the load is {found}, wanted {state}: {said}"

    def run(self, source: str, input: Any = None) -> dict[str, Any]:
        """Run an inferlet through the API behind the page: {value | error, messages, logs}."""
        found: dict[str, Any] = self.page.evaluate(RUN, [source, {} if input is None else input])
        return found

    def value(self, source: str, input: Any = None) -> Any:
        """What an inferlet returns; fails when it fails."""
        found = self.run(source, input)
        assert "error" not in found, found["error"]
        return found["value"]

    def engine(self) -> dict[str, float]:
        """The engine's counters."""
        found: dict[str, float] = self.page.evaluate("window.pieHello.pie.stats().then((s) => s.engine)")
        return found

    def asked(self, part: str) -> list[Request]:
        """The requests whose URL contains `part`."""
        return [request for request in self.requests if part in request.url]


@dataclass(frozen=True)
class TinyModel:
    """A random checkpoint that the browser gets from here, as if the server had it."""

    path: Path

    @property
    def data(self) -> bytes:
        return self.path.read_bytes()

    @property
    def manifest(self) -> dict[str, Any]:
        return {"name": "tiny", "file": "tiny.gguf", "size": len(self.data), "sha256": hashlib.sha256(self.data).hexdigest()}

    def serve(self, context: BrowserContext, **changes: Any) -> None:
        """Answer its requests in this context; `changes` go into the manifest."""

        def manifest(route: Route) -> None:
            route.fulfill(status=200, content_type="application/json", body=json.dumps({**self.manifest, **changes}))

        def file(route: Route) -> None:
            etag = f'"{self.manifest["sha256"]}"'
            route.fulfill(status=200, content_type="application/octet-stream", headers={"ETag": etag}, body=self.data)

        context.route(re.compile(r"^[^?]*/models/tiny/manifest\.json$"), manifest)
        context.route(re.compile(r"^[^?]*/models/tiny/tiny\.gguf$"), file)


@pytest.fixture(scope="package")
def origin() -> Iterator[str]:
    """The server: the default model on the cpu device, and the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIE_PAGE", str(web_assets()))  # named: whoever saves a source meanwhile must not take the page away
        with pie_serve("--device", "cpu", "--kv-pool-mb", "64") as server:
            yield server.url


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Closed behind these tests: where Playwright is open, nobody else can run an event loop in this thread."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_tiny_gguf(tmp_path_factory.mktemp("e2e") / "tiny.gguf", **TINY))  # type: ignore[arg-type]


OpenContext = Callable[..., tuple[BrowserContext, Callable[[], Tab]]]


@contextmanager
def opener(browser: Browser, origin: str) -> Iterator[OpenContext]:
    """Opens contexts and closes them; every request of theirs must have stayed at the server."""
    opened: list[tuple[BrowserContext, list[Request]]] = []

    def make(*, service_workers: Any = "block", where: Browser | None = None, **options: Any) -> tuple[BrowserContext, Callable[[], Tab]]:
        context = (where or browser).new_context(service_workers=service_workers, **options)
        requests: list[Request] = []
        opened.append((context, requests))
        context.on("request", lambda request: requests.append(request))  # noqa: PLW0108  Playwright marks its handlers

        def tab() -> Tab:
            made = Tab(context.new_page(), origin, requests)
            made.page.set_default_timeout(READY_MS)
            made.page.on("console", lambda message: made.console.append(message.text))
            made.page.on("pageerror", lambda error: made.console.append(str(error)))
            return made

        return context, tab

    yield make
    left = [request.url for _, requests in opened for request in requests if not request.url.startswith((origin, f"blob:{origin}"))]
    for context, _ in opened:
        context.close()
    assert left == [], "requests that left the server's origin"


@pytest.fixture(scope="module")
def contexts(browser: Browser, origin: str) -> Iterator[OpenContext]:
    """(context, open a tab in it): fresh storage; at the end, every request of it must have stayed at the server."""
    with opener(browser, origin) as make:
        yield make


@pytest.fixture(scope="package")
def tiny_tabs(browser: Browser, origin: str, tiny: TinyModel) -> Iterator[dict[str, Tab]]:
    """/hello with the tiny model on each device, loaded at once in one fresh profile: a test leaves them ready and nothing running."""
    with opener(browser, origin) as make:
        context, tab = make()
        tiny.serve(context)
        tabs = {kind: tab() for kind in KINDS}
        for kind, each in tabs.items():
            each.hello(kind, TINY_URL, ready=False)
        for each in tabs.values():
            each.front().wait("ready")
        yield tabs


@pytest.fixture
def cpu_tab(tiny_tabs: dict[str, Tab]) -> Tab:
    """/hello with the tiny model on the cpu, shared by all tests."""
    return tiny_tabs["cpu"].front()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A device: all tests of a module on the one, then those on the other."""
    return str(request.param)


@pytest.fixture
def tiny_tab(kind: str, tiny_tabs: dict[str, Tab]) -> Tab:
    """/hello with the tiny model on each device, shared by all tests."""
    return tiny_tabs[kind].front()
