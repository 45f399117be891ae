"""The page, measured in headless Chromium: start, bytes, decode against a bare replay, overhead a step, memory over 50 generations.

The engine worker is the product's, except that its Python can be reached, so that the replay runs in the same worker. On SwiftShader
(--device webgpu) a step takes a quarter of a second, so fewer tokens are measured there, and the first step of a width compiles its
kernels for seconds, so each width runs once before it is measured. Overhead a step is wall time less the device's (calls of the cpu
module; from a step's commands to its read-back on webgpu), as it was for the sketch whose figures are the targets.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import BrowserContext, Page, Route

from bench.report import Report, arguments
from pie_server.build.web import WEB, web_assets
from tests.server.conftest import pie_serve
from tests.web.browser import chromium
from tests.web.bundles import bundle

ROOT = Path(__file__).parents[1]
REPLAY = (ROOT / "bench" / "replay.py").read_text()
PEERS = "peers in the same browser (facts/webgpu.md): transformers.js WASM fp32 39 tok/s, WASM q8 32-35, WebGPU q4 0.22; wllama 8-12"
CHAIN = {"cpu": {1: 0.9, 4: 1.9, 8: 2.9}, "webgpu": {1: 1.6, 4: 2.6, 8: 4.1}}  # ms a step with so many inferlets, of the sketch
READY_MS = 240_000
PARTS = ("start", "decode", "memory")
GENERATIONS, SAMPLES = 50, 6  # of the memory figures

GENERATE = """
from inferlet import send
from inferlet.eta import *

async def main(input):
    ws, pipe, feed = WorkingSet(), Pipeline(), [input["first"]]
    for k in range(input["n"]):
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        feed = [await out]
        if k == 2:
            send("steady")
    pipe.close()
    return feed
"""

# Counters and clock between "all are steady" and "the first has ended"
MEASURE = """async ([source, count, n]) => {
  const {pie} = window.pieHello;
  const look = async () => {
    const {engine, deviceMs} = await pie.stats();
    return {at: performance.now(), ms: deviceMs, steps: engine.steps};
  };
  const tasks = [];
  const watch = new PerformanceObserver((list) => tasks.push(...list.getEntries().map((e) => e.duration)));
  watch.observe({type: "longtask"});
  let steady = 0, begin;
  const all = new Promise((ok) => { begin = ok; });
  const onMessage = () => { if (++steady === count) begin(); };
  const runs = Array.from({length: count}, (_, i) => pie.run(source, {input: {first: 100 + i, n}, onMessage}));
  await all;
  const a = await look();
  await Promise.race(runs);
  const b = await look();
  await Promise.all(runs);
  await new Promise((ok) => setTimeout(ok, 50));
  watch.disconnect();
  return {wall: b.at - a.at, device: b.ms - a.ms, steps: b.steps - a.steps, longest: Math.max(0, ...tasks)};
}"""

BARE = (
    REPLAY
    + """
import gc
import statistics

from pie_core.engine.loop import Engine

async def bare(tokens, rounds):
    gc.unfreeze()  # the page froze what it began with, and the collector knows only what is not
    [engine] = [thing for thing in gc.get_objects() if isinstance(thing, Engine)]
    gc.freeze()
    runner = engine.runner
    replay = Replay(runner, greedy(runner))
    steps = [packed_step(replay.program, 8 + i, [100 + i], first_page=64) for i in range(tokens)]
    await replay.steps(steps[:2], 1)
    return statistics.median([await replay.steps(steps, 1) for _ in range(rounds)]) / tokens
