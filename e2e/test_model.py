"""How a model comes: cancel and resume by range, a wrong file, two tabs at once, no storage."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from e2e.conftest import TINY_URL, OpenContext, Tab, TinyModel
from e2e.programs import GENERATE

pytestmark = pytest.mark.timeout(300)
FILES = """async () => {
  const walk = async (folder) => {
    const names = [];
    for await (const [name, handle] of folder.entries()) names.push(...(handle.kind === "file" ? [name] : await walk(handle)));
    return names;
  };
  return walk(await navigator.storage.getDirectory());
}"""


def test_a_cancelled_download_is_resumed_by_range(contexts: OpenContext) -> None:
    context, open_tab = contexts()
    tab = open_tab().hello("cpu", ready=False)
    tab.page.wait_for_function(
        "() => document.querySelector('[data-testid=progress]').value > 0.1 && document.querySelector('#amount').textContent"
    )
    tab.at("load").click()
    tab.wait("stopped")
    assert "cancelled" in tab.page.locator("#stage").text_content()
    assert tab.at("run").is_disabled() and tab.at("load").text_content() == "Load the model"
    tab.at("load").click()
    tab.wait("ready")
    files = tab.asked(".gguf")
    headers = [request.all_headers() for request in files]
    assert len(files) == 2 and "range" not in headers[0], headers
    start = int(headers[1]["range"].removeprefix("bytes=").rstrip("-"))
    assert 0 < start < 98_362_432
    assert headers[1]["if-range"].strip('"') == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    response = files[1].response()
    assert response is not None and response.status == 206
    context.close()


def test_a_file_with_the_wrong_sha256_is_refused_in_words(contexts: OpenContext, tiny: TinyModel) -> None:
    context, open_tab = contexts()
    tiny.serve(context, sha256="0" * 64)
    tab = open_tab().hello("cpu", TINY_URL, ready=False)
    tab.page.wait_for_selector("[data-testid=status][data-state=failed]")
    assert tab.at("error-type").text_content() == "The model's file is not the right one"
    assert "sha256" in tab.at("error-message").text_content()
    context.close()


def test_a_missing_model_is_told_in_words(contexts: OpenContext) -> None:
    context, open_tab = contexts()
    tab = open_tab().hello("cpu", "/models/none/manifest.json", ready=False)
    tab.page.wait_for_selector("[data-testid=status][data-state=failed]")
    assert tab.at("error-type").text_content() == "The network failed"
    assert "404" in tab.at("error-message").text_content()
    context.close()


def test_two_tabs_at_once_share_one_download(tiny_tabs: dict[str, Tab]) -> None:
    """Those that all tests share were opened at once, in a fresh profile; whatever was loaded in them since needs no bytes either."""
    first, second = tiny_tabs.values()
    assert first.value(GENERATE, {"prompt": [60, 61, 62], "n": 4}) == second.value(GENERATE, {"prompt": [60, 61, 62], "n": 4})
    assert len([request for request in first.requests if urlsplit(request.url).path.endswith("/tiny.gguf")]) == 1
    names = first.page.evaluate(FILES)
    assert names and not [name for name in names if "part" in name], f"left over: {names}"
