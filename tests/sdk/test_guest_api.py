"""The guest SDK: what each call posts to the host, and how wrong use is refused."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from tests.sdk.conftest import SDK, Local
from tests.sdk.scripted_host import Fail, ScriptedHost, drive, result_of

HEAD = """
import asyncio
from inferlet.eta import *
from inferlet import chat, model, send, receive, log, sleep
"""
GREEDY = "lambda: reduce_argmax(intrinsics.output(0, 'logits'))"


def program(body: str, head: str = HEAD) -> str:
    """A program whose main has `body`; the body's first line is line 8 of the source."""
    lines = "\n".join("    " + line for line in body.strip("\n").split("\n"))
    return f"{head}\nasync def main(input):\n    ws, pipe, fwd = WorkingSet(), Pipeline(), ForwardPass()\n{lines}\n"


def line_of(source: str, part: str) -> int:
    return 1 + next(k for k, line in enumerate(source.split("\n")) if part in line)


async def test_the_seed_example(guest: Local, host: ScriptedHost) -> None:
    source = (SDK.parent / "examples" / "hello.py").read_text()
    assert await result_of(guest, host, source, {"prompt": "Hi"}) == {"text": "ABCDEFGH"}
    submits = host.payloads("submit")
    assert [s["tokens"] for s in submits] == [[9, 72, 105], *([65 + k] for k in range(7))]
    assert submits[0] | {"outs": 0} == {
        "pipe": host.payloads("pipe.new")[0]["pipe"], "tokens": [9, 72, 105], "ws": [host.payloads("ws.new")[0]["ws"]],
        "geo": {"mode": "folding", "window": 0, "sinks": 0}, "reads": None, "prog": host.payloads("program")[0]["prog"],
        "params": [], "chans": [], "outs": 0,
    }  # fmt: skip
    assert len(host.payloads("program")) == 1, "the program's text crosses once"
    assert [op for op, _ in host.calls if op.startswith(("pipe", "ws"))] == ["ws.new", "pipe.new", "pipe.close", "ws.drop"]
    ids = [i for _, p in host.calls for k in ("pipe", "ws", "prog") if isinstance(i := p.get(k), int)] + [
        i for s in submits for i in s["outs"]
    ]
    assert min(ids) >= 1


SUBMITS: list[tuple[str, dict[str, Any]]] = [
    ("fwd.embed([1, 2]); fwd.state([ws])", {"tokens": [1, 2], "reads": None, "prog": None, "outs": []}),
    ("fwd.embed((1, 2)); fwd.state((ws,), StateGeometry.buffered())", {"geo": {"mode": "buffered", "window": 0, "sinks": 0}}),
    ("fwd.embed([1]); fwd.state([ws], StateGeometry.folding(window=8, sinks=2))", {"geo": {"mode": "folding", "window": 8, "sinks": 2}}),
    ("fwd.embed([[1], [2, 3]]); fwd.state([ws, ws.fork(pipe)])", {"tokens": [[1], [2, 3]]}),
    ("fwd.embed([1, 2, 3]); fwd.state([ws]); fwd.read([0, -1])", {"reads": [[0, 2]]}),
    ("fwd.embed([[1, 2], [3]]); fwd.state([ws, WorkingSet()]); fwd.read([[-2], [0]])", {"reads": [[0], [0]]}),
    ("c = Channel.of([4]); fwd.embed(c); fwd.state([ws])", {"tokens": {"ch": 3}}),
    (f"fwd.embed([1]); fwd.state([ws]); fwd.epilogue({GREEDY})", {"params": []}),
    (
        "fwd.embed([1]); fwd.state([ws]); c = Channel.counter(5)\n"
        "fwd.epilogue(lambda: gumbel_max(intrinsics.output(0, 'logits') / 0.5, c.take()))",
        {"params": [0x3F000000], "chans": [5]},
    ),
]


