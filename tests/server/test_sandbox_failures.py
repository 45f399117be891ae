"""What a guest can do wrong, on purpose or not: each ends that guest with a typed error, and the sandbox lives on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from pie_server.sandbox import (
    CpuBudgetExceeded,
    GuestClosed,
    GuestTrap,
    Limits,
    MemoryLimitExceeded,
    OutputLimitExceeded,
    Sandbox,
    SandboxError,
    StackLimitExceeded,
)
from tests.sdk.scripted_host import ScriptedHost, drive, request, result_of

LIMITS = Limits(memory_bytes=96 << 20, step_cpu_s=0.4, total_cpu_s=5.0, text_chars=1 << 20)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=LIMITS, spares=0)
    yield made
    made.close()


async def alive(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    assert await result_of(sandbox.open(host), host, "async def main(i): return 'alive'") == "alive"


AUTHOR: list[tuple[str, str, int | None, str]] = [  # source, type, line, part of the message
    ("async def main(i):\n    x = 1\n    return 1 / 0", "ZeroDivisionError", 3, "division"),
    ("async def main(i):\n    x = (\n", "SyntaxError", 2, "never closed"),
    ("x = 1", "MainMissing", None, "main"),
    ("def main(i): return {1, 2}", "ResultNotJson", 1, "set"),
    ("x = 1\ndef main(): return 1", "TypeError", 2, "main takes the input as its one argument"),
    ("def main(i): return '\\ud800'", "ResultNotJson", 1, "lone surrogate (U+D800 at character 0)"),
    ("import asyncio\nasync def main(i):\n    await asyncio.Event().wait()", "Deadlock", 3, "waits"),
    ("def main(i):\n    return open('/etc/passwd').read()", "FileNotFoundError", 2, "passwd"),
    ("def main(i):\n    open('x', 'w')", "FileNotFoundError", 2, "x"),
    ("import os\ndef main(i):\n    return os.listdir('/')", "FileNotFoundError", 3, "/"),
    ("import time\ndef main(i):\n    time.sleep(1)", "PermissionError", 3, "inferlet.sleep"),
    ("import socket\ndef main(i):\n    socket.create_connection(('127.0.0.1', 80))", "PermissionError", 3, "network"),
    ("import threading\ndef main(i):\n    threading.Thread(target=print).start()", "PermissionError", 3, "create_task"),
    ("import os\ndef main(i):\n    os._exit(1)", "PermissionError", 3, "processes"),
    ("import sys\ndef main(i):\n    sys.exit(3)", "SystemExit", 3, "return from main"),
    ("def main(i):\n    input()", "EOFError", 2, "EOF"),
    ("def main(i):\n    return bytearray(1 << 30)", "MemoryError", 2, "memory limit"),
    ("def main(i):\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 20))", "MemoryError", 4, "memory limit"),
    ("def main(i):\n    def f(n):\n        return f(n + 1)\n    return f(0)", "RecursionError", 3, "recursion"),
    ("def main(i): return " + "(" * 5000 + "1" + ")" * 5000, "MemoryError", None, "too complex"),
    ("import subprocess\ndef main(i):\n    subprocess.run(['ls'])", "OSError", 3, "does not support processes"),
    ("import ctypes", "ModuleNotFoundError", 1, "ctypes"),
    ("\nimport numpy", "ModuleNotFoundError", 2, "No module named 'numpy'; only `inferlet` and the standard library"),
    ("def main(i):\n    x = []\n    for _ in range(1000): x = [x]\n    return x", "ResultNotJson", 1, "result is nested deeper"),
    ("def main(i):\n    x = []\n    for _ in range(200000): x = {1: x}\n    return x", "ResultNotJson", 1, "199 levels"),
    ("def main(i):\n    x = []\n    for _ in range(1000): x = [x, x]\n    return x", "ResultNotJson", 1, "199 levels"),
    ("def main(i):\n    x = []\n    x.append(x)\n    return x", "ResultNotJson", 1, "199 levels"),
    ("from inferlet import send\ndef main(i):\n    x = []\n    for _ in range(1000): x = [x]\n    send(x)", "UsageError", 5, "send: value"),
]


@pytest.mark.parametrize(("source", "kind", "line", "words"), AUTHOR, ids=[f"{k}-{s[:40]!r}" for s, k, _, _ in AUTHOR])
async def test_python_exceptions(sandbox: Sandbox, source: str, kind: str, line: int | None, words: str) -> None:
    host = ScriptedHost()
    guest = sandbox.open(host)
    error = (await drive(guest, host, source))["e"]
    assert (error["type"], error["file"], error["line"]) == (kind, "program.py", line), error
    assert words in error["message"]
    guest.close()


ENDED: list[tuple[str, type[SandboxError], str]] = [
    ("def main(i):\n    while True: pass", CpuBudgetExceeded, "without awaiting"),
    ("while True: pass", CpuBudgetExceeded, "0.4 s"),
    (
        "def main(i):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
        CpuBudgetExceeded,
        "CPU time",
    ),
    ("import re\ndef main(i): re.match('(a+)+$', 'a' * 40 + 'b')", CpuBudgetExceeded, "CPU time"),
    ("def main(i): return sum(range(10 ** 12))", CpuBudgetExceeded, "CPU time"),
    ("def main(i):\n    x = []\n    for _ in range(200000): x = [x]\n    return repr(x)", StackLimitExceeded, "nested too deeply"),
    ("import json\ndef main(i): json.loads('[' * 100000)", StackLimitExceeded, "stack of 2 MiB"),
    ("def main(i):\n    s = 'ab'\n    while True: s = s + s", MemoryLimitExceeded, "96 MiB"),
    ("import _socket\ndef main(i): _socket.socket()", GuestTrap, "wasi:sockets/tcp-create-socket"),
    ("import select\ndef main(i): select.select([], [], [], 5)", GuestTrap, "wasi:clocks/monotonic-clock"),
    ("def main(i): return 'x' * (2 << 20)", OutputLimitExceeded, "1,048,576"),
]


@pytest.mark.parametrize(("source", "kind", "words"), ENDED, ids=[f"{k.__name__}-{s[:40]!r}" for s, k, _ in ENDED])
async def test_guests_that_are_ended(sandbox: Sandbox, source: str, kind: type[SandboxError], words: str) -> None:
    guest = sandbox.open(ScriptedHost())
    with pytest.raises(kind, match=words):
        await guest.start(request(source))
    with pytest.raises(kind):
        await guest.resume("[]")
    guest.close()
    await alive(sandbox)


@pytest.mark.parametrize(
    "grow", ["kept.append([0] * 100)", "kept.append(str(len(kept)) * 5)", "kept.append(object())", "kept = [kept, kept]"]
)
async def test_memory_bombs_of_small_objects(sandbox: Sandbox, grow: str) -> None:
    guest = sandbox.open(ScriptedHost(), Limits(memory_bytes=40 << 20, step_cpu_s=10))
    source = f"kept = []\ndef main(i):\n    global kept\n    while True: {grow}"
    if grow == "kept = [kept, kept]":  # frees as a chain as deep as memory was
        with pytest.raises((StackLimitExceeded, MemoryLimitExceeded), match=r"nested too deeply|MiB of memory"):
            await guest.start(request(source))
    else:
        answer = json.loads(await guest.start(request(source)))
        assert answer["e"]["type"] == "MemoryError"
        assert answer["e"]["line"] in (4, None), "CPython may lack the memory for a traceback"
    guest.close()


async def test_a_huge_payload_is_refused_before_the_port(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    source = "from inferlet import send\ndef main(i):\n    send('x' * (2 << 20))"
    error = (await drive(sandbox.open(host), host, source))["e"]
    assert (error["type"], error["line"]) == ("OutputLimitExceeded", 3)
    assert not host.sent


async def test_huge_print_is_cut_into_lines(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    assert await result_of(sandbox.open(host), host, "def main(i): print('x' * 300000)") is None
    assert [len(line) for _, line in host.logs] == [65536] * 4 + [300000 - 4 * 65536]


async def test_total_cpu_budget_over_many_short_steps(sandbox: Sandbox) -> None:
    source = "import asyncio\nasync def main(i):\n    while True:\n        sum(range(200000))\n        await asyncio.sleep(0.001)"
    guest = sandbox.open(host := ScriptedHost(), Limits(step_cpu_s=5, total_cpu_s=0.3))
    with pytest.raises(CpuBudgetExceeded, match="in total"):
        await drive(guest, host, source)
    assert 0.3 < guest.cpu_s < 1


async def test_waiting_costs_no_cpu_budget(sandbox: Sandbox) -> None:
    host = ScriptedHost()
    guest = sandbox.open(host, Limits(step_cpu_s=0.2, total_cpu_s=0.2))
    assert await result_of(guest, host, "import asyncio\nasync def main(i):\n    await asyncio.sleep(0.3)\n    return 1") == 1


async def test_endless_guests_do_not_stop_the_others(sandbox: Sandbox) -> None:
    endless = request("def main(i):\n    while True: pass")
    bad = [asyncio.create_task(sandbox.open(ScriptedHost()).start(endless)) for _ in range(4)]
    await asyncio.sleep(0.01)
    await alive(sandbox)
    assert not any(task.done() for task in bad), "the healthy guest ran beside them, not after them"
    for task in bad:
        with pytest.raises(CpuBudgetExceeded):
            await task


async def test_closing_the_sandbox_ends_what_runs() -> None:
    made = Sandbox(limits=Limits(step_cpu_s=60), spares=0)
    step = asyncio.create_task(made.open(ScriptedHost()).start(request("while True: pass")))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(made.close)
    with pytest.raises(GuestClosed):
        await step


@pytest.mark.parametrize("events", ["", "{", "[[1]]", "[[1, true]]", "null"])
async def test_broken_events_fail_the_guest_only(sandbox: Sandbox, events: str) -> None:
    guest = sandbox.open(ScriptedHost())
    await guest.start(request("from inferlet import receive\nasync def main(i): await receive()"))
    assert json.loads(await guest.resume(events))["s"] == "failed"
    await alive(sandbox)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"source": 3}', "{"])
async def test_broken_requests_fail_the_guest_only(sandbox: Sandbox, text: str) -> None:
    guest = sandbox.open(ScriptedHost())
    assert json.loads(await guest.start(text))["s"] == "failed"
    await alive(sandbox)
