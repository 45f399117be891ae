"""What a visitor types into /hello and switches there: drafts, input that cannot be used, no JavaScript, no server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from e2e.conftest import READY_MS, OpenContext, Tab
from e2e.programs import HELLO

pytestmark = pytest.mark.timeout(300)
MINE = "async def main(input):\n    return 'mine'\n"
KEY = "pie-hello-draft"


@pytest.fixture
def tab(cpu_tab: Tab) -> Tab:
    """One page with the tiny model."""
    return cpu_tab


@pytest.fixture
def unloaded(contexts: OpenContext) -> Iterator[Tab]:
    """A page whose model never comes: the boxes work without one."""
    context, open_tab = contexts()
    context.route(re.compile("/models/|/web/engine.worker.js"), lambda route: route.abort())
    yield open_tab()
    context.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{oops", r"The input is not JSON: .*JSON.*\. It must be a JSON object, such as "),
        ('{"n": [9007199254740993]}', r"The input holds 9007199254740993, which this page cannot hand on digit by digit"),
        ("[1]", r"The input must be a JSON object, such as .+; this is a list\."),
        ('"text"', r"The input must be a JSON object, such as .+; this is a text\."),
    ],
)
def test_input_that_is_no_object_is_told_at_its_field(tab: Tab, text: str, words: str) -> None:
    tab.at("source").fill(MINE)
    tab.at("input").fill("{}")
    tab.at("run").click()
    expect(tab.at("result")).to_have_text('"mine"', timeout=READY_MS)
    tab.at("input").fill(text)
    tab.at("run").click()
    expect(tab.at("input-error")).to_have_text(re.compile(words))
    assert tab.at("run-state").text_content() == "Not run" and tab.at("error").is_hidden()
    assert tab.at("result").text_content() == '"mine"', "the last result stays"
    assert tab.page.evaluate("document.activeElement.id") == "input"
    expect(tab.at("input")).to_have_attribute("aria-invalid", "true")
    assert tab.at("input").get_attribute("aria-describedby") == "input-error"
    tab.at("input").fill("{}")
    expect(tab.at("input-error")).to_be_empty()
    assert tab.at("input").get_attribute("aria-invalid") is None


def test_a_reload_past_all_caches_waits_for_no_service_worker(contexts: OpenContext) -> None:
    context, open_tab = contexts(service_workers="allow")
    tab = open_tab().hello("cpu", "/models/none/manifest.json", ready=False)
    tab.page.wait_for_function("() => navigator.serviceWorker.controller !== null")
    # The patience of hello/offline.ts never ends: who waits for it never loads
    tab.page.add_init_script("const real = setTimeout; window.setTimeout = (f, ms, ...more) => (ms === 2000 ? 0 : real(f, ms, ...more));")
    context.new_cdp_session(tab.page).send("Page.reload", {"ignoreCache": True})
    tab.wait("failed")
    assert tab.page.evaluate("navigator.serviceWorker.controller") is None
    context.close()


def texts(tab: Tab) -> tuple[str, str]:
    return tab.at("source").input_value(), tab.at("input").input_value()


def test_what_was_typed_is_there_after_a_reload_until_the_example_is_restored(unloaded: Tab) -> None:
    tab = unloaded.hello("cpu", ready=False)
    expect(tab.at("restore")).to_be_hidden()
    _, given = texts(tab)
    assert texts(tab)[0] == HELLO
    tab.at("source").fill(MINE)
    tab.at("input").fill('{"n": 1}')
    tab.page.reload()
    assert texts(tab) == (MINE, '{"n": 1}')
    button = tab.page.get_by_role("button", name="Restore the example")
    button.focus()
    button.press("Enter")
    assert texts(tab) == (HELLO, given)
    assert tab.page.evaluate("document.activeElement.id") == "restore", "the focus stays"
    tab.page.get_by_role("button", name="Bring back my program").click()
    assert texts(tab) == (MINE, '{"n": 1}')
    tab.at("restore").click()
    tab.page.reload()
    assert texts(tab) == (HELLO, given)
    expect(tab.at("restore")).to_be_hidden()


BLOCKED = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('denied', 'SecurityError'); }})"
FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
DAMAGED = f"localStorage.setItem('{KEY}', '{{\"source\": 5')"


@pytest.mark.parametrize("script", [BLOCKED, FULL, DAMAGED], ids=["blocked", "full", "damaged"])
def test_a_store_that_does_not_work_does_not_matter(unloaded: Tab, script: str) -> None:
    unloaded.page.add_init_script(script)
    tab = unloaded.hello("cpu", ready=False)
    assert texts(tab)[0] == HELLO
    tab.at("source").fill(MINE)
    tab.at("restore").click()
    assert texts(tab)[0] == HELLO
    assert not [line for line in tab.console if "denied" in line or "full" in line]


def test_without_javascript_one_line_says_so(contexts: OpenContext) -> None:
    _, open_tab = contexts(java_script_enabled=False)
    tab = open_tab()
    tab.page.goto(f"{tab.origin}/hello")
    line = tab.page.locator(".no-script")  # words inside <noscript> are none to get_by_text
    expect(line).to_be_visible()
    expect(line).to_contain_text("needs JavaScript")
    expect(tab.at("status")).to_be_hidden()
    expect(tab.at("run")).to_be_hidden()
    box, title = line.bounding_box(), tab.page.get_by_role("heading", level=1).bounding_box()
    assert box is not None and title is not None and box["y"] < title["y"]


PARTS = ["/models/default/manifest.json", "/web/wheels/pyodide-lock.json", "/web/pyodide/pyodide.mjs", "/web/engine.worker.js"]


@pytest.mark.parametrize("part", PARTS)
def test_a_server_that_cannot_be_reached_is_named(contexts: OpenContext, part: str) -> None:
    context, open_tab = contexts()
    context.route(re.compile(re.escape(part)), lambda route: route.abort("internetdisconnected"))
    tab = open_tab().hello("cpu", ready=False)
    tab.wait("failed")
    assert "the server cannot be reached" in tab.at("error-message").text_content()
    assert tab.at("error-type").text_content() in ("The network failed", "Loading failed")
    context.close()


@pytest.mark.parametrize("path", ["/", "/hello/"])
def test_addresses_that_people_type_lead_to_the_page(contexts: OpenContext, path: str) -> None:
    context, open_tab = contexts()
    page: Page = open_tab().page
    context.route(re.compile("/web/"), lambda route: route.abort())
    answer: Any = page.goto(f"{open_tab().origin}{path}?device=cpu")
    assert answer.status == 200 and page.url.endswith("/hello?device=cpu")
    assert page.title().startswith("Pie")
    context.close()