@pytest.mark.parametrize(("body", "expected"), SUBMITS, ids=[b for b, _ in SUBMITS])
async def test_submit_payload(guest: Local, host: ScriptedHost, body: str, expected: dict[str, Any]) -> None:
    await result_of(guest, host, program(body + "\npipe.submit(fwd)"))
    [submit] = host.payloads("submit")
    assert {k: submit[k] for k in expected} == expected
    assert set(submit) == {"pipe", "tokens", "ws", "geo", "reads", "prog", "params", "chans", "outs"}


def channel(dtype: str, shape: list[int], capacity: int, seed: list[int] | None, host: str | None) -> dict[str, Any]:
    return {"ch": 3, "dtype": dtype, "shape": shape, "capacity": capacity, "seed": seed, "host": host}


HANDLES: list[tuple[str, str, dict[str, Any]]] = [
    ("ws.fork(pipe)", "ws.fork", {"ws": 3, "of": 1, "pipe": 2, "buffer": False}),
    ("ws.fork(buffer=True)", "ws.fork", {"ws": 3, "of": 1, "pipe": None, "buffer": True}),
    ("ws.commit(2)", "ws.commit", {"ws": 1, "n": 2}),
    ("ws.discard(1)", "ws.discard", {"ws": 1, "n": 1}),
    ("ws.truncate(0)", "ws.truncate", {"ws": 1, "n": 0}),
    ("ws.drop()", "ws.drop", {"ws": 1}),
    ("await ws.length()", "ws.length", {"ws": 1, "f": 3}),
    ("pipe.close()", "pipe.close", {"pipe": 2}),
    ("pipe.stop_when(Channel('bool'))", "pipe.stop_when", {"pipe": 2, "ch": 3}),
    ("Channel('i32', (2,), 3).put([1, -1])", "ch.put", {"ch": 3, "words": [1, 0xFFFFFFFF]}),
    ("Channel('f32').set(1.0)", "ch.set", {"ch": 3, "words": [0x3F800000]}),
    ("Channel('bool', (2,)).put([True, False])", "ch.put", {"ch": 3, "words": [1, 0]}),
    ("Channel('u32', (2,), 3).put([1, 2])", "ch.new", channel("u32", [2], 3, None, "writer")),
    ("Channel.of([[[[True]], [[False]]]]).declare()", "ch.new", channel("bool", [1, 2, 1, 1], 1, [1, 0], None)),
    ("Channel('u32', (2, 1, 1, 2)).put([[[[1, 2]]], [[[3, 4]]]])", "ch.put", {"ch": 3, "words": [1, 2, 3, 4]}),
    ("Channel.counter(7).declare()", "ch.new", channel("u32", [2], 1, [7, 0], None)),
    ("Channel.of([1.5, 2]).declare()", "ch.new", channel("f32", [2], 1, [0x3FC00000, 0x40000000], None)),
    ("Channel('i32', host='reader').declare()", "ch.new", channel("i32", [], 1, None, "reader")),
    ("send('é')", "send", {"value": "é"}),
    ("send({'a': [1]})", "send", {"value": {"a": [1]}}),
    ("log('x', 1, level='debug')", "log", {"level": "debug", "text": "x 1"}),
    ("model.encode('ab')", "encode", {"text": "ab"}),
    ("model.decode(65)", "decode", {"ids": [65]}),
    ("model.token_bytes([1])", "bytes", {"ids": [1]}),
    ("chat.system('s')", "chat.role", {"role": "system", "content": "s"}),
    ("chat.render([{'role': 'user', 'content': 'x'}], cue=False)", "chat.render",
     {"messages": [{"role": "user", "content": "x"}], "cue": False, "tools": None}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "op", "payload"), HANDLES, ids=[b for b, _, _ in HANDLES])
async def test_posts(guest: Local, host: ScriptedHost, body: str, op: str, payload: dict[str, Any]) -> None:
    await result_of(guest, host, program(body))
    assert host.payloads(op)[0] == payload


