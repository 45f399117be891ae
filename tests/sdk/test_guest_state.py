"""Geometry, commits and saved sets of the guest: what is sent, what is refused at the author's line, and the example of a draft tree."""

from __future__ import annotations

from typing import Any

import pytest

from pie_core.engine.geometry import Geometry
from tests.sdk.conftest import SDK, Local
from tests.sdk.real_engine import Job, run_jobs
from tests.sdk.scripted_host import Fail, ScriptedHost, drive

HEAD = """
from inferlet import errors, model, sleep
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

def passed(ws, geometry, tokens=(1, 2)):
    fwd, pipe = ForwardPass(), Pipeline()
    fwd.embed(list(tokens))
    fwd.state([ws], geometry)
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    return out

async def main(input):
    ws = WorkingSet()
"""


async def run(host: ScriptedHost, guest: Local, body: str) -> Any:
    return await drive(guest, host, HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines()))


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("buffered(tree=[-1, 0])", {"mode": "buffered", "tree": (-1, 0)}),
        ("buffered(tree=range(-1, 1), window=3, sinks=1)", {"mode": "buffered", "tree": (-1, 0), "window": 3, "sinks": 1}),
        ("folding(mask=[[True, False], [True, True]])", {"mask": [[True, False], [True, True]]}),
        ("folding(mask=[[True] * 33 + [False], [False] + [True] * 33])", {"mask": [[True] * 33 + [False], [False] + [True] * 33]}),
        ("folding(mask=[[1], [3]])", {"mask": [[1], [3]]}),
    ],
)
async def test_geometry_reaches_the_engine_as_it_was_given(host: ScriptedHost, guest: Local, call: str, want: dict[str, Any]) -> None:
    await run(host, guest, f"return await passed(ws, StateGeometry.{call})")
    (sent,) = host.payloads("submit")
    assert Geometry.check(**sent["geo"]) == Geometry.check(**want)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("StateGeometry.buffered(tree=[])", "tree is []; use the parent of each token"),
        ("StateGeometry.buffered(tree=[-2])", "tree[0] is -2; use an integer from -1"),
        ("StateGeometry.folding(mask=[[True], [True, True]])", "mask[1] has 2 entries and mask[0] has 1"),
        ("StateGeometry.folding(mask=[[True, 1]])", "mask mixes bools and ints"),
        ("StateGeometry.folding(mask=[[1 << 32]])", "mask[0] is 4294967296"),
        ("StateGeometry.folding(mask=7)", "mask is 7; use a list of rows"),
        ("StateGeometry.buffered(mask=[[True]], tree=[-1, 0])", "mask has 1 rows and tree 2 entries"),
        ("passed(ws, StateGeometry.buffered(tree=[-1]))", "mask or tree for 1 tokens of one working set; this pass has [2] tokens"),
        ("ws.commit([0, -1])", "path[1] is -1"),
        ("ws.commit(1.5)", "WorkingSet.commit: n is 1.5"),
        ("ws.commit(Channel('u32', (), host='writer'))", "the program is this channel's writer"),
        ("ws.commit(Channel('f32'))", "WorkingSet.commit: the channel holds f32[]; use i32 or u32"),
        ("ws.commit(Channel('i32', (2, 2)))", "WorkingSet.commit: the channel holds i32[2, 2]; use i32 or u32"),
        ("ws.drop(); await ws.length()", "WorkingSet.length: this working set was dropped"),
        ("ws.drop(); ForwardPass().state([ws])", "ForwardPass.state: working_sets[0]: this working set was dropped"),
        ("await ws.save(3)", "WorkingSet.save: name is 3; use a text"),
        ("await ws.save('a' * 101)", "use 1 to 100 letters, digits"),
        ("await ws.save('')", "WorkingSet.save: name is ''; use 1 to 100 letters"),
        ("await WorkingSet.open('../x')", "WorkingSet.open: name is '../x'; use 1 to 100 letters"),
        ("await WorkingSet.open(None)", "WorkingSet.open: name is None; use a text"),
    ],
)
async def test_mistakes_are_named(host: ScriptedHost, guest: Local, body: str, words: str) -> None:
    answer = await run(host, guest, body)
    assert answer["s"] == "failed" and answer["e"]["type"] == "UsageError"
    assert words in answer["e"]["message"]
    assert answer["e"]["line"] > 14 or "passed" in body


async def test_commits_of_every_kind(host: ScriptedHost, guest: Local) -> None:
    host.reply = lambda submit, n: [2]
    answer = await run(
        host,
        guest,
        """
        ws.commit(0)
        ws.commit([0, 2])
        ws.commit((1,))
        ch = Channel("i32", (4,))
        ws.commit(ch)
        out = passed(ws, StateGeometry.buffered())
        ws.commit(out)
        await out
        ws.commit(out)
        ws.discard()
        ws.discard(1)
        return out.id
        """.replace("        ", ""),
    )
    assert answer["s"] == "done"
    (channel,) = host.payloads("ch.new")
    assert channel["host"] == "reader"
    got = [payload["n"] for payload in host.payloads("ws.commit")]
    assert got == [0, [0, 2], [1], {"ch": channel["ch"]}, {"out": answer["r"]}, 2]
    assert [payload["n"] for payload in host.payloads("ws.discard")] == [None, 1]


