"""Devices in the page against stored NumPy answers, in Chromium: webgpu on SwiftShader and cpu, through the page's own Python and shim."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from pie_core.device.templates import TEMPLATES
from pie_server.build.web import web_assets
from tests.web import make_conformance
from tests.web.bundles import bundle
from tests.web.site import site

HERE = Path(__file__).parent
CASES = HERE / "conformance.json"
KINDS = ("cpu", "webgpu")

# A parameter changed behind the device's back, or the template, and the kernel that the self-test must name
TAMPERED: list[tuple[str, dict[str, Any], str]] = [
    ("rms_norm", {"eps": 0.1}, "rms_norm rows=tokens"),
    ("linear", {"add": False}, "linear fmt=f16 m=40"),
    ("rope_append", {"style": "half"}, "rope_append (q)"),
    ("attention", {"scale": 0.126}, "attention"),
    ("shift", {"template": "gate"}, "shift"),
    ("gate", {"template": "shift"}, "gate"),
]
TAMPERED_ON = {"cpu": TAMPERED, "webgpu": [*TAMPERED[:1], *TAMPERED[-2:]]}  # SwiftShader compiles every kernel anew for each
pytestmark = pytest.mark.timeout(300)

RUN = """([url, job]) => new Promise((done, failed) => {
  const worker = (globalThis.conformance ??= new Worker(url, { type: "module" }));
  worker.onerror = (event) => failed(new Error(event.message ?? "the worker did not start"));
  worker.onmessage = ({ data }) => (data.error ? failed(new Error(data.error)) : done(data.answer));
  worker.postMessage(job);
})"""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's files at /web/, the tests' worker at /test/."""
    assets = web_assets()
    folder = tmp_path_factory.mktemp("bundle")
    bundle(HERE / "device.worker.ts", folder)
    with site({"/web/": assets, "/test/": folder}) as served:
        yield served


@pytest.fixture(scope="module")
def page(origin: str, browser: Browser) -> Iterator[Page]:
    """An empty page, whose one worker serves both devices."""
    opened = browser.new_page()
    opened.goto(f"{origin}/")
    assert opened.evaluate("crossOriginIsolated") is False
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reports(origin: str, page: Page) -> Any:
    """kind -> the report of conformance_run.py; each runs once."""

    @cache
    def report(kind: str) -> dict[str, Any]:
        job = {
            "base": f"{origin}/web/",
            "device": kind,
            "source": (HERE / "conformance_run.py").read_text(),
            "inputs": [CASES.read_text(), json.dumps([[name, change] for name, change, _ in TAMPERED_ON[kind]])],
        }
        found: dict[str, Any] = json.loads(page.evaluate(RUN, [f"{origin}/test/device.worker.js", job]))
        return found

    return report


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_equals_numpy(reports: Any, kind: str) -> None:
    report = reports(kind)
    assert report["device"]["kind"] == kind and report["device"]["software"] == (kind == "webgpu")
    assert report["wrong"] == {}
    assert report["cases"] == len(json.loads(CASES.read_text())["cases"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_passes_and_refuses_a_wrong_kernel_by_name(reports: Any, kind: str) -> None:
    passed, *refused = reports(kind)["refused"]
    assert passed == ""
    for (_, _, named), message in zip(TAMPERED_ON[kind], refused, strict=True):
        assert f"self-test: kernel {named} is wrong on {kind} device" in message and "use another device" in message


def test_a_read_back_is_outstanding_from_its_call(reports: Any) -> None:
    passed, busy = reports("webgpu")["late"]
    assert busy >= passed / 2  # 50 ms went by before the await


def test_the_stored_answers_are_those_of_today() -> None:
    assert CASES.read_text() == make_conformance.text(), "run python -m tests.web.make_conformance"


def test_every_template_and_format_is_covered() -> None:
    cases = json.loads(CASES.read_text())["cases"]
    assert {case.get("template") for case in cases} - {None} == set(TEMPLATES)
    for name in ("linear", "embed"):
        assert {case["params"]["fmt"] for case in cases if case.get("template") == name} == {"f32", "f16", "q4_1", "q8_0"}
    assert sum("epilogue" in case for case in cases) >= 15 and sum("map" in case for case in cases) >= 4
