"""The API of pie.js as another page would use it: signals, dispose in every state, several at once, a worker that dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from e2e.conftest import TINY_URL, OpenContext, TinyModel
from e2e.programs import GENERATE

pytestmark = pytest.mark.timeout(300)

# Names for the scripts below, and a look at an error.
SETUP = f"""async () => {{
  const {{Pie, ...errors}} = await import('/web/pie.js');
  const load = (more = {{}}) => Pie.load({{model: '{TINY_URL}', device: 'cpu', ...more}});
  const caught = (promise) => promise.then((value) => ({{value}}), (error) => ({{name: error.name, type: error.type, message: error.message,
    cause: error.cause && String(error.cause), kind: errors[error.name] && error instanceof errors[error.name]}}));
  const uncaught = [];
  addEventListener('error', ({{message}}) => uncaught.push(message));
  addEventListener('unhandledrejection', ({{reason}}) => uncaught.push(String(reason)));
  const ECHO = 'async def main(input):\\n    return input\\n';
  const ENDLESS = 'async def main(input):\\n    while True:\\n        pass\\n';
  const SENDS = 'from inferlet import send\\nasync def main(input):\\n    for i in range(3):\\n        send(i)\\n    return "end"\\n';
  Object.assign(globalThis, {{Pie, errors, load, caught, uncaught, ECHO, ENDLESS, SENDS}});
}}"""


@pytest.fixture(scope="module")
def page(contexts: OpenContext, tiny: TinyModel) -> Iterator[Page]:
    """An empty page of the server's origin, under the policy of its files, with one Pie in `pie`."""
    context, open_tab = contexts()
    tiny.serve(context)
    tab = open_tab()
    tab.page.goto(f"{tab.origin}/web/hello/icon.svg")
    tab.page.evaluate(SETUP)
    tab.page.evaluate("async () => { globalThis.pie = await load({stepSeconds: 3}) }")
    yield tab.page


def do(page: Page, script: str) -> Any:
    """What the body of an async function returns."""
    return page.evaluate(f"async () => {{ {script} }}")


def test_many_runs_at_once_keep_their_inputs_and_messages_apart(page: Page) -> None:
    script = """return Promise.all([1, 2, 3, 4, 5, 6].map(async (n) => {
      const seen = [];
      const result = await pie.run(n % 2 ? ECHO : SENDS, {input: n, onMessage: (m) => seen.push(m)});
      return [result, seen];
    }))"""
    assert do(page, script) == [[n, []] if n % 2 else ["end", [0, 1, 2]] for n in range(1, 7)]


def test_a_signal_ends_a_run_at_once_and_others_go_on(page: Page) -> None:
    script = """const control = new AbortController();
      const endless = caught(pie.run(ENDLESS, {signal: control.signal}));
      const other = pie.run(ECHO, {input: 'other'});
      await new Promise((resolve) => setTimeout(resolve, 300));
      control.abort();
      const began = performance.now();
      return [await endless, performance.now() - began, await other, await caught(pie.run(ECHO, {signal: control.signal}))]"""
    endless, took, other, before = do(page, script)
    assert endless["name"] == before["name"] == "Cancelled" and endless["kind"] is True
    assert took < 500 and other == "other"


def test_an_endless_program_is_ended_while_others_go_on(page: Page) -> None:
    script = """const started = performance.now();
      let ended = null;
      const bad = caught(pie.run(ENDLESS)).then((what) => { ended = {...what, ms: performance.now() - started}; });
      const good = [];
      while (ended === null && good.length < 500) good.push((await pie.run(source, {input})).tokens);
      await bad;
      return {ended, good, after: (await pie.run(source, {input})).tokens, instances: (await pie.stats()).engine.instances}"""
    given = {"source": GENERATE, "input": {"prompt": [60, 61, 62, 63, 64], "n": 4}}
    found = page.evaluate(f"async ({{source, input}}) => {{ {script} }}", given)
    assert found["ended"]["type"] == "CpuBudgetExceeded" and "the limit is 3 s" in found["ended"]["message"]
    assert 3_000 < found["ended"]["ms"] < 60_000
    assert len(found["good"]) >= 2 and all(tokens == found["after"] for tokens in found["good"])
    assert found["instances"] == 0


TALKS = """
from inferlet import receive, send

async def main(input):
    got = []
    for _ in range(input):
        got.append(await receive())
        send(len(got))
    return got
"""


def test_a_run_receives_what_is_sent_to_it_in_order_also_before_it_started(page: Page) -> None:
    script = """const run = pie.run(TALKS, {input: 4, onMessage: (n) => { if (n === 2) { run.send(null); run.send('ü'); } }});
      const early = [run.send({a: [1]}), run.send(2)];
      return [early, await run, run.send('late')]"""
    assert do(page, f"const TALKS = {TALKS!r}; {script}") == [[True, True], [{"a": [1]}, 2, None, "ü"], False]


def test_runs_at_once_receive_their_own_values(page: Page) -> None:
    script = """const runs = [0, 1, 2].map(() => pie.run(TALKS, {input: 2}));
      for (const value of ['a', 'b']) runs.forEach((run, i) => run.send(value + i));
      return Promise.all(runs)"""
    assert do(page, f"const TALKS = {TALKS!r}; {script}") == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


