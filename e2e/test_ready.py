"""What "Ready" promises, how the page gets there and back, and who has the keyboard meanwhile."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from e2e.conftest import READY_MS, TINY_URL, OpenContext, Tab, TinyModel
from e2e.programs import ENDLESS

pytestmark = pytest.mark.timeout(300)
MINE = "async def main(input):\n    return 'mine'\n"
COMPONENT = re.compile("/web/inferlet.worker.js")
FOCUS = "document.activeElement.id || document.activeElement.tagName"


def focus(tab: Tab) -> str:
    found: str = tab.page.evaluate(FOCUS)
    return found


def ran(tab: Tab) -> None:
    """Press Run and see the result."""
    tab.page.evaluate("document.querySelector('#result').textContent = ''")
    tab.at("run").click()
    expect(tab.at("result")).to_have_text('"mine"', timeout=READY_MS)


def test_from_ready_on_no_server_is_needed_whatever_address_is_typed(contexts: OpenContext, tiny: TinyModel) -> None:
    """A fresh profile that loses the network as soon as the page says so; four runs need a third worker."""
    context, open_tab = contexts(service_workers="allow")
    tiny.serve(context)
    tab = open_tab().hello("cpu", TINY_URL)
    context.set_offline(True)
    context.unroute_all()
    tab.at("source").fill(MINE)
    for _ in range(4):
        ran(tab)
    for path in ("/", "/hello/"):
        tab.page.goto(f"{tab.origin}{path}?device=cpu&model={TINY_URL}", wait_until="commit")
        assert tab.page.url == f"{tab.origin}/hello?device=cpu&model={TINY_URL}"
    tab.wait("ready")
    ran(tab)
    context.close()


def test_what_programs_need_is_waited_for_and_can_fail_and_be_cancelled(contexts: OpenContext, tiny: TinyModel) -> None:
    context, open_tab = contexts()
    tiny.serve(context)
    held: list[Route] = []

    def hold() -> None:
        context.route(COMPONENT, lambda route: held.append(route))  # noqa: PLW0108  Playwright marks its handlers

    hold()
    tab = open_tab().hello("cpu", TINY_URL, ready=False)
    expect(tab.at("stage")).to_have_text("Loading Python for programs", timeout=READY_MS)
    assert tab.at("model").text_content().startswith("tiny, ") and tab.at("status").get_attribute("data-state") == "loading"
    tab.at("source").fill(MINE)
    tab.at("run").click()
    expect(tab.at("run-state")).to_have_text("Waiting for what programs need")
    assert focus(tab) == "stop"
    tab.at("load").focus()
    tab.page.keyboard.press("Enter")
    tab.wait("stopped")
    assert tab.at("stage").text_content() == "Not loaded: cancelled. What came already is kept."
    expect(tab.at("run-state")).to_have_text("Stopped: the load was cancelled")
    assert focus(tab) == "load" and tab.at("run").is_disabled() and tab.at("error").is_hidden()
    assert tab.page.evaluate("window.pieHello.pie") is None

    context.unroute(COMPONENT)
    context.route(COMPONENT, lambda route: route.abort())
    tab.page.keyboard.press("Enter")
    tab.wait("failed")
    assert tab.at("error-type").text_content() == "Loading failed" and "could not be loaded" in tab.at("error-message").text_content()
    assert focus(tab) == "load" and tab.at("run").is_disabled()

    context.unroute(COMPONENT)
    hold()
    held.clear()
    tab.page.keyboard.press("Enter")
    expect(tab.at("run")).to_be_enabled(timeout=READY_MS)
    assert tab.at("error").is_hidden() and focus(tab) == "load"
    tab.at("source").press("Control+Enter")
    expect(tab.at("run-state")).to_have_text("Waiting for what programs need")
    tab.at("load").focus()
    for route in held:
        route.continue_()
    expect(tab.at("run-state")).to_have_text(re.compile("Done in "), timeout=READY_MS)
    assert tab.at("result").text_content() == '"mine"'
    tab.wait("ready")
    assert focus(tab) == "choice"
    context.close()


def test_arrow_keys_choose_a_device_and_a_button_takes_it_and_stops_the_run_in_words(cpu_tab: Tab) -> None:
    """`auto` takes the cpu rather than software."""
    tab, page = cpu_tab, cpu_tab.page
    tab.at("source").fill(ENDLESS)
    tab.at("input").fill("{}")
    tab.at("run").click()
    expect(tab.at("run-state")).to_have_text("Running")
    expect(tab.at("use")).to_be_hidden()
    tab.at("choice").focus()
    for key, value in (
        ("ArrowUp", "webgpu"),
        ("ArrowUp", "auto"),
        ("ArrowDown", "webgpu"),
        ("ArrowDown", "cpu"),
        ("ArrowUp", "webgpu"),
        ("ArrowUp", "auto"),
    ):
        page.keyboard.press(key)
        assert tab.at("choice").input_value() == value and focus(tab) == "choice"
        assert tab.at("use").is_visible() == (value != "cpu")
    assert tab.at("run-state").text_content() == "Running" and tab.at("stage").text_content() == "Ready", "choosing loads nothing"
    page.keyboard.press("Tab")
    assert focus(tab) == "use"
    page.keyboard.press("Enter")
    assert focus(tab) == "load" and tab.at("load").text_content() == "Cancel"
    expect(tab.at("run-state")).to_have_text("Stopped: the device was changed")
    assert tab.at("error").is_hidden()
    tab.wait("ready")
    assert focus(tab) == "choice"
    expect(tab.at("use")).to_be_hidden()
    assert tab.at("run-state").text_content() == "Stopped: the device was changed", "it stays until something else runs"
    assert tab.at("run").is_enabled() and tab.at("stop").is_disabled()
    device = page.evaluate("window.pieHello.pie.info().device")
    assert device["kind"] == "cpu" and device["software"] is False
    assert "software, which is used only when asked for by name" in device["why"]
    assert "swiftshader" in tab.at("device").text_content().lower()


def test_the_focus_stays_on_the_page_whatever_is_switched_off(cpu_tab: Tab) -> None:
    tab, page = cpu_tab, cpu_tab.page
    tab.at("source").fill(ENDLESS)
    tab.at("input").fill("{}")
    tab.at("run").focus()
    page.keyboard.press("Enter")
    expect(tab.at("run-state")).to_have_text("Running")
    assert focus(tab) == "stop"
    page.keyboard.press("Enter")
    expect(tab.at("run-state")).to_have_text(re.compile("Stopped after "))
    assert focus(tab) == "run"
    tab.at("source").fill("async def main(input):\n    raise ValueError('x')\n")
    tab.at("run").click()
    expect(tab.at("error-line")).to_be_visible(timeout=READY_MS)
    tab.at("error-line").focus()
    page.keyboard.press("Control+Enter")
    assert focus(tab) in ("stop", "source")
    expect(tab.at("error-line")).to_be_visible(timeout=READY_MS)
    assert focus(tab) in ("run", "source")


SPEAKS = """from inferlet import send

