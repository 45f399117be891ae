"""Inferlets in real workers of a real browser: the language component, tokenizer and template beside it, and everything that ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from inferlet_sdk import examples
from pie_core.text.tokenizer import tokenizer_spec
from pie_core.weights import open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from pie_server.build.web import web_assets
from tests.support.tiny_gguf import write_tiny_gguf
from tests.web.bundles import bundle
from tests.web.site import site
from tests.web.text_fixtures import dumps, text_spec

HERE = Path(__file__).parent
HELLO = Path(examples.__path__[0]) / "hello.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    with open_gguf(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")) as checkpoint:
        return HfTokenizer(tokenizer_spec(checkpoint.metadata))


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page with the scripted engine, under the page's CSP; at /test/text.json the texts of a tiny model."""
    folder = tmp_path_factory.mktemp("bundle")
    bundle(HERE / "scripted_engine.ts", folder)
    with open_gguf(write_tiny_gguf(folder / "tiny.gguf")) as checkpoint:
        spec = tokenizer_spec(checkpoint.metadata)
        (folder / "text.json").write_text(dumps(text_spec(checkpoint.metadata, spec, HfTokenizer(spec))))
    (folder / "index.html").write_text('<!doctype html><title>tests</title><script type="module" src="/test/scripted_engine.js"></script>')
    with site({"/web/": web_assets(), "/test/": folder}) as origin:
        opened = browser.new_page()
        opened.goto(f"{origin}/test/index.html")
        opened.wait_for_function("globalThis.opened")
        assert opened.evaluate("crossOriginIsolated") is False
        yield opened
        opened.close()


POOL = "'/test/text.json', {stepSeconds: 1.5}"


@pytest.fixture
def pool(page: Page) -> Page:
    """The page with a pool, which other tests may have used."""
    page.evaluate(f"share({POOL})")
    return page


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page with a pool that nobody used."""
    page.evaluate(f"open({POOL})")
    return page


def run(page: Page, source: str, **job: Any) -> dict[str, Any]:
    ended: dict[str, Any] = page.evaluate("(job) => run(job)", {"source": source, **job})
    return ended


def test_the_seed_example_and_the_same_worker_again(fresh: Page) -> None:
    for _ in range(3):
        ended = run(fresh, HELLO.read_text())
        assert ended["answer"]["s"] == "done", ended
        assert ended["ops"]["submit"] == 8
        fresh.wait_for_function("() => instancesMade() >= 3")  # the first worker's, the one ahead of it, and the first worker's second
    assert fresh.evaluate("workersMade()") == 3, "the first worker served two runs, the second one, and the third waits"


def test_texts_are_answered_beside_the_inferlet(pool: Page, tokenizer: HfTokenizer) -> None:
    text = "hello world <|im_end|> 日本 😀 12"
    source = (
        "from inferlet import chat, model\n"
        "def main(i):\n    ids = model.encode(i['text'])\n    return [ids, model.decode(ids), chat.user('x'), chat.cue(), chat.seal()]"
    )
    ids, back, user, cue, seal = run(pool, source, input={"text": text})["answer"]["r"]
    assert (ids, back) == (tokenizer.encode(text), text)
    assert [tokenizer.decode(row) for row in (user, cue, seal)] == [
        "<|im_start|>user\nx<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ]


# More of them are compared with the server in e2e/test_engine.py
AUTHOR: list[tuple[str, str, int | None, str]] = [  # source, type, line (None: any), part of the message
    ("async def main(i):\n    x = 1\n    return 1 / 0", "ZeroDivisionError", 3, "division"),
    ("async def main(i):\n    x = (\n", "SyntaxError", 2, "never closed"),
    ("x = 1", "MainMissing", None, "main"),
    ("def main(i): return {1, 2}", "ResultNotJson", None, "set"),
    ("def main(i):\n    return open('/etc/passwd').read()", "FileNotFoundError", 2, "passwd"),
    ("import time\ndef main(i):\n    time.sleep(1)", "PermissionError", 3, "inferlet.sleep"),
    ("import socket\ndef main(i):\n    socket.create_connection(('127.0.0.1', 80))", "PermissionError", 3, "network"),
    ("def main(i):\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 20))", "MemoryError", 4, "memory limit"),
    ("from inferlet import send\ndef main(i):\n    while True: send('y' * 9000)", "BudgetExceeded", 3, "the cap is"),
    ("import asyncio\nasync def main(i):\n    await asyncio.Event().wait()", "Deadlock", 3, "waits"),
    ("import os\ndef main(i):\n    return os.listdir('/')", "FileNotFoundError", 3, "/"),
    ("from inferlet import chat\ndef main(i):\n    chat.render([{'role': 'robot', 'content': 'x'}])", "MessageError", 3, "robot"),
]


def test_errors_of_the_author_have_a_type_and_a_line(pool: Page) -> None:
    for source, kind, line, words in AUTHOR:
        ended = run(pool, source)
        assert "answer" in ended, (source, ended)
        error = ended["answer"]["e"]
        assert (error["type"], error["file"]) == (kind, "program.py"), error
        assert line is None or error["line"] == line, error
        assert words in error["message"]


FLOOD = """
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    while True:
        fwd = ForwardPass()
        fwd.embed([1])
        fwd.state([ws], StateGeometry.folding())
        fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
