"""The engine in the page over a tiny model, on both devices: forks, batches, device-fed loops, cancels, endless programs, a lost device."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from e2e.conftest import Tab, TinyModel
from e2e.programs import DEVICE_FED, FORK, FORKS, GENERATE, HEAD, HELLO, RAISES, REFUSED, REUSE
from pie_core.host.deadlock import NOBODY_SENDS
from pie_server.api.backend import InferletError
from pie_server.config import Settings
from pie_server.service import Service

pytestmark = pytest.mark.timeout(300)
PROMPT = [60, 61, 62, 63, 64]
Native = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def native(tiny: TinyModel) -> Iterator[Native]:
    """The same program on the server's cpu device: the same kernels, so the same tokens. Raises the server's InferletError."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="native", daemon=True)  # Playwright's own loop runs in this one
    thread.start()

    def done(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    service = Service.from_settings(Settings(model=str(tiny.path), device="cpu", kv_pool_mb=8))
    done(service.load())
    yield lambda source, input: done(service.run(source, "inferlet.py", input, _nobody))
    done(service.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _nobody(_: Any) -> None:
    pass


PARITY = [
    pytest.param(HELLO, {"prompt": "hello world"}, id="seed example"),
    pytest.param(FORK, {"prompt": "hello world", "branches": 2, "max_tokens": 4, "seed": 7}, id="fork example"),
    pytest.param(FORKS, {"prompt": PROMPT * 4, "firsts": [70, 71, 72], "n": 4}, id="forks"),
    pytest.param(DEVICE_FED, {"prompt": PROMPT, "n": 12}, id="device-fed"),
    pytest.param(GENERATE, {"prompt": list(range(40, 140)), "n": 4}, id="long prompt"),
    pytest.param(REUSE, {"prompt": list(range(100, 150))}, id="prefix reuse"),
    pytest.param(REFUSED, {}, id="calls that are refused"),
]


@pytest.mark.parametrize(("source", "input"), PARITY)
def test_a_program_returns_what_it_returns_on_the_server(tiny_tab: Tab, native: Native, source: str, input: Any) -> None:
    assert tiny_tab.value(source, input) == native(source, input)


def test_forks_equal_fresh_runs_of_the_same_tokens(tiny_tab: Tab) -> None:
    found = tiny_tab.value(FORKS, {"prompt": PROMPT * 4, "firsts": [70, 71, 72], "n": 4})
    assert found["forked"] == found["alone"] and len({tuple(g) for g in found["forked"]}) > 1


def test_a_device_fed_loop_equals_one_through_the_host(tiny_tab: Tab) -> None:
    fed = tiny_tab.value(DEVICE_FED, {"prompt": PROMPT, "n": 12})
    assert fed["tokens"] == tiny_tab.value(GENERATE, {"prompt": PROMPT, "n": 12})["tokens"]


def test_four_inferlets_at_once_equal_their_solo_runs_and_share_steps(tiny_tab: Tab) -> None:
    inputs = [{"prompt": [*PROMPT, 80 + i], "n": 40} for i in range(4)]  # long beside the time that workers take to begin
    alone = [tiny_tab.value(GENERATE, each)["tokens"] for each in inputs]
    steps = []
    for _ in range(8):  # a busy machine may be late for the scheduler's linger
        before = tiny_tab.engine()
        found = tiny_tab.page.evaluate(
            "([source, inputs]) => Promise.all(inputs.map((input) => window.pieHello.pie.run(source, {input})))", [GENERATE, inputs]
        )
        after = tiny_tab.engine()
        assert [each["tokens"] for each in found] == alone
        assert after["pages_used"] == 0 and after["instances"] == 0
        steps.append(after["steps"] - before["steps"])
        if steps[-1] <= 120:
            break
    assert min(steps) <= 120, f"{steps} steps: 40 would do, 160 are no sharing at all"


def test_cancel_frees_pages(tiny_tab: Tab) -> None:
    ended = tiny_tab.page.evaluate(
        """async ([source, input]) => {
          const control = new AbortController(), {pie} = window.pieHello;
          let sent = 0, held = 0;
          const run = pie.run(source, {input, signal: control.signal, onMessage: () => { if (++sent === 3) control.abort(); }});
          try { await run; return null; } catch (error) {
            for (let i = 0; i < 100 && (held = (await pie.stats()).engine.pages_used) > 0; i++) await new Promise((r) => setTimeout(r, 50));
            return {name: error.name, held};
          }
        }""",
        [GENERATE, {"prompt": PROMPT, "n": 400, "send": True}],
    )
    assert ended == {"name": "Cancelled", "held": 0}
    assert tiny_tab.engine()["instances"] == 0
    assert tiny_tab.value(GENERATE, {"prompt": PROMPT, "n": 2})["tokens"]


def test_an_error_of_the_program_names_its_line(tiny_tab: Tab) -> None:
    found = tiny_tab.run(RAISES)
    error = found["error"]
    assert (error["name"], error["type"], error["message"], error["line"]) == ("InferletError", "ValueError", "what went wrong", 5)
    assert found["messages"] == ["before"]


FAILS_ITS_PASS = (
    HEAD
    + """
async def main(input):
    fwd = ForwardPass()
    fwd.embed([10 ** 6])
    fwd.state([WorkingSet()], StateGeometry.folding())
    out = fwd.epilogue(GREEDY)
    Pipeline().submit(fwd)
    return await out
"""
)
INBOX = """
import inferlet
from inferlet.errors import Deadlock

async def main(input):
    if not input["open"]:
        try:
            return await inferlet.receive()
        except Deadlock as error:
            return str(error)
    inferlet.send("ready")
    await inferlet.sleep(0.5)
    got = [await inferlet.receive() for _ in range(1024)]
    inferlet.send("go on")
    return [sum(got), await inferlet.receive()]
"""


def test_messages_that_nobody_receives_are_refused_to_the_sender(tiny_tab: Tab) -> None:
    """The inferlet goes on. Where nobody sends, it is told."""
    found = tiny_tab.page.evaluate(
        """async (source) => {
          const {pie} = window.pieHello, told = [];
          const run = pie.run(source, {input: {open: true}, onMessage: (text) => {
            if (text === "go on") return void run.send(7);
            try { for (let n = 0; n < 2000; n++) run.send(1); } catch (error) { told.push(error.name, error.message); }
          }});
          told.push(await run);
          const closed = pie.run(source, {input: {open: false}, receives: false});
          try { closed.send(1); } catch (error) { told.push(error.name); }
          return [...told, await closed];
        }""",
        INBOX,
    )
    full = "run.send: 1,024 values wait to be received, which is the cap; send more once the program has received some"
    assert found == ["PieError", full, [1024, 7], "UsageError", NOBODY_SENDS]


def test_deep_json_is_refused_and_the_engine_goes_on(cpu_tab: Tab) -> None:
    found = cpu_tab.page.evaluate(
        """async () => {
          const {pie} = window.pieHello, told = [], tell = (error) => told.push(error.name, error.message);
          const deep = (levels) => JSON.parse("[".repeat(levels) + "]".repeat(levels));
          for (const levels of [5000, 5000, 200]) await pie.run("async def main(i): return 1", {input: deep(levels)}).catch(tell);
          const run = pie.run("import inferlet\\nasync def main(i): return await inferlet.receive()");
          try { run.send(deep(5000)); } catch (error) { tell(error); }
          run.send(deep(199));
          return [told, JSON.stringify(await run).length, (await pie.stats()).engine.instances];
        }"""
    )
    refused = ["UsageError", "pie.run: input is nested deeper than 199 levels; give a flatter one"]
    assert found == [[*refused * 3, "UsageError", "run.send: the value is nested deeper than 199 levels; give a flatter one"], 398, 0]


DEADLOCK = HEAD + "async def main(input):\n    await asyncio.get_running_loop().create_future()\n"


def test_the_console_stays_clean_however_a_program_ends(tiny_tab: Tab) -> None:
    before = len(tiny_tab.console)
    for source in (RAISES, FAILS_ITS_PASS, DEADLOCK, "no python"):
        assert tiny_tab.run(source)["error"]["name"] == "InferletError"
    stopped = """async ([source, input]) => {
      const control = new AbortController();
      const run = window.pieHello.pie.run(source, {input, signal: control.signal, onMessage: () => control.abort()});
      return run.catch((error) => error.name);
    }"""
    assert tiny_tab.page.evaluate(stopped, [GENERATE, {"prompt": PROMPT, "n": 400, "send": True}]) == "Cancelled"
    tiny_tab.page.wait_for_function("() => window.pieHello.pie.stats().then((s) => s.engine.instances === 0)")
    assert tiny_tab.console[before:] == []


FULL_RING = """
async def main(input):
    ws, pipe, kept = WorkingSet(), Pipeline(), Channel("i32", (), 1)

    def step():
        best = reduce_argmax(intrinsics.output(0, "logits"))
        kept.put(best)
        return best

    outs = []
    for token in (5, 6):
        fwd = ForwardPass()
        fwd.embed([token])
        fwd.state([ws], StateGeometry.folding())
        outs.append(fwd.epilogue(step))
        pipe.submit(fwd)
    await outs[0]
    await outs[1]
"""
# Body behind HEAD, type, text of the author's line (None: ended from outside)
LIMITED = {
    "deadlock of a pass": (FULL_RING, "Deadlock", "    await outs[1]"),
    "id out of range": (FAILS_ITS_PASS.removeprefix(HEAD), "InvalidPass", None),
    "pipelines": ("def main(i):\n    kept = [Pipeline() for _ in range(4097)]", "BudgetExceeded", "    kept ="),
    "cells": ("async def main(i):\n    await Channel('f32', (1 << 20,), 4).take()", "BudgetExceeded", "    await"),
    "printed": ("def main(i):\n    while True: print('y' * 9000)", "BudgetExceeded", "    while True"),
    "encoded": ("def main(i):\n    model.encode('x' * 1_000_001)", "TokenizerError", "    model.encode("),
    "one call": ("def main(i):\n    send('x' * (17 << 20))", "OutputLimitExceeded", "    send("),
    "result": ("def main(i):\n    return 'x' * (17 << 20)", "OutputLimitExceeded", None),
    "memory": ("def main(i):\n    return bytearray(1 << 30)", "MemoryError", "    return"),
    "a text that grows": ("def main(i):\n    s = 'ab'\n    while True: s = s + s", "MemoryLimitExceeded", None),
    "stack": ("def main(i):\n    x = []\n    for _ in range(200000): x = [x]\n    return repr(x)", "StackLimitExceeded", None),
    "calls": ("def f(n): return f(n + 1)\ndef main(i):\n    return f(0)", "RecursionError", "def f(n)"),
    "WASI": ("import select\ndef main(i): select.select([], [], [], 5)", "GuestTrap", None),
}


@pytest.mark.parametrize("name", LIMITED)
def test_what_ends_a_program_is_what_ends_it_on_the_server(cpu_tab: Tab, native: Native, name: str) -> None:
    body, kind, marked = LIMITED[name]
    source = HEAD + body
    with pytest.raises(InferletError) as ended:
        native(source, {})
    there, here = ended.value, cpu_tab.run(source)["error"]
    assert (here["type"], here["line"]) == (there.kind, there.line), (here, there)
    assert here["type"] == kind
    if marked is not None:
        assert source.splitlines()[here["line"] - 1].startswith(marked)
    said = re.sub(r"@[0-9.]+#", "#", there.message).replace("its stack of 2 MiB", "its stack")  # a browser's stack has a size of its own
    assert here["message"] == said
    assert cpu_tab.engine()["pages_used"] == 0


@pytest.mark.parametrize("kind", ["webgpu"])
def test_a_lost_gpu_process_is_an_error_in_words(browser: Browser, tiny_tab: Tab) -> None:
    """Last of all: every tab of the browser shares the process."""
    tab = tiny_tab
    assert tab.value(GENERATE, {"prompt": PROMPT, "n": 1})["tokens"]
    browser.new_browser_cdp_session().send("Browser.crashGpuProcess")
    tab.wait("failed")
    assert tab.at("error-type").text_content() == "The device was lost"
    assert "WebGPU device was lost, and every run with it; load again" in tab.at("error-message").text_content()
    assert tab.at("run").is_disabled()
    tab.at("load").click()  # a new load finds the new GPU process
    tab.wait("ready")
    assert tab.value(GENERATE, {"prompt": PROMPT, "n": 1})["tokens"]
