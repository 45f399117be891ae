"""The guest's side of prefix reuse, and the two functions named `log`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import Fail, ScriptedHost, drive, result_of

HEAD = "from inferlet import errors, log, model\nfrom inferlet.eta import *\nfrom inferlet import eta\n"


def main(body: str, head: str = HEAD) -> str:
    """A program; the first line of `body` comes two lines behind `head`."""
    return f"{head}async def main(input):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())


@pytest.mark.parametrize(
    ("body", "op", "payload"),
    [
        ("WorkingSet()", "ws.new", {"ws": 1}),
        ("WorkingSet(reuse=True)", "ws.new", {"ws": 1}),
        ("WorkingSet(reuse=False)", "ws.new", {"ws": 1, "reuse": False}),
        ("return await WorkingSet().cached()", "ws.cached", {"ws": 1, "f": 2}),
        ("return await model.prewarm([1, 2])", "prewarm", {"ids": [1, 2], "f": 1}),
        ("return await model.prewarm(range(3))", "prewarm", {"ids": [0, 1, 2], "f": 1}),
        ("return await model.prewarm([])", "prewarm", {"ids": [], "f": 1}),
    ],
)
async def test_what_is_sent(guest: Local, host: ScriptedHost, body: str, op: str, payload: dict[str, Any]) -> None:
    assert await result_of(guest, host, main(body)) == (7 if "await" in body else None)
    assert host.payloads(op) == [payload]


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("WorkingSet(reuse=0)", "UsageError", "WorkingSet: reuse is 0; use True or False"),
        ("Pipeline(False)", "TypeError", "; call it as Pipeline()"),
        ("WorkingSet(False)", "TypeError", "; call it as WorkingSet(*, reuse=True)"),
        ("ws = WorkingSet(); ws.drop(); await ws.cached()", "UsageError", "WorkingSet.cached: this working set was dropped"),
        ("await model.prewarm('text')", "UsageError", "model.prewarm: ids is 'text'; use a list of token ids"),
        ("await model.prewarm([1, -1])", "UsageError", "model.prewarm: ids[1] is -1"),
        ("await model.prewarm([1.5])", "UsageError", "model.prewarm: ids[0] is 1.5"),
    ],
)
async def test_mistakes_are_named(guest: Local, host: ScriptedHost, body: str, kind: str, words: str) -> None:
    error = (await drive(guest, host, main(body)))["e"]
    assert (error["type"], error["line"]) == (kind, 5) and words in error["message"]


@pytest.mark.parametrize("kind", ["ContextLengthExceeded", "OutOfPages", "EngineLost"])
async def test_a_prewarm_that_fails_can_be_caught(guest: Local, host: ScriptedHost, kind: str) -> None:
    body = f"try: await model.prewarm([1])\nexcept errors.{kind} as error: return [str(error), error.fields]"
    host.op_prewarm = lambda f: host._events.append([f["f"], False, Fail(kind, "no", needed=3).error])  # type: ignore[method-assign]
    assert await result_of(guest, host, main(body)) == ["no", {"needed": 3}]


# --- inferlet.log writes a line, inferlet.eta.log is the logarithm

TRACED = """
fwd = ForwardPass()
fwd.embed([1])
fwd.state([WorkingSet()])
def epilogue():
    return LOG(intrinsics.output(0, "logits"))
fwd.epilogue(epilogue)
log("a line")
"""
IMPORTS = {
    "before": "from inferlet import eta, log\nfrom inferlet.eta import *\n",
    "after": "from inferlet.eta import *\nfrom inferlet import eta, log\n",
    "by name": "from inferlet import *\nfrom inferlet.eta import ForwardPass, WorkingSet, intrinsics\n",
    "both": "from inferlet import log\nfrom inferlet import eta\nfrom inferlet.eta import *\nfrom inferlet.eta import log as ln\n",
    "modules": "import inferlet\nfrom inferlet import eta\nfrom inferlet.eta import *\nlog = inferlet.log\n",
}


@pytest.mark.parametrize("imports", IMPORTS)
async def test_a_star_import_hides_no_log(guest: Local, host: ScriptedHost, imports: str) -> None:
    name = "ln" if imports == "both" else "eta.log"
    body = TRACED.replace("LOG", name) + "pipe = Pipeline()\npipe.submit(fwd)" * (imports != "by name")
    await result_of(guest, host, main(body, IMPORTS[imports]))
    assert host.logs == [("info", "a line")]
    assert "by name" in imports or '"log"' in host.payloads("program")[0]["text"]


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        (HEAD, "UsageError", "this one writes a log line; the logarithm of a tensor is eta.log(x)"),
        ("from inferlet.eta import *\n", "NameError", "eta.log(x) after `from inferlet import eta` is the logarithm"),
        ("from inferlet.eta import *\nfrom inferlet.eta import log\n", "TraceError", "log"),  # of the text, behind the epilogue
    ],
)
async def test_the_wrong_log_is_named(guest: Local, host: ScriptedHost, head: str, kind: str, words: str) -> None:
    error = (await drive(guest, host, main(TRACED.replace("LOG", "log"), head)))["e"]
    assert error["type"] == kind and words in error["message"]
    assert error["line"] == head.count("\n") + (8 if kind == "TraceError" else 6)
    assert not host.logs


async def test_nothing_else_is_hidden_by_a_star_import(guest: Local) -> None:
    import builtins

    import inferlet  # type: ignore[import-not-found]

    assert not set(inferlet.eta.__all__) & {*inferlet.__all__, *dir(builtins)}
    assert "log" in dir(inferlet.eta) and inferlet.eta.log is not inferlet.log
