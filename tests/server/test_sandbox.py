"""The wasmtime sandbox with the real Python component: programs, concurrency, isolation, budgets of healthy guests."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import Iterator

import pytest

from pie_server.sandbox import GuestClosed, GuestInstance, Limits, Sandbox
from tests.sdk.conftest import SDK
from tests.sdk.scripted_host import Fail, ScriptedHost, drive, request, result_of
from tests.sdk.test_guest_loop import PROGRAMS, text


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=Limits(step_cpu_s=5.0))
    made.warm()
    yield made
    made.close()


async def test_the_seed_example(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    guest = sandbox.open(host)
    source = (SDK.parent / "examples" / "hello.py").read_text()
    assert await result_of(guest, host, source, {"prompt": "Hi"}) == {"text": "ABCDEFGH"}
    assert [s["tokens"] for s in host.payloads("submit")] == [[9, 72, 105], *([65 + k] for k in range(7))]
    assert len(host.payloads("program")) == 1
    guest.close()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_asyncio(sandbox: Sandbox, name: str) -> None:
    source, input, expected = PROGRAMS[name]
    if name == "task group":
        source, expected = text(source).replace("return [", "out = [") + "    return out\n", ["KeyError"]
    host = ScriptedHost()
    guest = sandbox.open(host)
    assert await result_of(guest, host, text(source), input) == expected
    guest.close()


@pytest.mark.parametrize("example", ["sampling.py", "fork.py"])
async def test_examples(sandbox: Sandbox, example: str) -> None:
    host = ScriptedHost()
    guest = sandbox.open(host)
    source = (SDK.parent / "examples" / example).read_text()
    answer = await drive(guest, host, source, {"prompt": "Hi", "max_tokens": 6, "seed": 3})
    assert answer["s"] == "done", answer["e"]["traceback"]
    assert len(host.payloads("program")) == 1
    guest.close()


async def test_the_standard_library_is_there(sandbox: Sandbox) -> None:
    names = "json re math random datetime collections itertools functools dataclasses typing enum decimal statistics hashlib base64 uuid"
    source = (
        f"import {names.replace(' ', ', ')}\nasync def main(i):\n    return [len(uuid.uuid4().hex), datetime.datetime.now().year > 2000]"
    )
    host = ScriptedHost()
    assert await result_of(sandbox.open(host), host, source) == [32, True]


async def test_twenty_at_once_keep_apart(sandbox: Sandbox) -> None:
    source = """
import asyncio, random
from inferlet.eta import *
state = []
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    for k in range(5):
        fwd = ForwardPass()
        fwd.embed([input["k"]])
        fwd.state([ws])
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        state.append(await out)
        await asyncio.sleep(0.001)
    return [state, random.random(), list(__builtins__ is not None and [input["k"]])]
"""

    async def one(k: int) -> list[object]:
        host = ScriptedHost(lambda submit, n: [1000 * submit["tokens"][0] + n])
        guest = sandbox.open(host)
        try:
            return await result_of(guest, host, source, {"k": k})
        finally:
            guest.close()

    results = await asyncio.gather(*[one(k) for k in range(20)])
    for k, (state, _, echo) in enumerate(results):
        assert (state, echo) == ([1000 * k + n for n in range(5)], [k])
    assert len({r[1] for r in results}) == 20, "each instance has its own random state"


async def test_instances_share_nothing(sandbox: Sandbox) -> None:
    write = "import json, inferlet\njson.leak = inferlet.leak = 1\nasync def main(i): return 1"
    read = "import json, inferlet\nasync def main(i): return [hasattr(json, 'leak'), hasattr(inferlet, 'leak')]"
    for _ in range(6):  # more than there are spares
        host = ScriptedHost()
        await result_of(sandbox.open(host), host, write)
        assert await result_of(sandbox.open(host), host, read) == [False, False]


async def test_text_crosses_unharmed(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    host.inbox = ['\u0000 é 漢 🙂 \\ " \n']
    source = "from inferlet import receive, send\nasync def main(i):\n    v = await receive()\n    send(v)\n    return [v, i]"
    value = "x🙂" * 1000
    assert await result_of(sandbox.open(host), host, source, value) == ['\u0000 é 漢 🙂 \\ " \n', value]
    assert host.sent == ['\u0000 é 漢 🙂 \\ " \n']


async def test_errors_of_the_host_are_typed(sandbox: Sandbox) -> None:
    host = ScriptedHost(lambda submit, n: [Fail("PassSkipped", "stopped")])
    source = """
