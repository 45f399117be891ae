"""/hello over the default model: what a visitor sees and does, and the tokens of the fp32 reference."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import expect

from e2e.conftest import READY_MS, OpenContext, Tab
from e2e.programs import GENERATE, RAISES
from tests.server.guide_blocks import EXAMPLES, as_shown
from tests.support.paths import goldens

pytestmark = pytest.mark.timeout(400)
MARGIN = 0.05

COLLECT = """() => {
  window.seen = [];
  const watch = () => {
    const text = (id) => document.querySelector(`[data-testid=${id}]`)?.textContent ?? "";
    const bar = document.querySelector("[data-testid=progress]");
    const now = [document.querySelector("#stage")?.textContent ?? "", text("amount"), bar?.hasAttribute("value") ? bar.value : null];
    if (JSON.stringify(window.seen.at(-1)) !== JSON.stringify(now)) window.seen.push(now);
    if (document.querySelector("[data-testid=status]")?.dataset.state !== "ready") setTimeout(watch, 5);
  };
  document.addEventListener("DOMContentLoaded", watch);
}"""


GUIDE = """async ([source, input, received]) => {
  const sent = [], {pie} = window.pieHello;
  const run = pie.run(source, {input, receives: received.length > 0, onMessage: (value) => sent.push(value)});
  for (const value of received) run.send(value);
  return run.then((result) => [sent, result], (error) => [sent, `${error.type}: ${error.message}`]);
}"""


@dataclass(frozen=True)
class Visits:
    """Two tabs of one profile, whose service worker works as for a visitor."""

    first: Tab  # on cpu, ready, with what its progress showed in `window.seen`
    second: Tab  # on webgpu, which loads while the first is used
    before: int  # requests before the second


@pytest.fixture(scope="module")
def visits(contexts: OpenContext) -> Visits:
    _, open_tab = contexts(service_workers="allow")
    first = open_tab()
    first.page.add_init_script(f"({COLLECT})()")
    first.hello("cpu")
    before = len(first.requests)
    return Visits(first, open_tab().hello("webgpu", ready=False), before)


@pytest.fixture
def tab(visits: Visits) -> Tab:
    """The first visit."""
    return visits.first.front()


def agrees(tokens: list[int], steps: list[list[dict[str, Any]]], wanted: list[int]) -> None:
    """Equal to the reference up to the first token whose margin is too small to tell."""
    for at, (token, want) in enumerate(zip(tokens, wanted, strict=False)):
        first, second = steps[at][:2]
        if first["logprob"] - second["logprob"] < MARGIN:
            return
        assert token == want, f"token {at} is {token}, the reference says {want}"


def test_the_first_visit_shows_bytes_rate_and_what_runs(tab: Tab) -> None:
    seen = tab.page.evaluate("window.seen")
    stages = {stage for stage, _, _ in seen}
    assert {"Downloading the model", "Loading the model into the device"} <= stages, stages
    download = [(amount, value) for stage, amount, value in seen if stage == "Downloading the model" and value is not None]
    assert len(download) >= 3 and all(re.match(r"[\d.]+ of 98\.4 MB", amount) for amount, _ in download), download
    assert any("MB/s" in amount for amount, _ in download), download
    values = [value for _, value in download]
    assert values == sorted(values)
    assert tab.at("device").text_content().startswith("CPU: ") and "asked for by name" in tab.at("device").text_content().lower()
    assert "SmolLM2-135M-Instruct" in tab.at("model").text_content()
    info = tab.page.evaluate("window.pieHello.pie.info()")
    assert info["model"]["vocab"] == 49152 and info["version"]


def test_run_gives_the_reference_text(tab: Tab) -> None:
    tab.at("run").click()
    expect(tab.at("run-state")).to_have_text(re.compile(r"Done in "), timeout=READY_MS)
    found = json.loads(tab.at("result").text_content())
    golden = goldens()["completion"]
    tokens = tab.value(GENERATE, {"prompt": golden["prompt"], "n": 8})
    agrees(tokens["tokens"], golden["step_top5"], golden["gen_ids"])
    assert found == {"text": tokens["text"]} and golden["gen_text"].startswith(found["text"])


def test_output_streams_and_stop_ends_it(tab: Tab) -> None:
    source = GENERATE.replace("send(feed[0])", "send(model.decode(feed))")
    tab.at("source").fill(source)
    tab.at("input").fill(json.dumps({"prompt": "Once upon a time", "n": 500, "send": True}))
    tab.at("run").click()
    tab.page.wait_for_function("() => document.querySelector('[data-testid=output]').textContent.length > 20")
    assert tab.at("run").is_disabled() and tab.at("stop").is_enabled()
    tab.at("stop").click()
    expect(tab.at("run-state")).to_have_text(re.compile(r"Stopped after "))
    assert tab.at("run").is_enabled() and tab.at("error").is_hidden()
    tab.page.wait_for_function("() => window.pieHello.pie.stats().then((s) => s.engine.pages_used === 0)")


def test_an_error_is_told_in_words_with_its_line(tab: Tab) -> None:
    tab.at("source").fill(RAISES)
    tab.at("input").fill("{}")
    tab.at("run").click()
    expect(tab.at("error")).to_be_visible(timeout=READY_MS)
    assert (tab.at("error-type").text_content(), tab.at("error-message").text_content()) == ("ValueError", "what went wrong")
    assert "5" in tab.at("error-line").text_content()
    assert tab.at("output").text_content() == "before"
    tab.at("error-line").click()
    line = tab.page.evaluate(
        "(() => { const t = document.querySelector('#source'); return t.value.slice(t.selectionStart, t.selectionEnd); })()"
    )
    assert "raise ValueError" in line


def test_keys_run_and_stop(tab: Tab) -> None:
    tab.at("source").fill("async def main(input):\n    return 1\n")
    tab.at("input").fill("{}")
    tab.at("source").press("Control+Enter")
    expect(tab.at("result")).to_have_text("1", timeout=READY_MS)
    tab.at("source").fill("import asyncio\n\nasync def main(input):\n    await asyncio.sleep(1000)\n")
    tab.at("source").press("Control+Enter")
    expect(tab.at("stop")).to_be_enabled()
    tab.page.keyboard.press("Escape")
    expect(tab.at("run-state")).to_have_text(re.compile(r"Stopped after "))


def test_every_block_of_the_guide_returns_in_a_page_what_it_shows(tab: Tab) -> None:
    """docs/inferlets.md: what its blocks return under `pie run` they return here."""
    for example in EXAMPLES:
        found = tab.page.evaluate(GUIDE, [example.source, example.input, list(example.received)])
        assert as_shown(found) == [example.sent, json.loads(example.result)], example.title


def test_webgpu_on_swiftshader_gives_the_reference_tokens_and_needs_no_bytes_of_the_model(visits: Visits) -> None:
    page = visits.second.front()
    page.wait("ready")
    assert not [r.url for r in page.requests[visits.before :] if r.url.endswith(".gguf")], "the model's bytes came again"
    device = page.at("device").text_content()
    assert device.startswith("WebGPU in software: ") and "swiftshader" in device.lower()
    golden = goldens()["completion"]
    agrees(page.value(GENERATE, {"prompt": golden["prompt"], "n": 2})["tokens"], golden["step_top5"], golden["gen_ids"])