async def test_model_and_chat(guest: Local, host: ScriptedHost) -> None:
    body = """
first = chat.prefix()
first.append(1)
return [model.name, model.vocab, model.hidden, model.context, model.eos, chat.prefix(), model.encode('A'), model.decode([65]),
        model.token_bytes(66).decode(),
        [b.hex() for b in model.token_bytes([1, 2])], chat.user('A'), chat.assistant('B'), chat.cue(), chat.seal(),
        chat.render([{}]), chat.text([{}])]
"""
    expected = [
        "scripted",
        256,
        8,
        64,
        [2, 5],
        [9],
        [65],
        "A",
        "B",
        ["01", "02"],
        [1, 65, 2],
        [1, 66, 2],
        [1, 3],
        [2],
        [1, 1],
        "1 messages",
    ]
    assert await result_of(guest, host, program(body)) == expected


def cell(dtype: str, shape: list[int], *values: Any) -> dict[str, Any]:
    data = struct.pack("<" + {"f32": "f", "i32": "i", "u32": "I", "bool": "I"}[dtype] * len(values), *values)
    return {"b64": base64.b64encode(data).decode(), "dtype": dtype, "shape": shape}


VALUES = [
    (5, 5),
    (0.5, 0.5),
    (True, True),
    (cell("f32", [2], 0.5, -1.0), [0.5, -1.0]),
    (cell("i32", [2, 2], 1, -2, 3, 4), [[1, -2], [3, 4]]),
    (cell("u32", [1], 0xFFFFFFFF), [0xFFFFFFFF]),
    (cell("bool", [3], 1, 0, 1), [True, False, True]),
    (cell("f32", [2, 1, 2], 1, 2, 3, 4), [[[1, 2]], [[3, 4]]]),
    (cell("i32", [1, 2, 2, 1], 1, 2, 3, 4), [[[[1], [2]], [[3], [4]]]]),
]


@pytest.mark.parametrize(("wire", "plain"), VALUES, ids=[str(p) for _, p in VALUES])
async def test_values(guest: Local, host: ScriptedHost, wire: Any, plain: Any) -> None:
    host.reply = lambda submit, n: [wire]
    body = f"fwd.embed([1]); fwd.state([ws]); out = fwd.epilogue({GREEDY}); pipe.submit(fwd)\nreturn [await out, await out]"
    assert await result_of(guest, host, program(body)) == [plain, plain]


async def test_a_float_without_a_word_in_json(guest: Local, host: ScriptedHost) -> None:
    host.reply = lambda submit, n: [cell("f32", [], float("-inf"))]
    body = f"fwd.embed([1]); fwd.state([ws]); out = fwd.epilogue({GREEDY}); pipe.submit(fwd)\nreturn str(await out)"
    assert await result_of(guest, host, program(body)) == "-inf"


async def test_several_outputs(guest: Local, host: ScriptedHost) -> None:
    host.reply = lambda submit, n: [1, 0.5][: len(submit["outs"])]
    body = """
def both():
    x = intrinsics.output(0, 'logits')
    return reduce_argmax(x), reduce_max(x)
fwd.embed([1]); fwd.state([ws]); outs = fwd.epilogue(both); pipe.submit(fwd)
a, b = outs
one = ForwardPass(); one.embed([1]); one.state([ws])
single = one.epilogue(lambda: (reduce_argmax(intrinsics.output(0, 'logits')),))
pipe.submit(one)
return [await b, await a, list(await outs), list(await single), await asyncio.gather(a, b)]
"""
    assert await result_of(guest, host, program(body)) == [0.5, 1, [1, 0.5], [1], [1, 0.5]]


async def test_outputs_that_nobody_awaits_cost_nothing(guest: Local, host: ScriptedHost) -> None:
    body = f"""
for _ in range(50):
    f = ForwardPass(); f.embed([1]); f.state([ws]); f.epilogue({GREEDY}); pipe.submit(f)
del f
last = ForwardPass(); last.embed([1]); last.state([ws]); out = last.epilogue({GREEDY}); pipe.submit(last)
return await out
"""
    assert await result_of(guest, host, program(body)) == 65 + 50 % 26
    assert [len(w) for w in host.awaited] == [1], "only the awaited output is reported"
    assert not guest.loop.unawaited
    assert not guest.loop.awaited