def test_what_cannot_be_sent_is_told(page: Page) -> None:
    script = """const control = new AbortController(), run = pie.run(TALKS, {input: 1, signal: control.signal});
      const caughtNow = (value) => { try { run.send(value); } catch (error) { return [error.name, error.message]; } };
      const loop = {};
      loop.itself = loop;
      const bad = [caughtNow(undefined), caughtNow(() => 1), caughtNow(loop), caughtNow(1n)];
      const refused = pie.run(5);
      const ended = await caught(refused);
      control.abort();
      await caught(run);
      return {bad, ended: ended.name, late: [refused.send(1), run.send(1)]}"""
    found = do(page, f"const TALKS = {TALKS!r}; {script}")
    assert {name for name, _ in found["bad"]} == {"UsageError"}
    shown = ["undefined; it must be", "a function; it must be", "an object; it must be", "1n, which JSON cannot carry"]
    assert all(message.startswith(f"run.send: the value is {words}") for (_, message), words in zip(found["bad"], shown, strict=True))
    assert not any("\n" in message for _, message in found["bad"])
    assert (found["ended"], found["late"]) == ("UsageError", [False, False])


def test_a_value_that_nobody_receives_is_refused_to_its_sender_at_the_cap(page: Page) -> None:
    script = """const control = new AbortController();
      const run = pie.run('import inferlet\\nasync def main(i):\\n    await inferlet.sleep(60)', {signal: control.signal});
      let refused = null, n = 0;
      try { for (; n < 1025; n++) run.send(n); } catch (error) { refused = [error instanceof errors.PieError, error.message]; }
      control.abort();
      return [n, refused, (await caught(run)).name]"""
    count, (kind, message), ended = do(page, script)
    assert (count, kind, ended) == (1024, True, "Cancelled") and "1,024 values wait" in message


THROWS = "() => { throw new RangeError('mine') }"
REJECTS = "async () => { throw new RangeError('mine') }"
LATE = "async () => { await new Promise((resolve) => setTimeout(resolve, 100)); throw new RangeError('mine') }"
WAITS = "async def main(i):\\n    print(1)\\n    import inferlet\\n    await inferlet.sleep(60)"


@pytest.mark.parametrize(
    "call",
    [
        *(f"pie.run(SENDS, {{onMessage: {how}}})" for how in (THROWS, REJECTS, LATE)),
        *(f"pie.run('{WAITS}', {{onLog: {how}}})" for how in (THROWS, REJECTS, LATE)),
        *(f"load({{onProgress: {how}}})" for how in (THROWS, REJECTS)),
    ],
)
def test_what_a_callback_fails_with_ends_its_run_or_load(page: Page, call: str) -> None:
    found, uncaught = do(page, f"uncaught.length = 0; return [await caught({call}), uncaught]")
    assert (found["name"], found["message"], uncaught) == ("RangeError", "mine", [])


def test_a_run_waits_for_the_promises_of_its_callbacks_and_is_told_why_it_was_cancelled(page: Page) -> None:
    script = """const seen = [];
      const onMessage = async (n) => { await new Promise((resolve) => setTimeout(resolve, 50)); seen.push(n); };
      const value = await pie.run(SENDS, {onMessage});
      const control = new AbortController();
      const endless = caught(pie.run(ENDLESS, {signal: control.signal}));
      control.abort(new RangeError('why'));
      return [value, seen, await endless, await caught(pie.run(ENDLESS, {signal: AbortSignal.timeout(100)})),
        await caught(load({signal: AbortSignal.timeout(100)}))]"""
    value, seen, why, *timeouts = do(page, script)
    assert (value, seen) == ("end", [0, 1, 2])
    assert (why["name"], why["message"], why["cause"]) == ("Cancelled", "the run was cancelled: why", "RangeError: why")
    assert [(each["name"], each["cause"].partition(":")[0]) for each in timeouts] == [("Cancelled", "TimeoutError")] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("pie.run(5)", "the program's source is 5; it must be a text"),
        ("pie.run(ECHO, null)", "pie.run: the options are null; they must be an object"),
        ("pie.run(ECHO, {onmessage: () => 1})", 'there is no option "onmessage"; there are input, name, receives, onMessage'),
        ("pie.run(ECHO, {onMessage: 5})", "onMessage is 5; it must be a function"),
        ("pie.run(ECHO, {signal: {}})", "signal is {}; it must be the signal of an AbortController"),
        ("pie.run(ECHO, {name: 5})", "name is 5; it must be a text"),
        ("pie.prepare({})", "it takes no arguments"),
        ("pie.run(ECHO, {input: () => 1})", "must be a JSON value"),
        ("load({device: 'abacus'})", 'device is "abacus"; it must be "auto", "webgpu" or "cpu"'),
        ("load({model: 'http://['})", 'model is "http://["; it must be a URL'),
        ("load({base: '/nowhere/'})", "could not be started"),
    ],
)
def test_wrong_calls_say_what_is_wrong(page: Page, call: str, words: str) -> None:
    found = do(page, f"return caught({call})")
    assert found["name"] == ("LoadError" if "nowhere" in call else "UsageError") and words in found["message"], found