async def test_a_vector_that_is_known_ends_before_its_first_negative(host: ScriptedHost, guest: Local) -> None:
    host.reply = lambda submit, n: [{"b64": "AAAAAAIAAAD/////", "dtype": "i32", "shape": [3]}]
    await run(host, guest, "out = passed(ws, StateGeometry.buffered())\nawait out\nws.commit(out)\nreturn 1")
    assert [payload["n"] for payload in host.payloads("ws.commit")] == [[0, 2]]


async def test_committing_by_an_output_that_failed_or_was_never_submitted(host: ScriptedHost, guest: Local) -> None:
    host.reply = lambda submit, n: [Fail("PassFailed")]
    body = """
    out = passed(ws, StateGeometry.buffered())
    try:
        await out
    except errors.PassFailed:
        pass
    ws.commit(out)
    """
    answer = await run(host, guest, body.replace("\n    ", "\n"))
    assert answer["e"]["type"] == "PassFailed"
    body = "fwd = ForwardPass()\nws.commit(fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, 'logits'))))"
    answer = await run(host, guest, body)
    assert answer["e"]["type"] == "NotSubmitted"


async def test_save_and_open(host: ScriptedHost, guest: Local) -> None:
    answer = await run(host, guest, "n = await ws.save('a.b-c')\nagain = await WorkingSet.open('a.b-c')\nreturn [n, again.id != ws.id]")
    assert answer == {"s": "done", "r": [7, True]}
    (saved,), (opened,) = host.payloads("ws.save"), host.payloads("ws.open")
    assert saved["name"] == opened["name"] == "a.b-c"
    assert {p["ws"] for p in host.payloads("ws.drop")} == {saved["ws"], opened["ws"]}


async def test_what_cannot_be_opened_is_dropped(host: ScriptedHost, guest: Local) -> None:
    host.open_error = {"type": "UnknownSavedSet", "message": "nothing is saved as 'x'"}
    answer = await run(host, guest, "await WorkingSet.open('x')")
    assert answer["e"]["type"] == "UnknownSavedSet" and answer["e"]["line"] == len(HEAD.splitlines()) + 1
    assert [p["ws"] for p in host.payloads("ws.drop")].count(host.payloads("ws.open")[0]["ws"]) == 1


GREEDY = """
from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe, made = WorkingSet(), Pipeline(), []
    feed = chat.prefix() + model.encode(input["prompt"])
    while len(made) < input["max_tokens"]:
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        feed = [await out]
        if feed[0] in model.eos:
            break
        made += feed
    return made
"""


def test_a_tree_of_drafts_gives_the_tokens_of_greedy_decoding() -> None:
    source = (SDK.parent / "examples" / "speculative_tree.py").read_text(encoding="utf-8")
    inputs = [{"prompt": p, "max_tokens": 24} for p in ("ha ha ha ha ha ha ha ha ha ha", "Paris is the capital of France. Rome is the")]
    jobs = [Job("tree.py", source, i) for i in inputs] + [Job("greedy.py", GREEDY, i) for i in inputs]
    jobs.append(Job("none.py", source, inputs[0] | {"drafts": 0, "max_tokens": 4}))
    *trees, first, second, none = run_jobs("cpu", jobs)
    assert [tree["tokens"] for tree in trees] == [first, second]
    assert trees[0]["passes"] < len(first) / 2, "a text that repeats itself is guessed"
    assert none["tokens"] == first[:4] and none["passes"] == 4


def test_names_are_checked_as_the_engine_does(guest: Local) -> None:
    from inferlet import _state

    from pie_core.engine import saved_sets

    assert _state._NAME == saved_sets._NAME


WAITS = ["await out", "await asyncio.gather(out, asyncio.sleep(0))", "await end.take()"]


@pytest.mark.parametrize("wait", WAITS)
async def test_an_error_does_not_hold_the_sets_that_it_was_raised_past(wait: str, host: ScriptedHost, guest: Local) -> None:
    """Outputs and waits keep their errors, but not the frames that these were raised through: pages would wait for the collector."""
    source = f"""
import asyncio, gc
from inferlet import errors, send
from inferlet.eta import Channel, ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax
async def branch():
    ws, pipe, end = WorkingSet(), Pipeline(), Channel("i32", host="reader")
    def step():
        token = reduce_argmax(intrinsics.output(0, "logits"))
        end.put(token)
        return token
    fwd = ForwardPass()
    fwd.embed([1])
    fwd.state([ws])
    out = fwd.epilogue(step)
    pipe.submit(fwd)
    {wait}
async def main(input):
    gc.collect()
    gc.disable()
    try:
        await branch()
    except errors.PassFailed:
        pass
    await asyncio.sleep(0.001)  # asyncio's own callbacks are over
    send("told")
    gc.enable()
"""
    host.reply = lambda submit, n: [Fail("PassFailed") for _ in submit["outs"]]
    host.cells = {channel: [Fail("PassFailed")] for channel in range(20)}
    assert (await drive(guest, host, source))["s"] == "done"
    ops = [op for op, _ in host.calls]
    assert host.sent == ["told"] and ops.index("ws.drop") < ops.index("send"), ops