async def test_a_value_that_comes_before_its_await_is_kept(guest: Local, host: ScriptedHost) -> None:
    body = f"""
outs = []
for _ in range(3):
    f = ForwardPass(); f.embed([1]); f.state([ws]); outs.append(f.epilogue({GREEDY})); pipe.submit(f)
last = await outs[2]
return [outs[0].done(), await outs[0], await outs[1], last]
"""
    assert await result_of(guest, host, program(body)) == [True, 65, 66, 67]


async def test_one_cancelled_waiter_leaves_the_other(guest: Local, host: ScriptedHost) -> None:
    silent = [True]
    host.reply = lambda submit, n: [None if n == 0 else 1]
    body = f"""
fwd.embed([1]); fwd.state([ws]); out = fwd.epilogue({GREEDY}); pipe.submit(fwd)
async def wait(): return await out
a, b = asyncio.create_task(wait()), asyncio.create_task(wait())
await asyncio.sleep(0)
a.cancel()
return await b
"""

    def answer() -> None:
        if silent.pop() if silent else False:
            host._events.append([host.payloads("submit")[0]["outs"][0], True, 42])

    assert await result_of(guest, host, program(body), on_pending=answer) == 42


async def test_typed_errors_of_outputs(guest: Local, host: ScriptedHost) -> None:
    host.reply = lambda submit, n: [
        [Fail("PassSkipped", "stopped"), Fail("ContextLengthExceeded", "too long", limit=4), Fail("NewKind", "?")][n]
    ]
    body = f"""
from inferlet.errors import ContextLengthExceeded, InferletError, PassSkipped
seen = []
for kind in (PassSkipped, ContextLengthExceeded, InferletError):
    f = ForwardPass(); f.embed([1]); f.state([ws]); out = f.epilogue({GREEDY}); pipe.submit(f)
    for _ in range(2):
        try: await out
        except kind as e: seen.append([type(e).__name__, str(e), e.fields])
return seen
"""
    expected = [["PassSkipped", "stopped", {}], ["ContextLengthExceeded", "too long", {"limit": 4}], ["NewKind", "?", {}]]
    assert await result_of(guest, host, program(body)) == [e for e in expected for _ in range(2)]


ENDS = """
from inferlet.errors import NotSubmitted, PassFailed
ch = Channel('i32', (), 4)
def step(t):
    f = ForwardPass(); f.embed([t]); f.state([ws])
    end = f.epilogue(lambda: ch.put(reduce_argmax(intrinsics.output(0, 'logits'))))
    return f, end
"""


async def test_awaiting_an_epilogue_without_outputs_waits_for_the_pass(guest: Local, host: ScriptedHost) -> None:
    host.reply = lambda submit, n: [None if n == 0 else Fail("PassFailed", "a bad id")]
    body = (
        ENDS
        + """
f, end = step(1)
seen = []
try: await end
except NotSubmitted: seen.append('early')
pipe.submit(f)
try: await asyncio.wait_for(end, 0.005)
except TimeoutError: seen.append('in flight')
seen.append([list(await end), list(await end), len(end)])
f, end = step(2)
pipe.submit(f)
for _ in range(2):
    try: await end
    except PassFailed as e: seen.append(str(e))
return seen
"""
    )
    pending = []

    def land() -> None:
        pending.append(1)
        if len(pending) == 2:
            host._events.append([host.payloads("submit")[0]["outs"][0], True, None])

    want = ["early", "in flight", [[], [], 0], "a bad id", "a bad id"]
    assert await result_of(guest, host, program(body), on_pending=land) == want


async def test_the_end_of_a_pass_that_nobody_awaits_is_not_asked_for(guest: Local, host: ScriptedHost) -> None:
    body = ENDS + "f, end = step(1)\ndel end\npipe.submit(f)\nf = step(2)[0]\npipe.submit(f)"
    await result_of(guest, host, program(body))
    assert [submit["outs"] for submit in host.payloads("submit")] == [[], []]