from inferlet.eta import *
async def main(input):
    fwd = ForwardPass(); fwd.embed([1]); fwd.state([WorkingSet()])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    Pipeline().submit(fwd)
    await out
"""
    error = (await drive(sandbox.open(host), host, source))["e"]
    assert (error["type"], error["message"], error["file"], error["line"]) == ("PassSkipped", "stopped", "program.py", 7)


async def test_a_port_that_raises_does_not_harm(sandbox: Sandbox) -> None:
    class Broken:
        def call(self, op: str, payload: str) -> str:
            raise ZeroDivisionError

    source = "from inferlet import model\nasync def main(i): return model.encode('x')"
    answer = json.loads(await sandbox.open(Broken()).start(request(source)))
    assert answer["e"]["type"] == "HostError"
    host = ScriptedHost()
    assert await result_of(sandbox.open(host), host, source) == [120]


async def test_close_at_any_time(sandbox: Sandbox) -> None:
    waiting = "from inferlet import receive\nasync def main(i): await receive()"
    endless = "async def main(i):\n    while True: pass"

    async def started(source: str) -> GuestInstance:
        guest = sandbox.open(ScriptedHost())
        assert json.loads(await guest.start(request(source)))["s"] == "pending"
        return guest

    fresh = sandbox.open(ScriptedHost())
    fresh.close()
    fresh.close()
    with pytest.raises(GuestClosed):
        await fresh.start(request(waiting))
    guest = await started(waiting)
    guest.close()
    with pytest.raises(GuestClosed):
        await guest.resume("[]")
    running = sandbox.open(ScriptedHost())
    step = asyncio.create_task(running.start(request(endless)))
    await asyncio.sleep(0.05)
    running.close()
    with pytest.raises(GuestClosed):
        await step


async def test_guests_give_their_memory_back(sandbox: Sandbox) -> None:
    source = "from inferlet import receive\nx = bytearray(4 << 20)\nasync def main(i): await receive()"

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    async def run(n: int) -> None:
        for _ in range(n):
            guest = sandbox.open(ScriptedHost())
            await guest.start(request(source))
            guest.close()
        sandbox.warm()  # behind it, the guests that waited to be freed are
        gc.collect()

    await run(10)
    before = resident()
    await run(40)
    assert resident() - before < 40 << 20, "40 guests of 4 MiB and more each"


async def test_strings_into_and_out_of_the_guest_do_not_leak(sandbox: Sandbox) -> None:
    source = """
from inferlet import _host
async def main(i):
    payload = '{"text":"' + 'x' * 100000 + '"}'
    for _ in range(600):
        _host._raw('time', payload)
    return 1
"""

    class Echo:
        def call(self, op: str, payload: str) -> str:
            return payload

    async def run() -> None:
        guest = sandbox.open(Echo())
        assert json.loads(await guest.start(request(source)))["s"] == "done"
        guest.close()

    await run()
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1])
    await run()
    with open("/proc/self/statm") as statm:
        after = int(statm.read().split()[1])
    assert (after - before) * resource.getpagesize() < 30 << 20, "120 MB of strings crossed"


def test_a_closed_sandbox_opens_nothing() -> None:
    made = Sandbox(spares=1)
    made.close()
    with pytest.raises(GuestClosed, match="sandbox is closed"):
        made.open(ScriptedHost())
