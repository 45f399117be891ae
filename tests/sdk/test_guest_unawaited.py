"""A forgotten `await`: an output that is used as its value, or given to a function in its place, is an error that says so."""

from __future__ import annotations

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive, result_of

HEAD = """
import asyncio, math, operator
from inferlet import chat, log, model, send, sleep
from inferlet.eta import *

async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    def run(fn=lambda: reduce_argmax(intrinsics.output(0, 'logits'))):
        fwd = ForwardPass(); fwd.embed([1]); fwd.state([ws]); made = fwd.epilogue(fn); pipe.submit(fwd)
        return made
    def two():
        x = intrinsics.output(0, 'logits')
        return reduce_argmax(x), reduce_max(x)
"""
LINE = HEAD.count("\n") + 2  # of a body's second line


def program(*lines: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in lines)


USES = [
    "out == 30", "30 == out", "out != 30", "out in model.eos", "out < 3", "3 >= out", "bool(out)", "not out", "out and 1",
    "1 if out else 2", "out + 1", "1 + out", "out - 1", "2 ** out", "divmod(out, 2)", "-out", "~out", "abs(out)", "round(out)",
    "math.floor(out)", "out | 1", "int(out)", "float(out)", "complex(out)", "operator.index(out)", "[1, 2][out]", "range(out)",
    "len(out)", "list(out)", "[*out]", "next(iter(out))", "3 in out", "out[0]", "str(out)", "f'{out}'", "'%s' % out", "print(out)",
    "sum([out])", "max(out, 3)", "out == run()", "{30: 1}.get(3, out) == 3",
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
async def test_an_output_is_not_its_value(guest: Local, host: ScriptedHost, use: str) -> None:
    error = (await drive(guest, host, program("out = run()", use)))["e"]
    assert (error["type"], error["line"]) == ("NotAwaited", LINE), error
    assert "await it first" in error["message"]


CHANNEL_USES = [
    "ch == 3", "3 != ch", "ch in [3]", "ch < 3", "not ch", "1 if ch else 2", "ch + 1", "1 + ch", "-ch", "abs(ch)", "round(ch)", "ch | 1",
    "int(ch)", "float(ch)", "range(ch)", "len(ch)", "list(ch)", "3 in ch", "ch[0]", "sum([ch])", "run(lambda: ch + reduce_argmax(x()))",
    "run(lambda: reduce_argmax(x()) if ch > 2 else 0)", "f'{ch:.2f}'",
]  # fmt: skip


@pytest.mark.parametrize("use", CHANNEL_USES)
async def test_a_channel_is_not_its_value(guest: Local, host: ScriptedHost, use: str) -> None:
    error = (await drive(guest, host, program("x = lambda: intrinsics.output(0, 'logits'); ch = Channel.of(3)", use)))["e"]
    assert (error["type"], error["line"]) == ("UsageError", LINE), error
    assert ".take()" in error["message"] and "await ch.take()" in error["message"]


async def test_channels_are_told_apart_by_what_they_are(guest: Local, host: ScriptedHost) -> None:
    lines = (
        "ch, other = Channel.of(3), Channel.of(3)",
        "return [ch == other, ch == ch, ch != other, ch in [other, ch], ch == None, len({ch, other}), {ch: 1}[ch], str(ch) == repr(ch)]",
    )
    assert await result_of(guest, host, program(*lines)) == [False, True, True, True, False, 2, 1, True]


async def test_every_operator_of_a_number_or_list_is_refused(guest: Local, host: ScriptedHost) -> None:
    from inferlet._output import Output

    ours = {"__eq__", "__ne__", "__hash__", "__repr__"}  # by identity
    changed = {"__setitem__", "__delitem__", "__iadd__", "__imul__"}  # of a list; `+=` falls back to `+`
    other = {"__class_getitem__", "__getnewargs__", "__getformat__"}
    wanted = {n for kind in (int, float, list) for n in dir(kind) if n.startswith("__") and not hasattr(object, n)} - changed - other
    wanted |= {"__lt__", "__le__", "__gt__", "__ge__", "__str__", "__format__"}
    assert len(wanted) > 40
    assert wanted | ours <= set(vars(Output)), wanted - set(vars(Output))


@pytest.mark.parametrize(
    "use", ["outs == (1, 2)", "outs == 30", "outs != 30", "outs in model.eos", "f'{outs}'", "str(outs)", "outs[0] == 1"]
)
async def test_several_outputs_are_not_their_values(guest: Local, host: ScriptedHost, use: str) -> None:
    error = (await drive(guest, host, program("outs = run(two)", use)))["e"]
    assert (error["type"], error["line"]) == ("NotAwaited", LINE), error


async def test_after_the_await_it_is_still_not_its_value(guest: Local, host: ScriptedHost) -> None:
    error = (await drive(guest, host, program("out = run(); await out", "out == 65")))["e"]
    assert (error["type"], error["line"]) == ("NotAwaited", LINE)


async def test_what_asks_for_the_object_works(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "out, other, outs = run(), run(), run(two)",
        "held = [out, other, outs]",
        "return [repr(out), out is out, out == out, out != out, {out: 1, other: 2}[other], len({out, other, outs}), held.index(out),",
        "        out in held, outs == outs, len(outs), len([*outs]), out is not None, 'await it' in repr(outs)]",
    ]
    host.reply = lambda submit, n: [1 for _ in submit["outs"]]
    assert await result_of(guest, host, program(*lines)) == [
        "<Output: await it>", True, True, False, 2, 3, 0, True, True, 2, 2, True, True,
    ]  # fmt: skip


WAYS = [
    "asyncio.gather(out, other, out)",
    "asyncio.gather(*[asyncio.create_task(o) for o in (out, other, out)])",
    "asyncio.gather(asyncio.ensure_future(out), asyncio.shield(other), asyncio.wait_for(out, 9))",
    "asyncio.gather(*(await asyncio.wait([asyncio.ensure_future(out)]))[0], other, out)",
    "grouped(out, other, out)",
    "completed(out, other)",
]


@pytest.mark.parametrize("way", WAYS)
async def test_asyncio_takes_outputs(guest: Local, host: ScriptedHost, way: str) -> None:
    lines = [
        "async def grouped(*outs):",
        "    async with asyncio.TaskGroup() as group: tasks = [group.create_task(o) for o in outs]",
        "    return [t.result() for t in tasks]",
        "async def completed(*outs):",
        "    return [await out for out in asyncio.as_completed(outs)] + [await outs[0]]",
        "out, other = run(), run()",
        f"return list(await {way})",
    ]
    values = await result_of(guest, host, program(*lines))
    assert sorted(values) == [65, 65, 66]
    assert values == [65, 66, 65] or "completed" in way


@pytest.mark.parametrize("made", ["run()", "run(two)"])
async def test_asyncio_wait_says_that_it_takes_tasks(guest: Local, host: ScriptedHost, made: str) -> None:
    error = (await drive(guest, host, program(f"out = {made}", "await asyncio.wait([out])")))["e"]
    assert (error["type"], error["line"]) == ("UsageError", LINE), error
    assert "asyncio.wait takes tasks; give it asyncio.ensure_future(out)" in error["message"]


async def test_passes_without_outputs_are_awaited_apart(guest: Local, host: ScriptedHost) -> None:
    lines = [
        "ch = Channel('i32', (), 4)",
        "ends = [run(lambda: ch.put(reduce_argmax(intrinsics.output(0, 'logits')))) for _ in range(2)]",
        "return len(await asyncio.gather(*ends)), len(set(ends))",
    ]
    host.reply = lambda submit, n: [0]
    assert await result_of(guest, host, program(*lines)) == [2, 2]
    assert len({id for w in host.awaited for id in w}) == 2, "each has an end of its own"


GIVEN = {
    "out": "an un-awaited Output (await it first)",
    "ws.length()": "an un-awaited WorkingSet.length() (await it first)",
    "tensor": "Tensor(%1: i32[]) (return it from the epilogue, and await what epilogue() gave)",
    "None": "None",
    "'s'": "'s'",
    "1.5": "1.5",
    "[[1]]": "[[1]]",
    "Thing()": ".Thing object>",
}
FIXES = ("; use ", "; token ids are", "; an i32 cell takes", ", the channel's cells have shape ", "; a cell has at most 4 extents")
CALLS: list[tuple[str, str, str]] = [  # call, what its error begins with, what fits besides
    ("model.encode(X)", "model.encode: text is ", "'s'"),
    ("model.decode(X)", "model.decode: ids", ""),
    ("model.token_bytes(X)", "model.token_bytes: ids", ""),
    ("await model.prewarm(X)", "model.prewarm: ids", ""),
    ("await sleep(X)", "sleep: seconds is ", "1.5"),
    ("log('a', level=X)", "log: level is ", ""),
    ("Channel(X)", "Channel: dtype is ", ""),
    ("Channel('f32', X)", "Channel: shape", ""),
    ("Channel('f32', (X,))", "Channel: shape[0] is ", ""),
    ("Channel('f32', (), X)", "Channel: capacity is ", ""),
    ("Channel('f32', host=X)", "Channel: host is ", "None"),
    ("Channel.of(X)", "Channel.of: values ", "1.5 [[1]]"),
    ("Channel.of([X])", "Channel.of: values has ", "1.5 [[1]]"),
    ("Channel.counter(X)", "Channel.counter: seed is ", ""),
    ("Channel('i32').put(X)", "Channel.put: value ", ""),
    ("Channel('i32', (2,)).set(X)", "Channel.set: value ", ""),
    ("WorkingSet(reuse=X)", "WorkingSet: reuse is ", ""),
    ("ws.fork(X)", "WorkingSet.fork: pipe is ", "None"),
    ("ws.fork(buffer=X)", "WorkingSet.fork: buffer is ", ""),
    ("ws.commit(X)", "WorkingSet.commit: ", "out"),
    ("ws.discard(X)", "WorkingSet.discard: n is ", "None"),
    ("ws.truncate(X)", "WorkingSet.truncate: n is ", ""),
    ("await ws.save(X)", "WorkingSet.save: name is ", "'s'"),
    ("await WorkingSet.open(X)", "WorkingSet.open: name is ", "'s'"),
    ("StateGeometry(X, None, 0)", "StateGeometry: mode is ", ""),
    ("StateGeometry.folding(window=X)", "StateGeometry: window is ", "None"),
    ("StateGeometry.folding(window=2, sinks=X)", "StateGeometry: sinks is ", ""),
    ("StateGeometry.folding(mask=[[X]])", "StateGeometry: mask[0] has ", ""),
    ("StateGeometry.buffered(tree=[X])", "StateGeometry: tree[0] is ", ""),
    ("fwd.embed(X)", "ForwardPass.embed: tokens", "[[1]]"),
    ("fwd.embed([[X]])", "ForwardPass.embed: tokens[0][0] is ", ""),
    ("fwd.state(X)", "ForwardPass.state: working_sets", ""),
    ("fwd.state([ws], X)", "ForwardPass.state: geometry is ", ""),
    ("fwd.read([X])", "ForwardPass.read: position", "[[1]]"),
    ("fwd.read([[0], X])", "ForwardPass.read: position", ""),
    ("pipe.submit(X)", "Pipeline.submit: got ", ""),
    ("pipe.stop_when(X)", "Pipeline.stop_when: channel is ", ""),
]


@pytest.mark.parametrize(("call", "begins", "fits"), CALLS, ids=[call for call, _, _ in CALLS])
async def test_a_wrong_argument_is_named_with_its_value(guest: Local, host: ScriptedHost, call: str, begins: str, fits: str) -> None:
    lines = [
        "class Thing: pass",
        "kept, out, told, fwd = [], run(), [], None",
        "run(lambda: kept.append(reduce_argmax(intrinsics.output(0, 'logits'))) or kept[0])",
        "tensor = kept[0]",
        "async def tell(call):",
        "    try:",
        "        told.append(['fits', repr(await call())])",
        "    except Exception as error:",
        "        told.append([type(error).__name__, str(error)])",
    ]
    wrong = {given: words for given, words in GIVEN.items() if given not in fits.split(" ")}
    for k, given in enumerate(wrong):
        lines += [f"fwd = ForwardPass(); X = {given}", f"async def call{k}(): return {call}", f"await tell(call{k})"]
        lines += ["if asyncio.iscoroutine(X): X.close()"]
    told = await result_of(guest, host, program(*lines, "return told"))
    for (given, words), (kind, message) in zip(wrong.items(), told, strict=True):
        assert kind == "UsageError", (given, kind, message)
        assert message.startswith(begins), (given, message)
        assert any(fix in message for fix in FIXES), (given, message)
        assert words in message or given in ("[[1]]", "'s'", "1.5"), (given, message)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("chat.user(out)", "chat.user: content is of type Output (await it first); use a str"),
        ("chat.role(out, 'x')", "chat.role: role is of type Output (await it first); use a str"),
        ("chat.user(['secret'])", "chat.user: content is of type list; use a str"),
        ("chat.render(out)", "chat.render: messages is of type Output (await it first); use a list of"),
        ("chat.text([], tools=out)", "chat.text: tools is of type Output (await it first); use a list of tools, or None"),
        ("chat.text([], cue=out)", "chat.text: cue is an un-awaited Output (await it first); use True or False"),
        ("send({'a': [out]})", "send: value['a'][0] is of type Output (await it first); send text or JSON"),
        ("log('token', out)", "log: values[1] is an un-awaited Output (await it first)"),
        ("model.encode(b'ab')", "model.encode: text is b'ab'; use a str, text.decode() for example"),
        ("ForwardPass().read([0, [1]])", "ForwardPass.read: position is [1]; use an integer"),
        ("ForwardPass().read([[0], 1])", "ForwardPass.read: positions[1] is 1; use either positions or lists of them"),
    ],
)
async def test_what_an_error_says(guest: Local, host: ScriptedHost, call: str, words: str) -> None:
    error = (await drive(guest, host, program("out = run()", call)))["e"]
    assert (error["type"], error["line"]) == ("UsageError", LINE), error
    assert words in error["message"]