async def test_a_refused_submit_raises_at_the_authors_line(guest: Local, host: ScriptedHost) -> None:
    host.refuse["submit"] = {"type": "ChannelEmpty", "message": "nothing put"}
    source = program("fwd.embed([1]); fwd.state([ws])\npipe.submit(fwd)")
    answer = await drive(guest, host, source)
    assert (answer["e"]["type"], answer["e"]["message"], answer["e"]["line"]) == ("ChannelEmpty", "nothing put", line_of(source, "submit"))


async def test_host_channels(guest: Local, host: ScriptedHost) -> None:
    host.cells = {3: [cell("i32", [2], 1, 2), cell("i32", [2], 3, 4)]}
    body = """
ch = Channel('i32', (2,), 4, host='reader')
ch.declare()
return [await ch.read(), await ch.take(), await ch.take()]
"""
    assert await result_of(guest, host, program(body)) == [[1, 2], [1, 2], [3, 4]]


READY = "fwd.embed([1]); fwd.state([ws])"
WRONG: list[tuple[str, str, str]] = [
    ("fwd.embed('text')", "UsageError", "model.encode"),
    ("fwd.embed([1, 'a'])", "UsageError", "tokens[1] is 'a'"),
    ("fwd.embed([True])", "UsageError", "tokens[0] is True"),
    ("fwd.embed([])", "UsageError", "empty"),
    ("fwd.embed([[1], []])", "UsageError", "tokens[1] is empty"),
    ("fwd.embed(Channel('f32', (1,)))", "UsageError", "i32 or u32"),
    ("fwd.embed([1]); fwd.embed([1])", "UsageError", "twice"),
    (f"out = fwd.epilogue({GREEDY}); fwd.embed([out])", "UsageError", "tokens[0] is an un-awaited Output (await it first); token ids"),
    ("fwd.state(ws)", "UsageError", "[ws]"),
    ("fwd.state([])", "UsageError", "[ws]"),
    ("fwd.state([ws, ws])", "UsageError", "twice"),
    ("fwd.state([3])", "UsageError", "working_sets[0] is 3"),
    ("fwd.state([ws], 'folding')", "UsageError", "StateGeometry.folding()"),
    ("ws.drop(); fwd.state([ws])", "UsageError", "dropped"),
    (f"{READY}; ws.drop(); pipe.submit(fwd)", "UsageError", "dropped"),
    ("fwd.state([ws], None)", "UsageError", "geometry is None; use StateGeometry.folding()"),
    ("StateGeometry.folding(window=0)", "UsageError", "window is 0"),
    ("StateGeometry.folding(sinks=4)", "UsageError", "without a window"),
    ("fwd.read(3)", "UsageError", "positions is 3"),
    (f"{READY}; fwd.read([1]); pipe.submit(fwd)", "UsageError", "position 1 is outside the 1 tokens"),
    (f"{READY}; fwd.read([[0], [0]]); pipe.submit(fwd)", "UsageError", "2 lists of positions"),
    ("pipe.submit(fwd)", "UsageError", "embed"),
    ("fwd.embed([1]); pipe.submit(fwd)", "UsageError", "state"),
    ("fwd.embed([[1], [2]]); fwd.state([ws]); pipe.submit(fwd)", "UsageError", "2 token lists for 1"),
    ("fwd.embed(Channel.of([1, 2, 3])); fwd.state([ws, WorkingSet()]); pipe.submit(fwd)", "UsageError", "do not divide"),
    ("pipe.submit(3)", "UsageError", "ForwardPass"),
    (f"{READY}; pipe.submit(fwd); pipe.submit(fwd)", "AlreadySubmitted", "new one"),
    (f"{READY}; pipe.submit(fwd); fwd.embed([1])", "AlreadySubmitted", "new ForwardPass"),
    (f"pipe.close(); {READY}; pipe.submit(fwd)", "PipelineClosed", "closed"),
    (f"{READY}; out = fwd.epilogue({GREEDY}); await out", "NotSubmitted", "pipe.submit"),
    (f"fwd.epilogue({GREEDY}); fwd.epilogue({GREEDY})", "UsageError", "twice"),
    ("fwd.epilogue(3)", "TraceError", "function"),
    ("fwd.epilogue(lambda: intrinsics.output(0, 'nope'))", "TraceError", "nope"),
    ("intrinsics.output(0, 'logits')", "TraceError", "epilogue"),
    ("Channel('f16')", "UsageError", "f16"),
    ("Channel('f32', 3)", "UsageError", "shape is 3"),
    ("Channel('f32', (0,))", "UsageError", "shape[0] is 0"),
    ("Channel('f32', (1 << 20, 2))", "UsageError", "2097152"),
    ("Channel('f32', (), 0)", "UsageError", "capacity is 0"),
    ("Channel('f32', host='both')", "UsageError", "both"),
    ("Channel.of([1, 'a'])", "UsageError", "has 'a'; use a number, a bool, or lists of them"),
    ("Channel.of([[1], [1, 2]])", "UsageError", "ragged"),
    ("Channel.of([])", "UsageError", "empty"),
    ("Channel.counter(-1)", "UsageError", "seed is -1"),
    ("Channel.counter(2**32)", "UsageError", "4294967295"),
    ("Channel('i32').put(1.5)", "UsageError", "1.5"),
    ("Channel('i32').put([1])", "UsageError", "shape [1]"),
    ("Channel('u32').put(-1)", "UsageError", "-1"),
    ("Channel('bool').put(1)", "UsageError", "True or False"),
    ("Channel('f32').put(1e300)", "UsageError", "3.4028235e38"),
    ("c = Channel('i32'); c.put(1); await c.take()", "UsageError", "writer"),
    ("c = Channel('i32'); c.declare(); await c.take()", "UsageError", "host='reader'"),
    ("Channel.of(1).put(2)", "UsageError", "seeded"),
    ("pipe.stop_when(Channel('i32'))", "UsageError", "Channel('bool', ())"),
    ("pipe.close(); pipe.stop_when(Channel('bool'))", "PipelineClosed", "Pipeline.stop_when: this pipeline was closed"),
    ("ws.commit('all')", "UsageError", "'all'"),
    ("ws.truncate(-1)", "UsageError", "n is -1"),
    ("ws.fork(ws)", "UsageError", "Pipeline"),
    ("model.encode(3)", "UsageError", "text is 3; use a str"),
    ("model.encode('a\\ud800')", "UsageError", "encode: text holds a lone surrogate (U+D800 at character 1)"),
    ("chat.user('\\udc80')", "UsageError", "chat.role: content holds a lone surrogate"),
    ("chat.render([{'role': 'user', 'content': '\\udc80'}])", "UsageError", "messages[0]['content'] holds a lone surrogate"),
    ("model.decode('x')", "UsageError", "'x'"),
    ("chat.user(None)", "UsageError", "NoneType"),
    ("chat.render('hi')", "UsageError", "str"),
    ("send({1, 2})", "UsageError", "set"),
    ("send(float('nan'))", "UsageError", "nan"),
    ("send('a\\ud800b')", "UsageError", "send: value holds a lone surrogate (U+D800 at character 1)"),
    ("send({'\\udc80': 1})", "UsageError", "a key of value holds a lone surrogate"),
    ("send({float('nan'): 1})", "UsageError", "a key of value is nan"),
    ("send([10 ** 5000])", "UsageError", "value[0] is an integer of more than 4,300 digits"),
    ("log('x', level='loud')", "UsageError", "loud"),
    ("await sleep(-1)", "UsageError", "-1"),
    ("await sleep(1e10)", "UsageError", "seconds is 10000000000.0; use a number from 0 to 1000000000"),
    ("StateGeometry.folding(5)", "TypeError", "; call it as StateGeometry.folding(*, window=None, sinks=0, mask=None, tree=None)"),
    ("ForwardPass().embed()", "TypeError", "missing 1 required positional argument: 'tokens'; call it as ForwardPass.embed(tokens)"),
    ("Channel(type='f32')", "TypeError", "; call it as Channel(dtype, shape=(), capacity=1, *, host=None)"),
    ("chat.role('user')", "TypeError", "; call it as chat.role(role, content)"),
    ("send()", "TypeError", "; call it as send(value)"),
]


