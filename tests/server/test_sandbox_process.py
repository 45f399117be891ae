"""Real guests on the real engine and host half, over the engine's deterministic runner: the whole way of a token but the model."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pie_core.codegen.layout import lane_layout
from pie_core.codegen.oracle import run_epilogue
from pie_core.device.protocol import NONE
from pie_core.engine.loop import Engine
from pie_core.eta.program import Program
from pie_core.host.process import InferletFailed, Process
from pie_server.sandbox import Limits, Sandbox
from tests.engine.fake_runner import VOCAB, FakeRunner, generate
from tests.engine.support import running
from tests.host.support import SERVICES, ToyTokenizer
from tests.sdk.conftest import SDK

NUMPY = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}


class OracleRunner(FakeRunner):
    """The fake runner with every op: epilogues run in the NumPy oracle."""

    def _lane(self, program: Program, lane: array[int], readouts: list[int | None], results: array[int]) -> None:
        layout = lane_layout(program)
        cells = {}
        for k, chan in enumerate(program.chans):
            if (at := lane[layout.take(k)]) != NONE:
                words = np.array(self.arena[at : at + math.prod(chan.shape)], np.uint32)
                cells[k] = (words.astype(np.bool_) if chan.dtype == "bool" else words.view(NUMPY[chan.dtype])).reshape(chan.shape)
        logits = np.full((len(readouts), VOCAB), -1.0, np.float32)
        for r, token in enumerate(readouts):
            logits[r, token] = 1.0
        params = [lane[layout.param(k)] for k in range(len(program.params))]
        outs, puts, status = run_epilogue(program, params, logits, None, lane[0], cells)
        results[lane[1]] = status
        for k, value in enumerate(outs):
            self._store(value, program.ops[program.outs[k]].dtype, lane[layout.out(k)], results)
        for k, value in puts.items():
            self._store(value, program.chans[k].dtype, lane[layout.put(k)], self.arena)
            self._store(value, program.chans[k].dtype, lane[layout.copy(k)], results)

    @staticmethod
    def _store(value: Any, dtype: str, at: int, target: array[int]) -> None:
        if at != NONE:
            cell = np.asarray(value, NUMPY[dtype]).reshape(-1)
            words = cell.astype(np.uint32) if dtype == "bool" else cell.view(np.uint32)
            target[at : at + len(words)] = array("I", words.tolist())


EXAMPLES = SDK.parent / "examples"
HEAD = "import asyncio\nfrom inferlet.eta import *\nfrom inferlet import chat, model, send, receive, log, sleep\n"
STEP = """
def step(pipe, ws, tokens, geometry=StateGeometry.folding()):
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state([ws], geometry)
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    return out
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=Limits(step_cpu_s=0.7), spares=0)
    yield made
    made.close()


async def run(engine: Engine, sandbox: Sandbox, source: str, input: Any = None, logs: list[tuple[str, str]] | None = None) -> Any:
    """The result of `source`; all its pages are free afterwards."""
    process = Process(engine, SERVICES, "program.py", on_log=None if logs is None else lambda level, text: logs.append((level, text)))
    return await process.run(sandbox.open(process.port), process.request(source, {} if input is None else input))


def prompt(text: str) -> list[int]:
    return [*SERVICES.chat.prefix(), *ToyTokenizer().encode(text)]


async def test_the_seed_example(sandbox: Sandbox) -> None:
    source = (EXAMPLES / "hello.py").read_text()
    expected = generate(prompt("hello there"), 8)
    async with running(OracleRunner()) as engine:
        assert await run(engine, sandbox, source, {"prompt": "hello there"}) == {"text": ToyTokenizer().decode(expected)}


async def test_sampling_is_repeatable_by_seed(sandbox: Sandbox) -> None:
    source = (EXAMPLES / "sampling.py").read_text()
    async with running(OracleRunner()) as engine:
        texts = [await run(engine, sandbox, source, {"prompt": "abc", "max_tokens": 12, "seed": s, "temperature": 50}) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [0, 1e-9])
async def test_sampling_at_temperature_0_is_greedy(sandbox: Sandbox, temperature: float) -> None:
    source = (EXAMPLES / "sampling.py").read_text()
    async with running(OracleRunner()) as engine:
        result = await run(engine, sandbox, source, {"prompt": "hello there", "max_tokens": 8, "temperature": temperature})
    tokens = generate(prompt("hello there"), 8)
    tokens = tokens[: tokens.index(SERVICES.model.eos[0])]
    assert result == {"text": b"".join(map(ToyTokenizer().token_bytes, tokens)).decode("utf-8", "replace")}