async def main(input):
    send("FIRST LINE\\n")
    for _ in range(3):
        send("😀" * 100_000)
    send("no newline")
    send({"a": 1})
    send("end")
"""
PRINTS = """import asyncio
from inferlet import send

async def main(input):
    for say, text in ((send, "no newline"), (print, "p"), (send, "x\\n"), (print, "q"), (send, "y"), (send, "z")):
        say(text)
        await asyncio.sleep(0.01)
"""


def test_output_that_is_cut_says_so_and_lines_begin_on_their_own(cpu_tab: Tab) -> None:
    tab = cpu_tab
    tab.at("input").fill("{}")
    for source, note, end in (
        (SPEAKS, "… the first 200,022 characters are not shown", '😀no newline\n{"a":1}\nend'),
        (PRINTS, "", "no newline\ninfo: p\nx\ninfo: q\nyz"),
    ):
        tab.at("source").fill(source)
        tab.at("run").click()
        expect(tab.at("run-state")).to_have_text(re.compile("Done in "), timeout=READY_MS)
        found: Any = tab.at("output").text_content()
        assert found.endswith(end) and "�" not in found
        assert tab.at("output-cut").text_content() == note and tab.at("output-cut").is_visible() == bool(note)
        assert len(found.encode("utf-16-le")) // 2 == (200_000 if note else len(end))


def test_who_waits_for_a_message_that_this_page_cannot_send_is_told(cpu_tab: Tab) -> None:
    tab = cpu_tab
    tab.at("input").fill("{}")
    tab.at("source").fill("from inferlet import receive\n\n\nasync def main(input):\n    return await receive()\n")
    tab.at("run").click()
    expect(tab.at("error")).to_be_visible(timeout=READY_MS)
    assert (tab.at("error-type").text_content(), tab.at("error-line").text_content()) == ("Deadlock", "Go to line 5")
    assert "sends none" in tab.at("error-message").text_content()


def test_what_arrives_otherwise_than_it_was_is_told(cpu_tab: Tab) -> None:
    """Numbers that JavaScript rounds, and an input that is nested too deeply for any program."""
    tab = cpu_tab
    tab.at("source").fill("async def main(input):\n    return [2**53 + 1]\n")
    tab.at("run").click()
    expect(tab.at("result-note")).to_have_text(re.compile("may be rounded"), timeout=READY_MS)
    for _ in range(2):
        tab.at("input").fill('{"a": ' + "[" * 5000 + "]" * 5000 + "}")
        tab.at("run").click()
        expect(tab.at("error")).to_be_visible(timeout=READY_MS)
        assert tab.at("error-type").text_content() == "This cannot be run" and "nested" in tab.at("error-message").text_content()
        assert tab.at("result-note").is_hidden() and tab.at("run").is_enabled()
    tab.at("input").fill("{}")
    tab.at("source").fill(MINE)
    ran(tab)
    assert tab.at("error").is_hidden()