"""
)


def tapped_worker(folder: Path) -> Path:
    """The engine worker with its Python in reach."""
    return bundle(WEB / "src" / "engine" / "worker.ts", folder, ROOT / "tests" / "web" / "runtime_tap.ts")


def open_hello(context: BrowserContext, origin: str, device: str) -> tuple[Page, float]:
    """The page once it is ready, and seconds since the navigation."""
    page = context.new_page()
    page.set_default_timeout(READY_MS)
    start = time.perf_counter()
    page.goto(f"{origin}/hello?device={device}")
    page.wait_for_selector("[data-testid=status]:is([data-state=ready], [data-state=failed])")
    seconds = time.perf_counter() - start
    if page.get_by_test_id("status").get_attribute("data-state") == "failed":
        raise RuntimeError(page.get_by_test_id("error-message").text_content())
    return page, seconds


def device_name(page: Page) -> str:
    """What the page runs on."""
    return str(page.evaluate("window.pieHello.pie.info().device.name"))


def replay(page: Page, tokens: int, rounds: int = 3) -> float:
    """Seconds a step of the bare plans, in the engine's own worker."""
    for worker in page.workers:
        if "engine.worker" in worker.url:
            source = json.dumps(BARE)
            run = f"(async () => {{ python.runPython({source}); return await python.globals.get('bare')({tokens}, {rounds}); }})()"
            return float(worker.evaluate(run))
    raise RuntimeError("the page has no engine worker")


def bytes_by_part(paths: set[str], assets: Path, report: Report) -> None:
    """What a cold visit fetches until its first token, by part, raw and as brotli."""
    parts: dict[str, list[float]] = {}
    for path in sorted(paths):
        name = "hello.html" if path == "/hello" else path.removeprefix("/web/")
        file = assets / name
        if not file.is_file():
            continue
        encoded = file.with_name(file.name + ".br")
        part = name.split("/")[0] if "/" in name else ("kernels" if name.endswith(".wasm") else "scripts")
        sizes = parts.setdefault("scripts" if part == "hello" else part, [0.0, 0.0])
        sizes[0] += file.stat().st_size / 1e6
        sizes[1] += (encoded if encoded.is_file() else file).stat().st_size / 1e6
    for part, (raw, brotli) in sorted(parts.items()):
        report.add(f"bytes, {part}, raw MB", raw)
        report.add(f"bytes, {part}, brotli MB", brotli)
    report.target("bytes before the first token without the model, brotli MB", sum(b for _, b in parts.values()), "<=", 11)


def resident() -> dict[str, float]:
    """MB of the renderers and of the GPU process of the browser below this process."""
    total = {"renderer": 0.0, "gpu-process": 0.0}
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            for kind in total:
                if f"--type={kind}" in line:
                    total[kind] += child.memory_info().rss / 1e6
        except psutil.Error:  # it ended
            continue
    return total


def start_figures(context: BrowserContext, origin: str, device: str, assets: Path, report: Report) -> None:
    """Cold and warm start, and what comes over the wire."""
    fetched: set[str] = set()
    context.on("request", lambda request: fetched.add(request.url.removeprefix(origin).partition("?")[0]))
    page, cold = open_hello(context, origin, device)
    page.evaluate("(source) => window.pieHello.pie.run(source, {input: {first: 1, n: 1}})", GENERATE)
    report.add("cold start to ready, s", cold)
    report.device = device_name(page)
    bytes_by_part(fetched, assets, report)
    page.close()
    starts = []
    for _ in range(3):
        page, seconds = open_hello(context, origin, device)
        starts.append(seconds)
        page.close()
    report.target("warm start to ready, s", min(starts), "<=", 8)


