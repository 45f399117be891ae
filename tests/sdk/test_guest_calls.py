"""Calls of the SDK's async functions: awaited in every way of asyncio; a forgotten `await` is an error that says so."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Iterator

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import Fail, ScriptedHost, drive, result_of

HEAD = """
import asyncio, math, operator
from inferlet import chat, log, model, receive, send, sleep
from inferlet.eta import *

async def main(input):
    ws, ch = WorkingSet(), Channel('i32', (), 4, host='reader')
"""
LINE = HEAD.count("\n") + 2  # of a body's second line

CALLS = {
    "ch.take()": ("Channel.take", "await ch.take()"),
    "ch.read()": ("Channel.read", "await ch.read()"),
    "ws.save('x')": ("WorkingSet.save", "await ws.save(…)"),
    "WorkingSet.open('x')": ("WorkingSet.open", "await WorkingSet.open(…)"),
    "ws.length()": ("WorkingSet.length", "await ws.length()"),
    "ws.cached()": ("WorkingSet.cached", "await ws.cached()"),
    "model.prewarm([1])": ("model.prewarm", "await model.prewarm(…)"),
    "receive()": ("receive", "await receive()"),
    "sleep(0.01)": ("sleep", "await sleep(…)"),
}


def program(*lines: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in lines)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Python's own warning, which names a coroutine of the SDK, never comes."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not [w for w in said if "never awaited" in str(w.message)]


def fill(host: ScriptedHost) -> None:
    """What each channel, and `receive`, gets."""
    host.inbox = [5] * 9
    host.cells = {n: [5] * 9 for n in range(40)}


def test_every_async_function_makes_a_call(guest: Local) -> None:
    import inferlet
    from inferlet import _call, _channel, _io, _state, chat, eta, model

    public = [vars(m) for m in (inferlet, chat, model, _io)] + [vars(c) for c in vars(eta).values() if isinstance(c, type)]
    public += [vars(_channel.Channel), vars(_state.WorkingSet)]
    native = set()
    for names in public:
        for name, value in names.items():
            function = getattr(value, "__func__", value)
            if not name.startswith("_") and getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x80:
                native.add(name)
    assert not native
    assert issubclass(_call.Call, Coroutine)
    assert not hasattr(_call.Call(_io.sleep.__wrapped__(0), _call.Told("sleep", "")), "__dict__"), "small"
    _call.take_forgotten()


USES = [
    "c == 3", "3 == c", "c != 3", "c == None", "c in [3]", "c in model.eos", "c < 3", "3 >= c", "bool(c)", "not c", "c and 1",
    "1 if c else 2", "c + 1", "1 + c", "c - 1", "2 ** c", "divmod(c, 2)", "-c", "~c", "abs(c)", "round(c)", "math.floor(c)", "c | 1",
    "int(c)", "float(c)", "complex(c)", "operator.index(c)", "[1, 2][c]", "range(c)", "len(c)", "list(c)", "[*c]", "iter(c)",
    "x, y = c", "3 in c", "c[0]", "str(c)", "f'{c}'", "'%s' % c", "print(c)", "sum([c])", "max(c, 3)", "c == ch.take()",
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
async def test_a_call_is_not_its_value(guest: Local, host: ScriptedHost, use: str) -> None:
    error = (await drive(guest, host, program("c = ch.take()", use)))["e"]
    assert (error["type"], error["line"]) == ("NotAwaited", LINE), error
    assert error["message"].startswith("Channel.take was not awaited: ")
    assert error["message"].endswith("; write value = await ch.take()")


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_is_named_as_a_program_writes_it(guest: Local, host: ScriptedHost, call: str) -> None:
    error = (await drive(guest, host, program("", f"if {call} < 3: pass")))["e"]
    name, form = CALLS[call]
    assert (error["type"], error["line"]) == ("NotAwaited", LINE), error
    assert error["message"] == f"{name} was not awaited: a comparison needs its value; write value = {form}"


async def test_every_operator_of_an_output_is_refused(guest: Local) -> None:
    from inferlet._call import Call
    from inferlet._output import Output

    special = {n for n in vars(Output) if n.startswith("__") and not hasattr(object, n)} | {"__eq__", "__ne__", "__lt__", "__str__"}
    assert special - {"__slots__", "__weakref__", "__module__", "__annotations__", "__firstlineno__"} <= set(dir(Call))


async def test_what_asks_for_the_object_works(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "c, other = ch.take(), ws.length()",
        "said = [repr(c), c is c, c == c, c != c, {c: 1, other: 2}[other], [c, other].index(c), c in [c], asyncio.iscoroutine(c)]",
        "c.close(); other.close()",
        "return said",
    ]
    assert await result_of(guest, host, program(*lines)) == ["<Channel.take: await it>", True, True, False, 2, 0, True, True]


@pytest.mark.parametrize("call", CALLS)
async def test_a_forgotten_await_fails_the_run(guest: Local, host: ScriptedHost, call: str) -> None:
    error = (await drive(guest, host, program(call, "return 'done'")))["e"]
    name, form = CALLS[call]
    assert error["type"] == "NotAwaited"
    assert error["message"] == f"{name} was called and never awaited: nothing of it was done; write {form}"
    assert error["line"] == HEAD[: HEAD.index("async def main")].count("\n") + 1, "that of main"
    ops = {op for op, _ in host.calls} - {"ws.new", "ws.drop", "ch.new", "ch.drop"}
    assert not ops, "nothing of it was done"


@pytest.mark.parametrize("lines", [["c = ws.save('x')", "return 1"], ["kept = [ws.save('x')]", "await sleep(0)", "return 1"]])
async def test_a_call_that_main_keeps_to_its_end_is_forgotten_too(guest: Local, host: ScriptedHost, lines: list[str]) -> None:
    error = (await drive(guest, host, program(*lines)))["e"]
    assert error["message"].startswith("WorkingSet.save was called and never awaited")


async def test_the_error_of_main_wins(guest: Local, host: ScriptedHost) -> None:
    error = (await drive(guest, host, program("ws.save('x')", "raise KeyError('mine')")))["e"]
    assert (error["type"], error["line"]) == ("KeyError", LINE)
    assert await result_of(guest, host, program("return 1")) == 1, "nothing is left for the next run"


async def test_a_caught_refusal_is_still_a_call_that_nobody_awaited(guest: Local, host: ScriptedHost) -> None:
    lines = ["try: ws.length() + 1", "except NotAwaited: pass", "return 1"]
    error = (await drive(guest, host, program("from inferlet.errors import NotAwaited", *lines)))["e"]
    assert "WorkingSet.length was called and never awaited" in error["message"]


async def test_what_ends_with_the_run_does_not_matter(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "async def other():",
        "    kept = ws.save('x')",
        "    try: await sleep(99)",
        "    finally: sleep(1)",
        "task, unstarted = asyncio.create_task(other()), None",
        "await sleep(0)",
        "unstarted = asyncio.create_task(ws.length())",
        "return 'done'",
    ]
    assert await result_of(guest, host, program(*lines)) == "done"


async def test_a_call_as_the_result(guest: Local, host: ScriptedHost) -> None:
    error = (await drive(guest, host, program("return {'n': ws.length()}")))["e"]
    assert error["type"] == "ResultNotJson" and "result['n'] is of type WorkingSet.length() (await it first)" in error["message"]


async def test_a_main_that_is_no_coroutine_may_return_a_call(guest: Local, host: ScriptedHost) -> None:
    assert await result_of(guest, host, "from inferlet.eta import *\nws = WorkingSet()\ndef main(input): return ws.length()") == 7


WAYS = [
    "[await C, await C]",
    "[await asyncio.create_task(C), await asyncio.ensure_future(C)]",
    "await asyncio.gather(C, C)",
    "await asyncio.gather(*[asyncio.create_task(c, name='t') for c in (C, C)])",
    "[await asyncio.wait_for(C, 9), await asyncio.shield(C)]",
    "[await asyncio.wait_for(C, None), await asyncio.wait_for(asyncio.create_task(C), 9)]",
    "[t.result() for t in (await asyncio.wait([asyncio.create_task(C), asyncio.ensure_future(C)]))[0]]",
    "await grouped(C, C)",
    "[await c for c in asyncio.as_completed([C, C])]",
    "[await timed(C), await passed(C)]",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
async def test_asyncio_takes_calls(guest: Local, host: ScriptedHost, way: str, call: str) -> None:
    lines = [
        "async def grouped(*calls):",
        "    async with asyncio.TaskGroup() as group: tasks = [group.create_task(c) for c in calls]",
        "    return [t.result() for t in tasks]",
        "async def timed(call):",
        "    async with asyncio.timeout(9): return await call",
        "async def passed(call): return await call",
        f"values = {way.replace('C', call)}",
        "return [v if v is None else 0 if isinstance(v, WorkingSet) else v for v in values]",
    ]
    fill(host)
    value = {"WorkingSet.open": 0, "sleep": None, "receive": 5, "Channel.take": 5, "Channel.read": 5}.get(CALLS[call][0], 7)
    assert await result_of(guest, host, program(*lines)) == [value, value]


async def test_a_coroutine_by_hand(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "told = []",
        "ended = ws.save('x'); ended.close()",
        "try: ended.send(None)",
        "except RuntimeError as error: told.append(str(error))",
        "waits = sleep(0)",
        "waits.send(None)",
        "try: waits.throw(KeyError('thrown'))",
        "except KeyError as error: told.append(str(error))",
        "ws.save('x').close()",
        "try: ws.save('x').throw(KeyError('first'))",
        "except KeyError as error: told.append(str(error))",
        "c = ws.length()",
        "told.append(await c)",
        "try: await c",
        "except RuntimeError as error: told.append(str(error))",
        "return told",
    ]
    assert await result_of(guest, host, program(*lines)) == [
        "cannot reuse already awaited coroutine",
        "'thrown'",
        "'first'",
        7,
        "WorkingSet.length: this call was awaited already; await it once, and keep the value",
    ]


async def test_a_wait_that_is_cancelled_or_fails(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "told = []",
        "task = asyncio.create_task(ch.take()); await sleep(0); task.cancel()",
        "try: await task",
        "except asyncio.CancelledError: told.append('cancelled')",
        "early = asyncio.create_task(ch.take()); early.cancel()",
        "try: await early",
        "except asyncio.CancelledError: told.append('early')",
        "for t in (0, 0.01):",
        "    try: await asyncio.wait_for(ch.take(), t)",
        "    except TimeoutError: told.append('late')",
        "made = [asyncio.create_task(ch.take()), asyncio.ensure_future(ch.take())]",
        "told.append(['coro=<Channel.take()' in repr(task) for task in made])",
        "try: await asyncio.wait([c := ch.take()])",
        "except TypeError: c.close(); told.append('tasks')",
        "await WorkingSet.open('x')",
    ]
    host.open_error = Fail("UnknownSavedSet").error
    error = (await drive(guest, host, program("told = []", *lines[1:-1], "send(told)", lines[-1])))["e"]
    assert host.sent == [["cancelled", "early", "late", "late", [True, True], "tasks"]], error
    assert (error["type"], error["line"]) == ("UnknownSavedSet", LINE + len(lines) - 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("ws.save()", "WorkingSet.save() missing 1 required positional argument: 'name'; call it as WorkingSet.save(name)"),
        ("WorkingSet.open()", "WorkingSet.open() missing 1 required positional argument: 'name'; call it as WorkingSet.open("),
        ("sleep()", "sleep() missing 1 required positional argument: 'seconds'; call it as sleep(seconds)"),
        ("model.prewarm()", "prewarm() missing 1 required positional argument: 'ids'"),
        ("ws.length(1)", "WorkingSet.length() takes 1 positional argument but 2 were given; call it as WorkingSet.length()"),
    ],
)
async def test_wrong_arguments_are_told_where_the_call_is_made(guest: Local, host: ScriptedHost, call: str, words: str) -> None:
    error = (await drive(guest, host, program("", f"await {call}")))["e"]
    assert (error["type"], error["line"]) == ("TypeError", LINE), error
    assert words in error["message"]


async def test_signatures_and_docstrings_stay(guest: Local) -> None:
    import inspect

    from inferlet import model, sleep
    from inferlet.eta import WorkingSet

    assert str(inspect.signature(sleep)) == "(seconds: 'float') -> 'None'" and "without using the CPU" in (sleep.__doc__ or "")
    assert list(inspect.signature(WorkingSet.save).parameters) == ["self", "name"] and "Keep this state" in (WorkingSet.save.__doc__ or "")
    assert model.prewarm.__name__ == "prewarm"
