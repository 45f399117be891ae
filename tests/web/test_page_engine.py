"""The page's engine on the cpu device, in Pyodide on Node: tokens equal the server's, and every way a run may end."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from pie_core.engine.forward import Geometry, PassSpec
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.eta import Model, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.tracing import Traced
from pie_core.host.deadlock import NOBODY_SENDS
from pie_core.weights import open_gguf
from pie_server.adapters.cpu_module import open_cpu_device
from pie_server.build.cpu_module import cpu_module
from pie_server.build.web import WEB, page_tools
from tests.support.tiny_gguf import write_tiny_gguf
from tests.web.bundles import node_bundle

ROOT = Path(__file__).parents[2]
TOKENS = 16
VOCAB, WIDTH = 320, 64
PROMPTS = [[(7 * i + 3 + k) % VOCAB for i in range(20 + k)] for k in range(8)]

POOLS = [1, 1 << 36]  # bytes: too small and too large a KV cache

Report = dict[str, Any]


def greedy() -> Traced:
    return trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(VOCAB, WIDTH))


async def server_tokens(model: Path) -> list[list[int]]:
    """Greedy tokens of each prompt, alone, on the server's cpu device."""
    device = open_cpu_device()
    engine = Engine(ModelRunner.load(device, open_gguf(model), kv_pool_bytes=4 << 20))
    engine.start()
    instance = engine.open_instance("test")
    traced = greedy()
    found = []
    for prompt in PROMPTS:
        ws, pipe, feed = instance.working_set(), instance.pipeline(), prompt
        tokens: list[int] = []
        for _ in range(TOKENS):
            spec = PassSpec(list(feed), [ws], Geometry.check(mode="folding"), program=traced.program, params=traced.params)
            token = await instance.submit(pipe, spec)[0]
            assert isinstance(token, int)
            tokens.append(token)
            feed = [token]
        found.append(tokens)
    await engine.stop()
    device.close()
    return found