def decode_figures(page: Page, device: str, tokens: int, report: Report) -> None:
    """The chain of workers against the bare plans, and its overhead."""
    trivial = "async def main(input):\n    return 1\n"
    timed = "async (s) => { const t = performance.now(); await window.pieHello.pie.run(s); return performance.now() - t; }"
    page.evaluate("() => window.pieHello.pie.prepare()")
    news = []
    for _ in range(8):
        page.wait_for_timeout(300)  # the pool makes the next worker ready
        news.append(page.evaluate(timed, trivial))
    report.target("a new Python inferlet, ms", statistics.median(news), "<=", 80)
    page.evaluate(MEASURE, [GENERATE, 1, 6])
    ratios, speeds = [], []
    for _ in range(3):
        bare = replay(page, tokens)
        found = page.evaluate(MEASURE, [GENERATE, 1, tokens + 4])
        step = found["wall"] / 1e3 / max(1, found["steps"])
        ratios.append(bare / step)
        speeds.append((1 / step, 1 / bare))
    report.add("decode tok/s, one inferlet", max(s for s, _ in speeds))
    report.add("decode tok/s, bare replay", max(b for _, b in speeds))
    report.target("decode / bare replay", statistics.median(ratios), ">=", 0.85)
    longest = 0.0
    for count in (2, 4, 8):
        page.evaluate(MEASURE, [GENERATE, count, 6])
    for count, bound in CHAIN[device].items():
        n = tokens + 4 if device == "cpu" else 20  # 16 are counted, as many as a run of the sketch had
        rounds = [page.evaluate(MEASURE, [GENERATE, count, n]) for _ in range(5 if device == "cpu" else 2)]
        longest = max([longest, *(r["longest"] for r in rounds)])
        over = min((r["wall"] - r["device"]) / max(1, r["steps"]) for r in rounds)
        report.target(f"overhead a step with {count} inferlets, ms", over, "<=", bound)
    report.target("longest task of the main thread while generating, ms", longest, "<=", 50)


def memory_figures(page: Page, device: str, report: Report) -> None:
    """Renderers and GPU process from the fifth to the fiftieth generation. Browsers collect garbage when it suits them, so each figure is
    the median of samples behind six generations, a second after each; the highest sample is reported beside them."""
    samples: list[dict[str, float]] = []
    for k in range(1, GENERATIONS + 1):
        page.evaluate("([s, n]) => window.pieHello.pie.run(s, {input: {first: 5, n}})", [GENERATE, 16 if device == "cpu" else 2])
        if 5 <= k < 5 + SAMPLES or k > GENERATIONS - SAMPLES:
            page.wait_for_timeout(1000)
            samples.append(resident())
    first, last = samples[:SAMPLES], samples[SAMPLES:]
    for kind in ("renderer", "gpu-process"):
        before, after = (statistics.median(sample[kind] for sample in part) for part in (first, last))
        report.add(f"{kind} after 5 generations, MB", before)
        report.add(f"{kind} after {GENERATIONS} generations, MB", after)
    totals = [sum(sample.values()) for sample in samples]
    report.add("renderer + GPU process at most, MB", max(totals))
    before, after = statistics.median(totals[:SAMPLES]), statistics.median(totals[SAMPLES:])
    report.target("growth after the fifth generation, percent", 100 * (after / before - 1), "<=", 3)


def main() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__, parts=PARTS)
    parts = args.only or PARTS
    tokens = args.tokens if args.device == "cpu" else min(args.tokens, 6)
    report = Report("browser", args.device)
    assets = web_assets(level="best")
    os.environ["PIE_PAGE"] = str(assets)  # for the server: what is measured is what was built, whatever becomes of the sources
    with tempfile.TemporaryDirectory() as scratch, pie_serve("--device", "cpu", "--kv-pool-mb", "64") as server, chromium() as browser:
        context = browser.new_context(service_workers="block")
        if "start" in parts:
            start_figures(context, server.url, args.device, assets, report)
        if "decode" in parts:
            worker = tapped_worker(Path(scratch)).read_text()

            def tapped(route: Route) -> None:
                route.fulfill(status=200, content_type="text/javascript", body=worker)

            context.route("**/web/engine.worker.js", tapped)
            page, _ = open_hello(context, server.url, args.device)
            decode_figures(page, args.device, tokens, report)
            report.device = device_name(page)
            page.close()
            context.unroute("**/web/engine.worker.js")
        if "memory" in parts:
            page, _ = open_hello(context, server.url, args.device)
            memory_figures(page, args.device, report)
            report.device = device_name(page)
            page.close()
        context.close()
    report.notes.append(PEERS)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
