"""The guest's asyncio loop: what programs may rely on, and that it leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from pie_core.engine.errors import EngineError
from pie_core.eta.json_text import MAX_NESTING, loads
from pie_core.host.deadlock import Deadlock
from pie_core.text.sandbox import TemplateError, TemplateRefused
from pie_core.text.stream import MessageError
from pie_core.text.tokenizer import TokenizerError
from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive, request, result_of

PROGRAMS = {
    "plain def": ("def main(input): return {'n': input['n'] + 1}", {"n": 1}, {"n": 2}),
    "gather": (
        """
        import asyncio
        async def one(k):
            await asyncio.sleep(0.002 * (3 - k))
            return k
        async def main(input): return await asyncio.gather(*[one(k) for k in range(3)])
        """,
        {},
        [0, 1, 2],
    ),
    "create_task and queue": (
        """
        import asyncio
        async def main(input):
            q = asyncio.Queue(maxsize=1)
            async def fill():
                for k in range(4): await q.put(k)
                await q.put(None)
            task = asyncio.create_task(fill())
            got = []
            while (v := await q.get()) is not None: got.append(v)
            await task
            return got
        """,
        {},
        [0, 1, 2, 3],
    ),
    "event and lock": (
        """
        import asyncio
        async def main(input):
            ready, lock, order = asyncio.Event(), asyncio.Lock(), []
            async def waiter(k):
                await ready.wait()
                async with lock:
                    order.append(k)
                    await asyncio.sleep(0)
            tasks = [asyncio.create_task(waiter(k)) for k in range(3)]
            await asyncio.sleep(0)
            ready.set()
            await asyncio.wait(tasks)
            return order
        """,
        {},
        [0, 1, 2],
    ),
    "wait_for times out": (
        """
        import asyncio
        async def main(input):
            try: await asyncio.wait_for(asyncio.Event().wait(), 0.01)
            except TimeoutError: return 'late'
        """,
        {},
        "late",
    ),
    "wait_for in time": (
        """
        import asyncio
        async def main(input):
            async def quick():
                await asyncio.sleep(0.001)
                return 5
            return await asyncio.wait_for(quick(), 10)
        """,
        {},
        5,
    ),
    "timeout block": (
        """
        import asyncio
        async def main(input):
            try:
                async with asyncio.timeout(0.01): await asyncio.sleep(10)
            except TimeoutError: return 'late'
        """,
        {},
        "late",
    ),
    "task group": (
        """
        import asyncio
        async def main(input):
            async def boom(): raise KeyError('x')
            try:
                async with asyncio.TaskGroup() as g:
                    g.create_task(boom())
                    g.create_task(asyncio.sleep(10))
            except* KeyError as e: return [type(x).__name__ for x in e.exceptions]
        """,
        {},
        None,
    ),
    "cancel": (
        """
        import asyncio
        async def main(input):
            seen = []
            async def long():
                try: await asyncio.sleep(10)
                finally: seen.append('cleaned')
            t = asyncio.create_task(long())
            await asyncio.sleep(0)
            t.cancel()
            try: await t
            except asyncio.CancelledError: seen.append('cancelled')
            return seen
        """,
        {},
        ["cleaned", "cancelled"],
    ),
    "main ends, the rest is cleaned up": (
        """
        import asyncio
        from inferlet import send
        async def main(input):
            async def other():
                try: await asyncio.sleep(10)
                finally: send('closed')
            asyncio.create_task(other())
            await asyncio.sleep(0)
            return 1
        """,
        {},
        1,
    ),
    "async generator": (
        """
        import asyncio
        async def main(input):
            async def gen():
                for k in range(3):
                    await asyncio.sleep(0)
                    yield k
            return [k async for k in gen()]
        """,
        {},
        [0, 1, 2],
    ),
    "call_later order": (
        """
        import asyncio
        async def main(input):
            loop, order, end = asyncio.get_running_loop(), [], asyncio.Event()
            loop.call_later(0.006, lambda: (order.append('c'), end.set()))
            loop.call_later(0.002, order.append, 'a')
            loop.call_later(0.004, order.append, 'b')
            loop.call_later(0.003, order.append, 'never').cancel()
            await end.wait()
            return order
        """,
        {},
        ["a", "b", "c"],
    ),
    "inferlet.sleep": ("from inferlet import sleep\nasync def main(i):\n    await sleep(0.002)\n    return True", {}, True),
    "dataclass and typing in the source": (
        """
        from __future__ import annotations
        import dataclasses
        @dataclasses.dataclass
        class P:
            x: int = 1
        async def main(input): return dataclasses.asdict(P(2))
        """,
        {},
        {"x": 2},
    ),
    "the local test block does not run": ("async def main(i): return 1\nif __name__ == '__main__': raise SystemExit", {}, 1),
}


def text(source: str) -> str:
    """The source without the indentation of this file."""
    import textwrap

    return textwrap.dedent(source)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "task group"])
async def test_programs(guest: Local, host: ScriptedHost, name: str) -> None:
    source, input, expected = PROGRAMS[name]
    assert await result_of(guest, host, text(source), input) == expected
    assert not guest.loop.awaited
    assert not guest.loop._ready


async def test_task_group_reports_what_failed(guest: Local, host: ScriptedHost) -> None:
    source = text(PROGRAMS["task group"][0]).replace("return [", "out = [") + "    return out\n"
    assert await result_of(guest, host, source) == ["KeyError"]


async def test_background_exception_is_logged_with_its_line(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
async def bad():
    raise ValueError('lost')
async def main(input):
    asyncio.create_task(bad())
    await asyncio.sleep(0)
    return 1
"""
    assert await result_of(guest, host, source) == 1
    [(level, line)] = host.logs
    assert level == "error"
    assert "never retrieved" in line
    assert "line 4, in bad" in line
    assert "ValueError: lost" in line