@pytest.mark.parametrize(
    ("example", "input", "words"),
    [
        ("sampling", {"temperature": -1}, "temperature is -1.0; use a number >= 0"),
        ("sampling", {"temperature": "NaN"}, "temperature is nan"),
        ("sampling", {"temperature": "inf"}, "temperature is inf"),
        ("sampling", {"max_tokens": 0}, "max_tokens is 0; use 1 or more"),
        ("fork", {"branches": 0}, "branches is 0; use 1 to 1000"),
        ("fork", {"branches": 2000}, "branches is 2000"),
        ("fork", {"max_tokens": -1}, "max_tokens is -1; use 1 to 512"),
    ],
)
async def test_examples_check_their_input(sandbox: Sandbox, example: str, input: dict[str, Any], words: str) -> None:
    source = (EXAMPLES / f"{example}.py").read_text()
    async with running(OracleRunner()) as engine:
        with pytest.raises(InferletFailed, match=words) as caught:
            await run(engine, sandbox, source, input)
    assert caught.value.type == "ValueError"


async def test_more_branches_than_passes_may_be_outstanding(sandbox: Sandbox) -> None:
    source = (EXAMPLES / "fork.py").read_text()
    async with running(OracleRunner()) as engine:
        result = await run(engine, sandbox, source, {"prompt": "abc" * 10, "branches": 200, "max_tokens": 2})
    assert len(result["texts"]) == 200


async def test_branches_share_a_prompt(sandbox: Sandbox) -> None:
    source = (EXAMPLES / "fork.py").read_text()
    async with running(OracleRunner()) as engine:
        result = await run(engine, sandbox, source, {"prompt": "abc" * 10, "branches": 3, "max_tokens": 5})
    assert len(result["texts"]) == 3


PROGRAMS: list[tuple[str, Any]] = [
    (  # the device feeds itself: no host round trip between the passes
        """
    ws, pipe, token = WorkingSet(), Pipeline(), Channel("i32", (1,), 1)
    def next_token():
        t = reduce_argmax(intrinsics.output(0, "logits"))
        token.put(t)
        return t
    outs = []
    for k in range(6):
        fwd = ForwardPass()
        fwd.embed([1, 2, 3] if k == 0 else token)
        fwd.state([ws])
        outs.append(fwd.epilogue(next_token))
        pipe.submit(fwd)
    return await asyncio.gather(*outs)
""",
        generate([1, 2, 3], 6),
    ),
    (
        """
    ws, pipe, stop = WorkingSet(), Pipeline(), Channel("bool")
    pipe.stop_when(stop)
    def check():
        t = reduce_argmax(intrinsics.output(0, "logits"))
        stop.put(t >= 0)
        return t
    outs, seen = [], []
    for k in range(3):
        fwd = ForwardPass()
        fwd.embed([1 + k])
        fwd.state([ws])
        outs.append(fwd.epilogue(check))
        pipe.submit(fwd)
    for out in outs:
        try: seen.append(type(await out).__name__)
        except InferletError as e: seen.append(type(e).__name__)
    return seen
""",
        ["int", "PassSkipped", "PassSkipped"],
    ),
    (
        """
    ws, pipe = WorkingSet(), Pipeline()
    await step(pipe, ws, [1, 2, 3], StateGeometry.buffered())
    ws.commit(2)
    ws.discard(1)
    return [await ws.length(), await step(pipe, ws, [3])]
""",
        [2, generate([1, 2, 3], 1)[0]],
    ),
    (
        """
    ch = Channel("f32", (2,), 2)
    ch.put([0.5, 1.5])
    ch.put([2.5, 3.5])
    try: ch.put([0, 0])
    except InferletError as e: return type(e).__name__
""",
        "ChannelFull",
    ),
    (
        """
    bias, ws, pipe = Channel("f32", (model.vocab,), 2), WorkingSet(), Pipeline()
    bias.put([0.0] * 7 + [1e9] + [0.0] * (model.vocab - 8))
    fwd = ForwardPass()
    fwd.embed([1])
    fwd.state([ws])
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits") + bias.take()))
    pipe.submit(fwd)
    return await out
""",
        7,
    ),
    (
        """
    ws, pipe, results = WorkingSet(), Pipeline(), Channel("i32", (), 4, host="reader")
    for k in range(3):
        fwd = ForwardPass()
        fwd.embed([1 + k])
        fwd.state([ws])
        fwd.epilogue(lambda: results.put(reduce_argmax(intrinsics.output(0, "logits"))))
        pipe.submit(fwd)
    return [await results.read(), await results.take(), await results.take(), await results.take()]
""",
        [generate([1], 1)[0], generate([1], 1)[0], generate([1, 2], 1)[0], generate([1, 2, 3], 1)[0]],
    ),
    (
        """
    ws, pipe = WorkingSet(), Pipeline()
    fwd = ForwardPass()
    fwd.embed([1, 2, 3])
    fwd.state([ws])
    fwd.read([0, -1])
    outs = fwd.epilogue(lambda: (reduce_argmax(intrinsics.output(0)), reduce_argmax(intrinsics.output(1)), intrinsics.output(0) > 1e30))
    pipe.submit(fwd)
    a, b, none = await outs
    return [a, b, len(none), any(none)]
""",
        [generate([1], 1)[0], generate([1, 2, 3], 1)[0], VOCAB, False],
    ),
]