"""


def test_a_flood_of_submits_is_refused_at_the_authors_line(pool: Page) -> None:
    ended = run(pool, FLOOD)
    error = ended["answer"]["e"]
    assert (error["type"], error["line"]) == ("BudgetExceeded", 11)
    assert "passes outstanding: 64" in error["message"] and ended["ops"]["submit"] == 64


ENDED = [
    ("def main(i):\n    x = []\n    for _ in range(200000): x = [x]\n    return repr(x)", "StackLimitExceeded", "nested too deeply"),
    ("import json\ndef main(i): json.loads('[' * 100000)", "StackLimitExceeded", "deep data in json"),
    ("import _socket\ndef main(i): _socket.socket()", "GuestTrap", "wasi:sockets/tcp-create-socket#create-tcp-socket"),
    ("import select\ndef main(i): select.select([], [], [], 5)", "GuestTrap", "wasi:clocks/monotonic-clock#subscribe-duration"),
    ("def main(i): return 'x' * (17 << 20)", "OutputLimitExceeded", "16,777,216"),
]


def test_traps_end_the_inferlet_and_its_worker(pool: Page) -> None:
    for source, kind, words in ENDED:
        ended = run(pool, source)
        assert ended["fault"]["type"] == kind, (source, ended)
        assert words in ended["fault"]["message"]
        assert run(pool, "def main(i): return 1")["answer"]["r"] == 1, "the page goes on"


def test_the_watchdog_ends_an_endless_step_while_others_go_on(pool: Page) -> None:
    healthy = "import inferlet\nasync def main(i):\n    for n in range(20): await inferlet.sleep(0.02)\n    return 'well'"
    sources = ["def main(i):\n    while True: pass", *[healthy] * 4]
    bad, *good = pool.evaluate("(sources) => Promise.all(sources.map((source) => run({source})))", sources)
    assert bad["dead"]["type"] == "CpuBudgetExceeded" and "without awaiting; the limit is 1.5 s" in bad["dead"]["message"]
    assert [ended["answer"]["r"] for ended in good] == ["well"] * 4


def test_eight_at_once_do_not_mix(pool: Page) -> None:
    source = (
        "import inferlet\nasync def main(i):\n    kept = []\n"
        "    for n in range(5):\n        await inferlet.sleep(0.01)\n"
        "        kept.append(i['me'])\n        inferlet.send(i['me'])\n    return kept"
    )
    jobs = [{"source": source, "input": {"me": n}} for n in range(8)]
    ended = pool.evaluate("(jobs) => Promise.all(jobs.map(run))", jobs)
    assert [row["answer"]["r"] for row in ended] == [[n] * 5 for n in range(8)]
    assert [row["sent"] for row in ended] == [[n] * 5 for n in range(8)]


def test_a_cancelled_run_frees_its_place(page: Page) -> None:
    page.evaluate("open('/test/text.json', {most: 1})")
    endless = "import inferlet\nasync def main(i):\n    while True: await inferlet.sleep(0.01)"
    ended = page.evaluate(
        "(jobs) => Promise.all(jobs.map(run))", [{"source": endless, "cancelAfter": 300}, {"source": "def main(i): return 'next'"}]
    )
    assert ended[0]["cancelled"] and ended[1]["answer"]["r"] == "next"


def test_nothing_of_one_run_is_seen_by_the_next(fresh: Page) -> None:
    first = "import sys, json\ndef main(i):\n    json.secret = 'secret'\n    sys.modules['leak'] = json\n    return 1"
    assert run(fresh, first)["answer"]["r"] == 1
    second = "import sys, json\ndef main(i):\n    return [hasattr(json, 'secret'), 'leak' in sys.modules]"
    for _ in range(3):
        assert run(fresh, second)["answer"]["r"] == [False, False]


def test_a_component_that_cannot_be_fetched_is_an_error_in_words(page: Page) -> None:
    page.route("**/component.core9.wasm", lambda route: route.fulfill(status=503))
    try:
        message = page.evaluate("open('/test/text.json', {}).then(() => 'ready', (error) => `${error.name}: ${error.message}`)")
    finally:
        page.unroute("**/component.core9.wasm")
    assert message.startswith("NetworkError: component.core9.wasm of the language component could not be fetched: 503"), message
