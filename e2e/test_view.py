"""What the page is to a browser and to people: headers, policies, narrow and dark screens, labels, roles and keys."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.conftest import Tab

pytestmark = pytest.mark.timeout(300)

WIDE = """() => [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest("pre, textarea, select")).map((e) => e.outerHTML.slice(0, 120))"""
# Every control needs a name that a screen reader can say
NAMELESS = """() => [...document.querySelectorAll("button, textarea, select, input, progress, [role], [tabindex]")].filter((e) => {
  if (e.closest("[hidden]")) return false;
  const by = (e.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("");
  const label = [...(e.labels ?? [])].map((l) => l.textContent).join("");
  const live = ["alert", "status", "log"].includes(e.getAttribute("role"));
  return !(by + label + (e.getAttribute("aria-label") ?? "") + (e.tagName === "BUTTON" ? e.textContent : "")).trim() && !live;
}).map((e) => e.outerHTML.slice(0, 120))"""
# What can have the focus needs a role, and a name by which it is told
ROLELESS = (
    """() => [...document.querySelectorAll("[tabindex]")].filter((e) => !e.getAttribute("role")).map((e) => e.outerHTML.slice(0, 120))"""
)
# Words that do not fit the line they began in are broken inside
BROKEN = """() => [...document.querySelectorAll(".facts dd, .facts dt")].flatMap(({firstChild: text}) =>
  [...text.data.matchAll(/[^\\s-]+-?/g)].filter((word) => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return new Set([...range.getClientRects()].map((rect) => rect.top)).size > 1;
  }).map((word) => word[0]))"""
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll("h1, h2, p, label, button:enabled, textarea, pre, dt, dd, select")) {
    if (!e.textContent.trim() || e.closest("[hidden]")) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push([e.outerHTML.slice(0, 80), ((a + 0.05) / (b + 0.05)).toFixed(2)]);
  }
  return bad;
}"""


def headers(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.headers


def test_headers_are_strict_and_need_no_isolation(origin: str) -> None:
    for path in ("/hello", "/web/pie.js", "/web/engine.worker.js", "/web/inferlet.worker.js", "/web/kernels.wasm"):
        found = headers(origin + path)
        assert "Cross-Origin-Opener-Policy" not in found and "Cross-Origin-Embedder-Policy" not in found
        policy = found["Content-Security-Policy"]
        assert "script-src 'self' 'wasm-unsafe-eval'" in policy and "connect-src 'self'" in policy and "unsafe-inline" not in policy
        assert "'unsafe-eval'" not in policy.replace("'wasm-unsafe-eval'", "")
    model = headers(f"{origin}/models/default/manifest.json")
    assert "Cross-Origin-Opener-Policy" not in model


@pytest.fixture(scope="module", params=["light", "dark"])
def narrow(request: pytest.FixtureRequest, tiny_tabs: dict[str, Tab]) -> Iterator[tuple[Tab, str]]:
    """The page at a phone's width, in both colour schemes, ready."""
    tab = tiny_tabs["cpu"].front()
    page = tab.page
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme=request.param)
    yield tab, request.param
    page.emulate_media(color_scheme="null")
    page.set_viewport_size(before)


def test_nothing_scrolls_sideways_at_360_pixels(narrow: Any) -> None:
    tab, _ = narrow
    tab.at("source").fill("async def main(input):\n    raise ValueError('x' * 300)\n")
    tab.at("run").click()
    tab.page.wait_for_selector("[data-testid=error]:not([hidden])")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.page.evaluate(WIDE) == []


def test_facts_are_whole_words_at_twice_the_size(narrow: Any) -> None:
    tab, _ = narrow
    was = tab.at("model").text_content()
    try:
        tab.page.evaluate("document.documentElement.style.fontSize = '200%'")
        tab.page.evaluate("document.querySelector('#model').textContent = 'SmolLM2-135M-Instruct, 8,192 tokens of context'")
        assert tab.page.evaluate(BROKEN) == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        tab.page.evaluate(
            "was => { document.documentElement.style.fontSize = ''; document.querySelector('#model').textContent = was; }", was
        )


def test_colours_follow_the_scheme_and_can_be_read(narrow: Any) -> None:
    tab, scheme = narrow
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    parts = [float(v) for v in background.removeprefix("rgb(").rstrip(")").split(",")[:3]]
    assert (sum(parts) / 3 < 100) == (scheme == "dark"), background
    assert tab.page.evaluate(CONTRAST) == []


def test_names_roles_and_the_order_of_focus(narrow: Any) -> None:
    tab, _ = narrow
    page = tab.page
    assert page.evaluate("crossOriginIsolated") is False
    assert page.evaluate("document.documentElement.lang") == "en" and page.title()
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate(NAMELESS) == [] and page.evaluate(ROLELESS) == []
    assert tab.page.get_by_role("region", name="Result", exact=True).get_attribute("id") == "result"
    assert tab.at("error").get_attribute("role") == "alert" and tab.at("run-state").get_attribute("role") == "status"
    page.evaluate("document.activeElement.blur()")
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    wanted = ["source", "input", "run"]
    assert [each for each in order if each in wanted][:3] == wanted, order


def test_the_policy_is_in_force(narrow: Any) -> None:
    tab, _ = narrow
    blocked = tab.page.evaluate(
        """async () => {
          const element = document.createElement("script");
          element.textContent = "window.inline = true";
          document.body.append(element);
          const outside = await fetch("https://example.invalid/").then(() => "sent", (e) => e.name);
          let made = "made";
          try { new Worker("data:text/javascript,0"); await new Promise((r) => setTimeout(r, 50)); } catch (e) { made = e.name; }
          return {inline: window.inline ?? false, outside};
        }"""
    )
    assert blocked["inline"] is False and blocked["outside"] == "TypeError"
    assert any("Content Security Policy" in line for line in tab.console)