async def test_timers_share_one_host_sleep(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
from inferlet import receive
async def main(input):
    got = []
    for _ in range(20):
        got.append(await asyncio.wait_for(receive(), 60))
    return got
"""
    host.inbox = list(range(20))
    assert await result_of(guest, host, source) == list(range(20))
    assert len(host.payloads("sleep")) == 1


async def test_a_message_is_not_lost_by_a_timeout(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
from inferlet import receive
async def main(input):
    try:
        await asyncio.wait_for(receive(), 0.005)
    except TimeoutError:
        pass
    first = await receive()
    return [first, await receive()]
"""

    def later() -> None:
        if len(host.awaited) == 2:
            host.inbox = ["a", "b"]

    assert await result_of(guest, host, source, on_pending=later) == ["a", "b"]
    assert len(host.payloads("receive")) == 2


async def test_a_spinning_task_lets_events_in(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
from inferlet import receive
async def main(input):
    task = asyncio.create_task(receive())
    while not task.done():
        await asyncio.sleep(0)
    return task.result()
"""
    host.inbox = ["hello"]
    assert await result_of(guest, host, source) == "hello"


async def test_deadlock_names_the_line_that_waits(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
async def inner():
    await asyncio.Event().wait()
async def main(input):
    await inner()
"""
    answer = await drive(guest, host, source)
    assert (answer["e"]["type"], answer["e"]["file"], answer["e"]["line"]) == ("Deadlock", "program.py", 4)


@pytest.mark.parametrize("kind", ["list", "dict"])
async def test_a_result_may_be_nested_as_deep_as_the_host_takes(guest: Local, host: ScriptedHost, kind: str) -> None:
    """One level is the answer's own; deeper ones are refused at the guest, in words."""
    wrap = "[x]" if kind == "list" else "{'a': x}"
    source = f"from inferlet import send\nasync def main(i):\n    x = 1\n    for _ in range(i): x = {wrap}\n    send(x)\n    return x"
    text = await guest.start(request(source, MAX_NESTING - 1))
    assert loads(text)["s"] == "done"
    loads(json.dumps({"value": host.sent[0]}))
    error = (await drive(guest, host, source, MAX_NESTING))["e"]
    assert (error["type"], error["line"], len(host.sent)) == ("UsageError", 5, 1)
    error = (await drive(guest, host, source.replace("send(x)", "pass"), MAX_NESTING))["e"]
    assert error["type"] == "ResultNotJson" and "result is nested deeper" in error["message"]


async def test_errors_of_the_host_are_classes_of_the_sdk(guest: Local, host: ScriptedHost) -> None:
    """So that a program can name them before the first one comes."""
    kinds = [c.__name__ for c in (TokenizerError, TemplateError, TemplateRefused, MessageError, Deadlock, *EngineError.__subclasses__())]
    names = set(kinds) - {"InstanceClosed", "EngineStopped"}  # which end the program
    assert "Deadlock" in names
    source = f"from inferlet.errors import {', '.join(sorted(names))}\ndef main(i): return 1"
    assert await result_of(guest, host, source) == 1


DEADLOCKED = """
import asyncio
from inferlet.errors import Deadlock
from inferlet.eta import *
async def main(input):
    fwd, results = ForwardPass(), Channel("i32", host="reader")
    fwd.embed([1]); fwd.state([WorkingSet()])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    Pipeline().submit(fwd)
    if not input["catch"]:
        return await AWAITED
    try:
        return await AWAITED
    except Deadlock as error:
        return [str(error), await AGAIN]
"""


@pytest.mark.parametrize("catch", [True, False])
@pytest.mark.parametrize(("awaited", "again"), [("out", "out"), ("results.take()", "results.take()"), ("results.read()", "results.take()")])
async def test_a_deadlock_is_raised_at_the_await(guest: Local, host: ScriptedHost, awaited: str, again: str, catch: bool) -> None:
    """As a cancelled wait: what is awaited may still come, and the next await gets it."""
    host.reply = lambda submit, n: [None]
    source = DEADLOCKED.replace("AWAITED", awaited).replace("AGAIN", again)
    answer = json.loads(await guest.start(request(source, {"catch": catch})))
    (waiting,) = answer["w"]
    answer = json.loads(await guest.resume(json.dumps([[waiting, False, {"type": "Deadlock", "message": "it cannot come"}]])))
    if not catch:
        assert (answer["s"], answer["e"]["type"], answer["e"]["line"]) == ("failed", "Deadlock", 11)
        return
    (then,) = answer["w"]
    assert (then == waiting) == (awaited == again), "the same future, where it would have been consumed"
    assert json.loads(await guest.resume(json.dumps([[then, True, 7]]))) == {"s": "done", "r": ["it cannot come", 7]}


async def test_a_cancelled_timer_does_not_hide_a_deadlock(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
async def main(input):
    asyncio.get_running_loop().call_later(60, print).cancel()
    await asyncio.Event().wait()
"""
    assert (await drive(guest, host, source))["e"]["type"] == "Deadlock"


async def test_ten_thousand_cancelled_timers_do_not_pile_up(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio
async def main(input):
    loop = asyncio.get_running_loop()
    for _ in range(10000):
        loop.call_later(60, print).cancel()
    return len(loop._timers)
"""
    assert await result_of(guest, host, source) <= 65


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("asyncio.get_running_loop().run_in_executor(None, print)", "one thread"),
        ("await asyncio.to_thread(print)", "one thread"),
        ("asyncio.get_running_loop().run_until_complete(None)", "use `await`"),
    ],
)
async def test_what_the_loop_refuses(guest: Local, host: ScriptedHost, call: str, words: str) -> None:
    answer = await drive(guest, host, f"import asyncio\nasync def main(i):\n    {call}\n")
    assert answer["e"]["type"] == "RuntimeError"
    assert words in answer["e"]["message"]
    assert answer["e"]["line"] == 3


async def test_print_becomes_log_lines(guest: Local, host: ScriptedHost) -> None:
    source = """
import sys
async def main(input):
    print('one', 2)
    print('part', end='')
    print('ial')
    print('problem', file=sys.stderr)
    print('no newline', end='')
    return None
"""
    assert await result_of(guest, host, source) is None
    assert host.logs == [("info", "one 2"), ("info", "partial"), ("error", "problem"), ("info", "no newline")]


async def test_a_log_shows_text_that_is_no_unicode(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio, sys
from inferlet import log
async def bad():
    raise ValueError('\\ud803')
async def main(input):
    print('a\\ud800', 'é')
    print('b\\ud801', end='')
    log('c\\ud802')
    asyncio.create_task(bad())
    await asyncio.sleep(0)
"""
    assert await result_of(guest, host, source) is None
    assert [line for _, line in host.logs[:1]] == ["a\\ud800 é"]
    assert {r"b\ud801", r"c\ud802"} <= {line for _, line in host.logs}
    assert any(r"ValueError: \ud803" in line for _, line in host.logs)


@pytest.mark.parametrize("seconds", ["1e300", "float('inf')", "10 ** 9 + 1"])
async def test_a_timer_may_lie_beyond_every_host_sleep(guest: Local, host: ScriptedHost, seconds: str) -> None:
    source = f"""
import asyncio
async def main(input):
    task = asyncio.create_task(asyncio.sleep({seconds}))
    await asyncio.sleep(0.001)
    return task.done()
"""
    assert await result_of(guest, host, source) is False
    answer = json.loads(await guest.start(request(f"import asyncio\nasync def main(i):\n    await asyncio.sleep({seconds})")))
    assert answer["s"] == "pending"
    assert host.payloads("sleep")[-1]["ms"] == 86_400_000


async def test_a_dropped_agen_is_closed(guest: Local, host: ScriptedHost) -> None:
    source = """
import asyncio, gc
from inferlet import send
async def main(input):
    async def gen():
        try:
            yield 1
        finally:
            send('closed')
    async for _ in gen():
        break
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return 1
"""
    assert await result_of(guest, host, source) == 1
    assert host.sent == ["closed"]


EMPTY = {"type": "ChannelEmpty", "message": "no submitted pass puts the value"}
TAKES = """
import asyncio
from inferlet.eta import Channel

async def main(input):
    r = Channel("i32", (), 4, host="reader")
    tasks = [asyncio.create_task(r.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for k in input:
        tasks[k].cancel()
    got = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(g).__name__ if isinstance(g, BaseException) else g for g in got]
"""


@pytest.mark.parametrize(
    ("cancelled", "events", "want"),
    [
        ([], [(2, False), (1, False), (0, True)], [70, "ChannelEmpty", "ChannelEmpty"]),
        ([], [(2, False), (0, True), (1, True)], [70, 71, "ChannelEmpty"]),
        ([], [(2, False), (1, False), (0, False)], ["ChannelEmpty"] * 3),
        ([1], [(2, False), (0, True), (1, True)], [70, "CancelledError", 71]),
        ([0, 2], [(2, False), (1, False), (0, True)], ["CancelledError", 70, "CancelledError"]),
        ([0], [(2, False), (1, False), (0, True)], ["CancelledError", 70, "ChannelEmpty"]),
    ],
)
async def test_takes_are_served_in_order_and_refusals_are_the_last_ones(
    guest: Local, host: ScriptedHost, cancelled: list[int], events: list[tuple[int, bool]], want: list[object]
) -> None:
    """The host refuses the newest take first, and before it has the value of the oldest."""
    answer = json.loads(await guest.start(request(TAKES, cancelled)))
    futures, values = [p["f"] for p in host.payloads("ch.take")], iter(range(70, 73))
    outcomes = [[futures[k], True, next(values)] if ok else [futures[k], False, EMPTY] for k, ok in events]
    for batch in ([outcomes], [[one] for one in outcomes])[len(cancelled) % 2]:
        if answer["s"] == "pending":
            answer = json.loads(await guest.resume(json.dumps(batch)))
    assert answer == {"s": "done", "r": want}