@pytest.mark.parametrize(("body", "kind", "words"), WRONG, ids=[b for b, _, _ in WRONG])
async def test_wrong_use_is_refused_at_the_authors_line(guest: Local, host: ScriptedHost, body: str, kind: str, words: str) -> None:
    answer = await drive(guest, host, program(body))
    assert answer["s"] == "failed"
    error = answer["e"]
    assert (error["type"], error["line"]) == (kind, 8), error
    assert words in error["message"]
    assert "inferlet" not in error["traceback"].split("program.py")[0], "the traceback begins with the author's frame"


FAILURES: list[tuple[str, str, str, int | None]] = [
    ("x = 1\nasync def other(i): pass", "MainMissing", "main", None),
    ("main = 3", "MainMissing", "3", None),
    ("async def main(i):\n    return {'a': [1, {2}]}", "ResultNotJson", "result['a'][1] is of type set", 1),
    ("x = 1\nasync def main(i):\n    return {'a': float('inf')}", "ResultNotJson", "inf", 2),
    ("async def main(i):\n    return {(1, 2): 3}", "ResultNotJson", "key", 1),
    ("async def main(i):\n    return '\\ud800'", "ResultNotJson", "result holds a lone surrogate (U+D800 at character 0)", 1),
    ("async def main(i):\n    return {'\\udc80': 1}", "ResultNotJson", "a key of result holds a lone surrogate", 1),
    ("async def main(i):\n    x = (\n", "SyntaxError", "never closed", 2),
    ("async def main(i):\nreturn 1", "IndentationError", "expected", 2),
    ("import nothing_like_this", "ModuleNotFoundError", "nothing_like_this", 1),
    ("def f():\n    raise KeyError('k')\nasync def main(i):\n    f()", "KeyError", "'k'", 2),
    ("import sys\nasync def main(i):\n    sys.exit(3)", "SystemExit", "sys.exit(3)", 3),
    ("x = 1\nasync def main():\n    pass", "TypeError", "was given; main takes the input as its one argument", 2),
    ("async def main(a, b):\n    pass", "TypeError", "'b'; main takes the input as its one argument", 1),
    ("import functools as t\ndef same(f):\n    return t.wraps(f)(lambda i: f())\n@same\ndef main(x):\n    pass", "TypeError", "main()", 3),
    ("def send(a): pass\ndef main(i):\n    send()", "TypeError", "send() missing 1 required positional argument: 'a'", 3),
    ("def main(i):\n    {}.update(1)", "TypeError", "", 2),
    ("import asyncio\nasync def main(i):\n    raise asyncio.CancelledError", "CancelledError", "main was cancelled", None),
    ("class E(Exception):\n    def __str__(self): raise ValueError\nasync def main(i):\n    raise E", "E", "__str__", 4),
    ("async def main(i):\n    raise ValueError('\\ud800' + 'x' * 50000)", "ValueError", "characters left out", 2),
]


@pytest.mark.parametrize(("source", "kind", "words", "line"), FAILURES, ids=[s.split("\n")[-1] for s, _, _, _ in FAILURES])
async def test_failures_name_the_authors_line(  # noqa: PLR0917
    guest: Local, host: ScriptedHost, source: str, kind: str, words: str, line: int | None
) -> None:
    error = (await drive(guest, host, source))["e"]
    assert (error["type"], error["file"]) == (kind, "program.py")
    assert error["line"] == line or line is None
    assert words in error["message"]
    assert "call it as" not in error["message"], "the author's own functions are not ours"
    assert len(json.dumps(error)) < 100_000