def pure_packages(folder: Path) -> Path:
    """jinja2 and markupsafe as the page has them, without compiled parts."""
    for name in ("jinja2", "markupsafe"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(Path(sysconfig.get_path("purelib")) / name, folder / name, ignore=ignored)
    return folder


# The cpu device of the page, by itself: its queue, and the clock beside its work.
DEVICE = """
import asyncio, json, time

async def device(page):
    device, kernels, found = page._opened.device, page._opened._raw._kernels, {}
    buffer = device.create_buffer(64, "probe")
    other = device.create_buffer(64, "other")
    device.write(buffer, 0, b"a" * 64)
    device.copy(buffer, 0, other, 0, 64)
    device.write(buffer, 0, memoryview(b"b" * 64))
    reads = [device.read(buffer, 0, 4), device.read(other, 0, 4)]
    device.write(buffer, 0, b"c" * 64)
    before, said = kernels.busyMs, []
    asyncio.get_running_loop().call_soon(said.append, "turn")
    reads[0].add_done_callback(lambda _: said.append("read"))
    found["at the call"] = [kernels.busyMs == before, any(r.done() for r in reads)]
    found["read"] = [(await r).decode() for r in reads] + [(await device.read(buffer, 0, 4)).decode()]
    found["order"] = said

    turns = page._opened._raw._turns
    loop, done = turns.loop, asyncio.get_running_loop().create_future()
    def work():
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        loop.call_soon(done.set_result, None)
    turns.alone(work)
    began, real = loop.time(), time.monotonic()
    await done
    found["clock"] = [loop.time() - began < 0.04, time.monotonic() - real >= 0.05]

    gone = device.read(buffer, 0, 4)
    gone.cancel()
    found["after a cancelled read"] = (await device.read(buffer, 0, 1)).decode()
    return found
"""

# A guest whose worker faulted: what it raises, to whom and how often it is asked, and what holds it.
LINK = """
import gc, weakref
from pie_core.host.process import InferletFailed, Process
from pie_web.link import PageGuest

FAULT = ("fault", "", '{"type": "Trap", "message": "unreachable"}')

class Port:
    def __init__(self):
        self.sent = []

    def open(self, received, stepped):
        self.received = received

    def send(self, kind, body):
        self.sent.append(kind)

    def close(self):
        pass

def linked(page, on_fault=lambda kind, message: None):
    port, process = Port(), Process(page._engine, page._services, "link")
    return port, process, PageGuest(port, process.port, page._engine.limits, on_fault, lambda: None)

def frames(error):
    count, link = 0, error.__traceback__
    while link is not None:
        count, link = count + 1, link.tb_next
    return count

async def asked(guest):
    try:
        await guest.resume("[]")
    except InferletFailed as error:
        return [str(error), id(error), frames(error)], error

async def ended(process, port, guest):
    running = asyncio.ensure_future(process.run(guest, {}))
    while "start" not in port.sent:
        await asyncio.sleep(0)
    port.received(*FAULT)
    try:
        await running
    except InferletFailed as error:
        return str(error)
    finally:
        del running  # it keeps the error, whose frames hold this one

async def link(page):
    found, told = {}, []
    gc.disable()
    port, process, guest = linked(page, lambda kind, message: told.append([kind, message]))
    port.received(*FAULT)
    port.received("nonsense", "", "")
    found["told"] = told
    asks = [await asked(guest) for _ in range(3)]
    found["asked"] = [fields for fields, _ in asks]
    asks.clear()
    process.close()
    guest.close()
    kept = weakref.ref(guest)
    del guest
    found["freed between steps"] = kept() is None

    port, process, guest = linked(page)
    kept = weakref.ref(guest)
    found["ended"] = await ended(process, port, guest)
    del guest, process
    await asyncio.sleep(0)  # the loop lets go of what it has just run
    found["freed in a step"] = kept() is None
    gc.enable()
    return found

async def probe(page):
    return json.dumps({**await device(page), **await link(page)})
"""
PROBE = DEVICE + LINK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=3, vocab=VOCAB, width=WIDTH, seed=3)


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One engine: 1, 4 and 8 greedy loops at once, then the scenarios of web/src/engine/testing/scenarios.ts."""
    with node_bundle(WEB / "src/engine/testing/node_run.ts") as script:
        packages = pure_packages(tmp_path_factory.mktemp("packages"))
        text = greedy().program.text
        jobs = [[{"program": text, "prompt": prompt, "tokens": TOKENS} for prompt in PROMPTS[:count]] for count in (1, 4, 8)]
        engine = {"folders": [str(ROOT), str(WEB / "python"), str(packages)], "model": str(model), "kernels": str(cpu_module())}
        errors = tmp_path_factory.mktemp("node") / "stderr"  # a failure there quotes megabytes of Pyodide
        with errors.open("wb") as sink:
            task = json.dumps({"engine": engine, "jobs": jobs, "scenarios": True, "probe": PROBE, "pools": POOLS})
            command = [page_tools().path, script, task]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=sink, timeout=100, check=False)
        assert done.returncode == 0, errors.read_text()[-4000:]
        found: Report = json.loads(done.stdout.splitlines()[-1])
        found["console"] = [*done.stdout.decode().splitlines()[:-1], *errors.read_text().splitlines()]
    return found


def test_tokens_equal_the_servers_alone_and_in_batches(report: Report, model: Path) -> None:
    want = asyncio.run(server_tokens(model))
    assert len({tuple(tokens) for tokens in want}) > 4  # a model that always says the same would prove nothing
    assert [each["tokens"] for each in report["rounds"]] == [want[:1], want[:4], want]
    assert report["rounds"][2]["steps"] <= 3 * TOKENS, "eight loops share steps"


def test_the_engine_says_what_runs(report: Report) -> None:
    device = report["facts"]["device"]
    assert (device["kind"], device["software"], device["why"]) == ("cpu", False, "asked for by name")
    assert report["facts"]["model"] == {"name": "tiny", "vocab": VOCAB, "hidden": WIDTH, "context": 512, "eos": [2, 0]}
    assert report["stats"]["engine"]["pages_used"] == 0 and report["stats"]["engine"]["instances"] == 0


def test_the_device_works_in_tasks_of_its_own_and_in_call_order(report: Report) -> None:
    found = report["probed"]
    assert found["at the call"] == [True, False], "nothing runs until the turn is over"
    assert found["read"] == ["bbbb", "aaaa", "cccc"]
    assert found["order"] == ["turn", "read"], "what is ready runs before work that may take long"
    assert found["after a cancelled read"] == "c"


def test_work_that_blocks_the_worker_makes_nobody_late(report: Report) -> None:
    assert report["probed"]["clock"] == [True, True]


def test_a_fault_is_raised_anew_each_time(report: Report) -> None:
    """One that is kept would collect the frames of everybody whom it was raised to."""
    asked = report["probed"]["asked"]
    assert report["probed"]["told"] == [["Trap", "unreachable"]]
    assert [words for words, _, _ in asked] == ["Trap: unreachable"] * 3
    assert len({which for _, which, _ in asked}) == 3
    assert len({frames for _, _, frames in asked}) == 1


def test_a_guest_that_faulted_is_freed_by_its_references(report: Report) -> None:
    found = report["probed"]
    assert found["ended"] == "Trap: unreachable"
    assert (found["freed between steps"], found["freed in a step"]) == (True, True), "no cycle waits for the garbage collector"


ENDS = {
    "refused": ("UsageError", "ws.drop: id 7 is unknown"),
    "malformed": ("UsageError", "the payload is not JSON"),
    "unknown op": ("UsageError", "unknown op 'rm'"),
    "sync op": ("GuestFault", "belongs beside the guest"),
    "answer twice": ("GuestFault", "a step that was not asked for"),
    "fault": ("Trap", "unreachable"),
    "fault without words": ("GuestFault", "ended without a reason"),
    "fault while it waits": ("Trap", "later"),
    "deep input": ("InputNotJson", "the program's input must be a JSON value: it is nested deeper than 200 levels"),
    "deep value": ("HostError", "a value for receive() must be a JSON value: it is nested deeper than 200 levels"),
    "deep answer": ("GuestFault", "which is not JSON: it is nested deeper than 200 levels"),
    "deep op": ("UsageError", "send: the payload is not JSON: it is nested deeper than 200 levels"),
    "no JSON": ("GuestFault", "which is not JSON: "),
    "no state": ("GuestFault", "no state of the ABI"),
    "deadlock": ("Deadlock", "no pass, message or timer"),
    "author": ("ValueError", "no"),
    "out of pages": ("OutOfPages", "9 pages; the KV cache has 16,777,216 bytes, a larger kvPoolBytes of Pie.load makes room"),
    "ended in a step": ("CpuBudgetExceeded", "10 s"),
    "ended while it waits": ("Cancelled", "stopped"),
    "ended with pages": ("Cancelled", "stopped"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_ends_with_its_reason_and_gives_its_pages_back(report: Report, name: str) -> None:
    found, (kind, words) = report["scenarios"][name], ENDS[name]
    error = found["last"]["error"]
    assert (found["last"]["kind"], error["name"], error["fields"]["type"]) == ("error", "InferletError", kind)
    assert words in error["message"]
    assert (found["said"], found["pages"], found["instances"]) == ([], 0, 0)


TOLD = {
    "refused and told": [
        {"futures": [], "error": {"type": "UsageError", "message": "ws.drop: id 7 is unknown, or was dropped; a working set is needed"}},
        {"futures": [1], "error": {"type": "UsageError", "message": "ws.length: id 8 is unknown, or was dropped; a working set is needed"}},
        {"futures": [3, 4], "error": {"type": "UsageError", "message": "submit: id 2 is unknown, or was dropped; a pipeline is needed"}},
    ],
    "refused with a future, unheard": 1,
    "nobody sends": [[1, False, {"type": "Deadlock", "message": NOBODY_SENDS}]],
}


@pytest.mark.parametrize("name", TOLD)
def test_an_inferlet_that_goes_on_is_told_what_was_refused(report: Report, name: str) -> None:
    found = report["scenarios"][name]
    assert (found["last"]["kind"], json.loads(found["last"]["value"])) == ("result", TOLD[name])


def test_python_that_failed_for_good_is_told_once(report: Report) -> None:
    assert report["fatal"] == ["the engine's Python failed and cannot go on (Maximum call stack size exceeded)"]


def test_what_a_run_says_comes_in_order_before_its_result(report: Report) -> None:
    found = report["scenarios"]["talks"]
    assert found["received"] == 1
    assert found["last"] == {"kind": "result", "run": found["last"]["run"], "value": '{"ü":null}'}
    assert [each["value"] for each in found["said"] if each["kind"] == "message"] == ['"ready"', '"[[1,true,{\\"a\\":[1]}]]"']
    assert [(each["level"], each["text"]) for each in found["said"] if each["kind"] == "log"] == [("info", "hi")]


DUMP = ["Stack (most recent call first):", "  <no Python frame>"]  # Python's own, of the failure that ends the script


def test_however_runs_end_the_console_stays_clean(report: Report) -> None:
    assert report["console"] == DUMP, "\n".join(report["console"])


def test_every_scenario_is_looked_at(report: Report) -> None:
    assert set(report["scenarios"]) == {*ENDS, *TOLD, "talks"}


def test_a_kv_pool_that_does_not_fit_is_told_by_its_option(report: Report) -> None:
    small, large = report["pools"]
    assert small == {"name": "LoadError", "message": small["message"]} and large["name"] == "LoadError"
    assert "smaller than one page of" in small["message"] and small["message"].endswith("raise kvPoolBytes")
    assert "no memory for the model and a KV cache of 68,719,476,736 bytes (kvPoolBytes); a smaller one may fit" in large["message"]


def test_closing_the_engine_ends_its_runs(report: Report) -> None:
    assert report["left"]["error"]["fields"]["type"] == "Cancelled"