def test_a_load_is_cancelled_at_once_and_the_next_one_works(page: Page) -> None:
    script = """const control = new AbortController();
      const stages = [];
      const loading = caught(load({signal: control.signal, onProgress: ({stage}) => { stages.push(stage); control.abort(); }}));
      const began = performance.now();
      const before = await caught(load({signal: AbortSignal.abort()}));
      return [await loading, before, stages, performance.now() - began]"""
    loading, before, stages, took = do(page, script)
    assert loading["name"] == before["name"] == "Cancelled" and len(stages) == 1 and took < 5000
    again = """const next = await load();
      const got = await next.run(ECHO, {input: 7});
      await next.dispose();
      return [got, await pie.run(ECHO, {input: 8})]"""
    assert do(page, again) == [7, 8]  # beside the one that was there: they share nothing


def test_a_load_may_include_the_language_component_which_the_first_run_fetches_else(page: Page) -> None:
    script = """const stages = [], onProgress = ({stage}) => { if (stages.at(-1) !== stage) stages.push(stage); };
      [globalThis.prepared, globalThis.bare] = await Promise.all([load({prepare: true, onProgress}), load()]);
      return stages"""
    stages = do(page, script)
    assert stages[-1] == "component"
    page.context.set_offline(True)
    try:
        ran, failed = do(page, "return Promise.all([prepared, bare].map((each) => caught(each.run(ECHO, {input: 7}))))")
    finally:
        page.context.set_offline(False)
        do(page, "await prepared.dispose(); await bare.dispose()")
    assert ran == {"value": 7}
    assert failed["name"] in ("LoadError", "NetworkError"), failed


def test_dispose_ends_what_runs_and_refuses_what_comes(page: Page) -> None:
    script = """const own = await load();
      const running = [caught(own.run(ENDLESS)), caught(own.run(ECHO))];
      const gone = [own.dispose(), own.dispose()];
      const late = await caught(own.run(ECHO));
      const ended = await Promise.all(running);
      await Promise.all(gone);
      return {ended, late, stats: await caught(own.stats()), failed: (await own.failed).name, info: own.info().model.name}"""
    found = do(page, script)
    assert {run["name"] for run in found["ended"]} == {"Cancelled"}
    assert "disposed" in found["late"]["message"] and found["stats"]["name"] == "Cancelled"
    assert found["failed"] == "Cancelled" and found["info"] == "tiny"


def test_an_engine_worker_that_dies_ends_its_runs_with_an_error(page: Page) -> None:
    script = """const Real = Worker;
      let engine = null;
      globalThis.Worker = class extends Real {
        constructor(url, options) {
          super(url, options);
          if (options.name === 'pie engine') engine = this;
        }
      };
      const own = await load();
      globalThis.Worker = Real;
      const running = caught(own.run(ENDLESS));
      await new Promise((resolve) => setTimeout(resolve, 100));
      engine.dispatchEvent(new ErrorEvent('error', {message: 'out of memory', cancelable: true}));
      const late = await caught(own.run(ECHO));
      const found = {running: await running, late, failed: (await own.failed).message};
      await own.dispose();
      return found"""
    found = do(page, script)
    assert found["running"]["message"] == found["late"]["message"] == found["failed"] == "the engine worker failed: out of memory"


README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_example(page: Page, tiny: TinyModel) -> None:
    """As a script of the origin, over the tiny model in place of the server's own; beside it the same with a program that fails."""
    (block,) = re.findall(r"^```js\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    scripts = {"/web/shown.js": block, "/web/failing.js": block.replace("await receive()", "await receive() / 2")}
    assert scripts["/web/failing.js"] != block
    said: dict[str, list[str]] = {path: [] for path in scripts}
    listen = lambda message: said[urlsplit(message.location["url"]).path].append(message.text)  # noqa: E731  one object to take away again
    page.on("console", listen)
    page.route(re.compile("/models/default/manifest.json$"), lambda route: route.fulfill(json=tiny.manifest))
    page.route(re.compile("/models/default/tiny.gguf$"), lambda route: route.fulfill(body=tiny.data))
    found = re.compile("/web/(shown|failing).js$")
    page.route(found, lambda route: route.fulfill(content_type="text/javascript", body=scripts[urlsplit(route.request.url).path]))
    page.evaluate("paths => Promise.all(paths.map((path) => import(path))).then(() => null)", [*scripts])
    page.remove_listener("console", listen)
    assert any(re.fullmatch(r"weights \d+ \d+", line) for line in said["/web/shown.js"]), said
    shown, failing = ([line for line in lines if not re.fullmatch(r"[a-z]+ \d+ \d+", line)] for lines in said.values())
    assert shown[:1] == ["Hello, page"] and "heard" in shown[1] and len(shown) == 2
    assert failing == ["Hello, page", "TypeError, line 6: unsupported operand type(s) for /: 'str' and 'int'"]
