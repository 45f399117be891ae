"""Epilogues as authors write them: what a trace sees of its pass, and mistakes, each named at the author's line before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pie_core.eta import FUNCTIONS
from pie_core.eta.program import Program
from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive, result_of

HEAD = """
from inferlet.eta import *
from inferlet import model

x = 'logits'
async def main(input):
    ws, pipe, fwd, rng = WorkingSet(), Pipeline(), ForwardPass(), Channel.counter(1)
"""
LINE = HEAD.count("\n") + 1  # of a body's first line


def program(body: str) -> str:
    return HEAD + "\n".join("    " + line for line in body.strip("\n").split("\n")) + "\n"


def last_program(host: ScriptedHost) -> Program:
    return Program.parse(host.payloads("program")[-1]["text"])


async def test_every_function_of_the_tables_is_there(guest: Local, host: ScriptedHost) -> None:
    from inferlet import eta

    assert set(FUNCTIONS) - {"log"} <= set(eta.__all__)  # see inferlet.log
    assert {name: vars(eta)[name] for name in FUNCTIONS} == FUNCTIONS
    assert all(fn.__doc__ for fn in FUNCTIONS.values())
    assert {"softmax", "top_k", "sort_desc", "gather", "scatter_add", "matmul", "pivot_threshold", "cumsum"} <= set(FUNCTIONS)


# the calls before the epilogue; the shape of intrinsics.outputs
ROWS: list[tuple[str, list[int]]] = [
    ("fwd.embed([1, 2, 3]); fwd.state([ws]); fwd.read([0, 1, -1])", [3, 256]),
    ("fwd.embed([1, 2, 3]); fwd.read([0, -1])", [2, 256]),
    ("fwd.embed([1]); fwd.state([ws])", [1, 256]),
    ("fwd.embed([[1], [2]]); fwd.state([ws, WorkingSet()])", [2, 256]),
    ("fwd.embed([[1, 2], [2, 3]]); fwd.state([ws, WorkingSet()]); fwd.read([[0, 1], [1]])", [3, 256]),
]


@pytest.mark.parametrize(("calls", "shape"), ROWS, ids=[c for c, _ in ROWS])
async def test_outputs_have_a_row_for_each_read_out(guest: Local, host: ScriptedHost, calls: str, shape: list[int]) -> None:
    body = f"{calls}\nfwd.epilogue(lambda: reduce_argmax(intrinsics.outputs('logits')))\nreturn None"
    await result_of(guest, host, program(body))
    [rows] = [node for node in last_program(host).ops if node.name == "outputs"]
    assert list(rows.shape) == shape


ANY_ORDER = [
    "fwd.epilogue(best); fwd.embed([1, 2]); fwd.state([ws])",
    "fwd.epilogue(best); fwd.state([ws]); fwd.embed([1, 2])",
    "fwd.read([0]); fwd.epilogue(best); fwd.state([ws]); fwd.embed([1, 2])",
    "fwd.state([ws]); fwd.epilogue(best); fwd.embed([1, 2])",
]


@pytest.mark.parametrize("calls", ANY_ORDER)
async def test_an_epilogue_over_single_read_outs_may_come_before_embed_and_state(guest: Local, host: ScriptedHost, calls: str) -> None:
    body = f"best = lambda: reduce_argmax(intrinsics.output(0, x))\n{calls}\npipe.submit(fwd)"
    await result_of(guest, host, program(body))
    [submit] = host.payloads("submit")
    assert (submit["tokens"], len(submit["ws"]), len(submit["outs"])) == ([1, 2], 1, 1) and submit["prog"]


async def test_the_same_function_for_passes_of_other_read_outs(guest: Local, host: ScriptedHost) -> None:
    body = """
def best():
    return reduce_argmax(intrinsics.outputs())
for n in (1, 2, 2, 3, 1, 3):
    f = ForwardPass(); f.embed([1, 2, 3]); f.state([ws]); f.read(list(range(n))); f.epilogue(best); pipe.submit(f)
"""
    await result_of(guest, host, program(body))
    shapes = [Program.parse(p["text"]).out_types[0][1][0] for p in host.payloads("program")]
    assert shapes == [1, 2, 3]
    ids = [s["prog"] for s in host.payloads("submit")]
    assert [ids.index(i) for i in ids] == [0, 1, 1, 3, 0, 3]


async def test_multi_result_functions_give_several_outputs(guest: Local, host: ScriptedHost) -> None:
    host.reply = lambda submit, n: [len(submit["outs"])] * len(submit["outs"])
    body = """