@pytest.mark.parametrize(
    ("body", "expected"), PROGRAMS, ids=["device feed", "stop", "buffer", "full", "host writer", "host reader", "reads"]
)
async def test_programs(sandbox: Sandbox, body: str, expected: Any) -> None:
    source = f"{HEAD}from inferlet.errors import InferletError\n{STEP}\nasync def main(input):{body}"
    async with running(OracleRunner()) as engine:
        assert await run(engine, sandbox, source) == expected


FAILURES: list[tuple[str, str, int | None]] = [
    ("    await step(Pipeline(), WorkingSet(), [1] * 600)", "ContextLengthExceeded", 14),
    ("    step(Pipeline(), WorkingSet(), [100000])", "InvalidPass", 10),
    ("    await asyncio.Event().wait()", "Deadlock", 14),
    ("    return 1 / 0", "ZeroDivisionError", 14),
    ("    while True: pass", "CpuBudgetExceeded", None),
    ("    return len([WorkingSet() for _ in range(5000)])", "BudgetExceeded", None),
]


@pytest.mark.parametrize(("body", "kind", "line"), FAILURES, ids=[k for _, k, _ in FAILURES])
async def test_failures(sandbox: Sandbox, body: str, kind: str, line: int | None) -> None:
    source = f"{HEAD}{STEP}\nasync def main(input):\n{body}\n"
    async with running(OracleRunner()) as engine:
        with pytest.raises(InferletFailed) as caught:
            await run(engine, sandbox, source)
        assert caught.value.type == kind
        assert line is None or caught.value.line == line
        assert await run(engine, sandbox, (EXAMPLES / "hello.py").read_text(), {"prompt": "x"}), "the engine lives on"


async def test_messages_and_logs(sandbox: Sandbox) -> None:
    source = (
        f"{HEAD}async def main(input):\n    print('to the log')\n    while (v := await receive()) is not None: send([v])\n    return 'end'"
    )
    async with running(OracleRunner()) as engine:
        logs: list[tuple[str, str]] = []
        process = Process(engine, SERVICES, "program.py", on_log=lambda level, text: logs.append((level, text)))
        task = asyncio.create_task(process.run(sandbox.open(process.port), process.request(source, {})))
        for value in ("a", {"b": 1}, None):
            process.deliver(value)
        assert await task == "end"
        assert [m async for m in process.messages()] == [["a"], [{"b": 1}]]
        assert logs == [("info", "to the log")]


async def test_many_at_once_give_what_one_gives(sandbox: Sandbox) -> None:
    source = (EXAMPLES / "hello.py").read_text()
    async with running(OracleRunner()) as engine:
        prompts = [f"prompt number {k}" for k in range(20)]
        results = await asyncio.gather(*[run(engine, sandbox, source, {"prompt": p}) for p in prompts])
    assert [r["text"] for r in results] == [ToyTokenizer().decode(generate(prompt(p), 8)) for p in prompts]


async def test_cancel_ends_the_guest(sandbox: Sandbox) -> None:
    source = f"{HEAD}{STEP}\nasync def main(input):\n    ws, pipe = WorkingSet(), Pipeline()\n    while True: await step(pipe, ws, [1])"
    async with running(OracleRunner()) as engine:
        process = Process(engine, SERVICES, "program.py")
        guest = sandbox.open(process.port)
        task = asyncio.create_task(process.run(guest, process.request(source, {})))
        await asyncio.sleep(0.1)
        process.cancel("the client left")
        with pytest.raises(InferletFailed, match="the client left"):
            await task
        for _ in range(200):  # a step that ran when it was cancelled frees the guest in its own thread
            if guest._machine is None:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the guest still holds its instance")