fwd.embed([1]); fwd.state([ws])
values, indices = fwd.epilogue(lambda: top_k(intrinsics.output(0, x), 5))
pipe.submit(fwd)
return [await values, await indices]
"""
    assert await result_of(guest, host, program(body)) == [2, 2]
    assert last_program(host).out_types == (("f32", (5,)), ("u32", (5,)))


STAGES = ["prologue", "on_attn_proj", "on_attn"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_is_traced_and_verified_and_submit_refuses_it_by_name(guest: Local, host: ScriptedHost, stage: str) -> None:
    body = f"""
seen = Channel('u32', (3,))
def fn():
    seen.put(intrinsics.positions() + 1)
fwd.embed([1, 2, 3]); fwd.state([ws])
fwd.{stage}(fn)
pipe.submit(fwd)
"""
    error = (await drive(guest, host, program(body)))["e"]
    assert (error["type"], error["line"]) == ("UnsupportedStage", LINE + 5)
    assert f"has the stage {stage}; only the epilogue runs yet" in error["message"]
    assert not host.payloads("submit")


READY = "fwd.embed([1, 2, 3]); fwd.state([ws]); fwd.read([0, -1])"
T = "Channel('f32', (4,))"
LOGITS = "intrinsics.output(0, x)"
# the epilogue; the error's type; words of its message: op, shapes and dtypes, or the fix
MISTAKES: list[tuple[str, str, list[str]]] = [
    (f"lambda: {LOGITS} + iota(8).cast('f32')", "TraceError", ["add", "[256]", "[8]", "broadcast"]),
    (f"lambda: {LOGITS} + iota(256)", "TraceError", ["add", "f32[256]", "u32[256]", "cast"]),
    (f"lambda: {LOGITS} if {LOGITS} > 0.0 else 1.0", "TraceError", ["no value while it is traced", "select(cond, a, b)"]),
    (f"lambda: {LOGITS} > 0.0 and {LOGITS} < 1.0", "TraceError", ["&"]),
    (f"lambda: {LOGITS} * [1.0] * 256", "TraceError", ["mul", "list constant cannot be combined with a f32 tensor"]),
    (f"lambda: iota(4) * 0.5 + {LOGITS}", "TraceError", ["mul", "float constant cannot be combined with a u32 tensor", "cast(x, 'f32')"]),
    ("lambda: iota(4) / 2", "TraceError", ["/ divides f32, got u32[4]", "//"]),
    (f"lambda: float({LOGITS}[0])", "TraceError", ["no value while it is traced", "awaiting the output"]),
    (f"lambda: [v for v in {LOGITS}]", "TraceError", ["cannot be looped over", "f32[256]"]),
    (f"lambda: top_k({LOGITS}, 300)", "TraceError", ["top_k", "300", "256"]),
    (f"lambda: top_k({LOGITS}, {LOGITS}[0])", "TraceError", ["top_k", "k as a Python int"]),
    (f"lambda: reshape({LOGITS}, (3, 100))", "TraceError", ["reshape", "[256]", "[3, 100]"]),
    (f"lambda: matmul(reshape({LOGITS}, (16, 16)), reshape({LOGITS}, (8, 32)))", "TraceError", ["matmul", "16, 16", "8, 32"]),
    (f"lambda: gather({LOGITS}, {LOGITS})", "TraceError", ["gather", "f32[256]"]),
    (f"lambda: {LOGITS}[{LOGITS} > 0.0]", "TraceError", ["unknown length", "select"]),
    (f"lambda: {LOGITS}[256]", "TraceError", ["index 256 is out of range", "f32[256]"]),
    (f"lambda: gumbel_max({LOGITS} / 0.0, rng.take())", "TraceError", ["div: a division by 0", "reduce_argmax(logits)"]),
    (f"lambda: sample({LOGITS}, rng.take(), float('nan'))", "TraceError", ["sample: temperature is a finite number, got nan"]),
    (f"lambda: gumbel_max({LOGITS})", "TypeError", ["'state'", "gumbel_max(logits, state)"]),
    (f"lambda: gumbel_max({LOGITS}, rng)", "TraceError", ["rng_gumbel", "state u32[2], got Channel", "take()"]),
    (f"lambda: gumbel_max({LOGITS}, 7)", "TraceError", ["rng_gumbel", "state u32[2], got int"]),
    (f"lambda: {T}.put({LOGITS})", "TraceError", ["put", "f32[4]", "f32[256]"]),
    (f"lambda: ({T}.read(), rng.read())", "TraceError", ["counter", "taken, not read"]),
    ("lambda: (lambda c: (c.read(), c.put(1.0)))(Channel.of(1.0))", "TraceError", ["take it instead of read"]),
    ("lambda: (lambda c: (c.take(), c.take()))(Channel.of(1.0))", "TraceError", ["took the channel's value already"]),
    ("lambda: intrinsics.output(2, x)", "TraceError", ["this pass has 2 read-outs"]),
    ("lambda: intrinsics.output(0, 'attention')", "TraceError", ["logits, hidden"]),
    ("lambda: intrinsics.tokens()", "TraceError", ["prologue", "not in 'epilogue'"]),
    (f"lambda: {LOGITS}.sum()", "AttributeError", ["'sum'"]),
    (f"lambda: select({LOGITS}, 1.0, 0.0)", "TraceError", ["select", "bool condition, got f32[256]"]),
    (f"lambda: {LOGITS} ** 2", "TraceError", ["x * x squares"]),
    (f"lambda: max({LOGITS})", "TraceError", ["reduce_max(x)", "max(x)"]),
    (f"lambda: sum({LOGITS})", "TraceError", ["reduce_sum(x)", "sum(x)"]),
    (f"lambda: {LOGITS}.__setitem__(0, 1.0)", "TraceError", ["never changes", "scatter_set(x, index, values)"]),
    ("lambda: Channel('f32').put([1.0, 2.0])", "TraceError", ["put: the channel holds f32[]", "the value is a list"]),
]


@pytest.mark.parametrize(("epilogue", "kind", "words"), MISTAKES, ids=[e for e, _, _ in MISTAKES])
async def test_mistakes_are_named_at_the_authors_line(guest: Local, host: ScriptedHost, epilogue: str, kind: str, words: list[str]) -> None:
    answer = await drive(guest, host, program(f"{READY}\nfwd.epilogue(\n    {epilogue}\n)\npipe.submit(fwd)"))
    assert answer["s"] == "failed"
    error: dict[str, Any] = answer["e"]
    assert (error["type"], error["line"]) == (kind, LINE + 2), error
    for word in words:
        assert word in error["message"], error["message"]
    assert not host.payloads("program") and not host.payloads("submit"), "nothing was sent"
    json.dumps(error)


ORDER: list[tuple[str, str, str]] = [
    ("fwd.epilogue(lambda: 3)", "TraceError", "returns Tensors, got int"),
    (
        "kept = []\nfwd.epilogue(lambda: kept.append(iota(2)) or kept[0])\nForwardPass().epilogue(lambda: iota(2) + kept[0])",
        "TraceError",
        "another trace",
    ),
    ("fwd.embed([1])\nfwd.epilogue(lambda: intrinsics.outputs(x))", "TraceError", "call .read(positions) before .epilogue(fn)"),
    ("fwd.embed([1]); fwd.state([ws]); fwd.epilogue(lambda: iota(2))\nfwd.read([0, 0])", "UsageError", "call read() before epilogue()"),
    ("fwd.embed([1]); fwd.state([ws]); fwd.epilogue(lambda: iota(2))\nfwd.read([0])", "UsageError", "call read() before epilogue()"),
    ("fwd.embed([1]); fwd.epilogue(lambda: iota(2))\nfwd.read([-1])", "UsageError", "call read() before epilogue()"),
    ("fwd.epilogue(lambda: intrinsics.outputs(x))", "TraceError", "call .read(positions) before .epilogue(fn)"),
    ("fwd.prologue(lambda: None)", "UsageError", "call embed() first"),
    ("fwd.embed([1]); fwd.prologue(lambda: None)\nfwd.prologue(lambda: None)", "UsageError", "ForwardPass.prologue: called twice"),
    ("fwd.embed([1])\nfwd.prologue(lambda: intrinsics.output(0))", "TraceError", "only there inside a function given to .epilogue"),
    ("fwd.embed([1])\nfwd.on_attn(lambda: intrinsics.query())", "TraceError", "returns nothing: put values into channels"),
    ("fwd.embed([1])\nfwd.on_attn(3)", "TraceError", "on_attn takes a function, got int"),
]


@pytest.mark.parametrize(("body", "kind", "words"), ORDER, ids=[b for b, _, _ in ORDER])
async def test_an_order_of_calls_that_cannot_work(guest: Local, host: ScriptedHost, body: str, kind: str, words: str) -> None:
    error = (await drive(guest, host, program(body)))["e"]
    assert (error["type"], error["line"]) == (kind, LINE + body.count("\n")), error
    assert words in error["message"]
    assert not host.payloads("submit")
