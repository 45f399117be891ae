"""Epilogues are traced once where that is provably the same, and anew everywhere else."""

from __future__ import annotations

import pytest

from pie_server.api.openai import builtin_source
from pie_server.sandbox import Sandbox
from tests.sdk.conftest import Local
from tests.sdk.scripted_host import Guest, ScriptedHost, result_of

# body of a loop over `k` in range(6) that defines `fn`; is the trace reused (None: never, where nothing proves it the same);
# the first parameter of each pass when it matters
X = "intrinsics.output(0, 'logits')"
LOOPS: list[tuple[str, bool | None, list[float] | None]] = [
    (f"fn = lambda: reduce_argmax({X})", True, None),
    (f"fn = lambda: reduce_argmax({X} / 0.5)", True, [0.5] * 6),
    (f"t = 0.5\nfn = lambda: reduce_argmax({X} / t)", True, [0.5] * 6),
    (f"fn = lambda: gumbel_max({X} / 0.5, rng.take())", True, [0.5] * 6),
    (f"t = [1.0, 2.0][k % 2]\nfn = lambda: reduce_argmax({X} / t)", False, [1.0, 2.0] * 3),
    (f"t = [1, 1.0, True][k % 3]\nfn = lambda: reduce_argmax(select({X} > 0.0, {X}, t if t is not True else 3.0))", False, None),
    (f"t = [0.0, -0.0][k % 2]\nfn = lambda: reduce_argmax({X} + t)", False, [0.0, -0.0] * 3),
    (f"fn = lambda t=float(k): reduce_argmax({X} + t)", False, [float(k) for k in range(6)]),
    (f"G.append(k)\nfn = lambda: reduce_argmax({X} + float(len(G)))", False, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    (f"it = iter([1.0])\nfn = lambda: reduce_argmax({X} + next(it))", None, [1.0] * 6),
    (f"fn = lambda: reduce_argmax({X} + random.choice([2.0]))", None, [2.0] * 6),
    (f"fn = lambda: reduce_argmax({X} / math.sqrt(4.0) + pick((1.0, 2.0), 0))", True, [2.0] * 6),
    (f"fn = lambda: reduce_argmax(({X} + {X}) / scaled(model.vocab))", True, None),
    (f"model.vocab = 256\nfn = lambda: reduce_argmax({X} / float(model.vocab - model.hidden))", True, [248.0] * 6),
    (f"config.t = float(k)\nfn = lambda: reduce_argmax({X} + config.t)", False, [float(k) for k in range(6)]),
    (f"pick.__defaults__ = (float(k),)\nfn = lambda: reduce_argmax({X} + pick((0.5,), 0))", False, [0.5 + k for k in range(6)]),
    (f"globals()['twist'] = [lambda: 1.0, lambda: 2.0][k % 2]\nfn = lambda: reduce_argmax({X} + twist())", False, [1.0, 2.0] * 3),
    (f"t = (1.0, [float(k)])\nfn = lambda: reduce_argmax({X} + t[1][0])", None, [float(k) for k in range(6)]),
    (f"t = (1.0, (float(k),))\nfn = lambda: reduce_argmax({X} + t[1][0])", False, [float(k) for k in range(6)]),
    (f"fn = lambda: reduce_argmax({X} + float(intrinsics.output.__defaults__[0]))", None, [0.0] * 6),
    (f"fn = lambda: reduce_argmax({X} + helper())", None, [float(k) for k in range(1, 7)]),
    (f"fn = lambda: reduce_argmax({X} + (lambda: 3.0)())", None, [3.0] * 6),
    (f"box = Box()\nbox.t = float(k)\nfn = lambda: reduce_argmax({X} + box.t)", None, [float(k) for k in range(6)]),
    (f"globals()['TEMP'] = float(k)\nfn = lambda: reduce_argmax({X} + TEMP)", False, [float(k) for k in range(6)]),
    (f"fn = functools.partial(lambda t: reduce_argmax({X} + t), float(k))", False, [float(k) for k in range(6)]),
    (f"fn = lambda: reduce_argmax({X} + [1.0, 2.0][0])", True, [1.0] * 6),
    (f"ch = Channel.of(1.0)\nfn = lambda: reduce_argmax({X} + ch.read())", False, None),
]
PROGRAM = """
import functools, math, random, struct, types
from inferlet import _programs, model
from inferlet.eta import *
import inferlet._programs as programs
G = []
TEMP = 0.0
calls = 0
class Box: pass
config = types.ModuleType('config')
def pick(values, index, more=0.0):
    return values[index] + more
def scaled(x):
    return 2.0 * x if x > 3 else 1.0
def helper():
    global calls
    calls += 1
    return float(calls)
traces = 0
real = programs.trace_epilogue
def counting(fn, model, rows):
    global traces
    traces += 1
    return real(fn, model, rows)
programs.trace_epilogue = counting

async def main(input):
    rng = Channel.counter(1)
    params, channels = [], []
    for k in range(6):
        BODY
        lowered = _programs.lower(fn)
        params.append([struct.unpack('<f', struct.pack('<I', w))[0] for w in lowered.params])
        channels.append(len(lowered.channels))
    programs.trace_epilogue = real
    return {'traces': traces, 'params': params, 'channels': channels}
"""


async def check_loop(guest: Guest, host: ScriptedHost, body: str, reused: bool | None, params: list[float] | None) -> None:
    result = await result_of(guest, host, PROGRAM.replace("BODY", body.replace("\n", "\n        ")))
    if reused:
        assert result["traces"] < 6
    elif reused is None or (params is not None and len(set(map(str, params))) == 6):
        assert result["traces"] == 6
    if params is not None:
        assert [str(p[0]) for p in result["params"]] == [str(p) for p in params]
    assert len(set(result["channels"])) == 1


@pytest.mark.parametrize(("body", "reused", "params"), LOOPS, ids=[b for b, _, _ in LOOPS])
async def test_loops(guest: Local, host: ScriptedHost, body: str, reused: bool | None, params: list[float] | None) -> None:
    await check_loop(guest, host, body, reused, params)


async def test_loops_in_the_component() -> None:
    """Its Python is another version, whose bytecode the memo must know as well."""
    sandbox = Sandbox(spares=1)
    try:
        for loop in LOOPS:
            host = ScriptedHost()
            guest = sandbox.open(host)
            await check_loop(guest, host, *loop)
            guest.close()
    finally:
        sandbox.close()


async def test_the_chat_apis_epilogue_is_traced_once(guest: Local, host: ScriptedHost) -> None:
    """With everything that a request can ask for."""
    source = (
        builtin_source("openai_chat.py")
        + """
from inferlet import _programs
traced, real = [], _programs.trace_epilogue
async def main(input):
    _programs.trace_epilogue = lambda *args: traced.append(1) or real(*args)
    for n in (0, 20):
        request = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
                   "logit_bias": [[1, 2.0]], "logprobs": True, "top_logprobs": n}
        sampler = Sampler(request, 1, 100)
        for _ in range(10):
            lowered = _programs.lower(sampler.epilogue, 1)
    _programs.trace_epilogue = real
    return [len(traced), lowered.outs, len(lowered.channels)]
"""
    )
    assert await result_of(guest, host, source) == [3, 4, 4], "at its first two passes, and once more for other outputs"


async def test_new_channels_are_never_taken_for_old_ones(guest: Local, host: ScriptedHost) -> None:
    source = """
from inferlet import _programs
from inferlet.eta import *
async def main(input):
    seen = []
    for k in range(200):
        ch = Channel.counter(k)
        lowered = _programs.lower(lambda: gumbel_max(intrinsics.output(0, 'logits'), ch.take()))
        assert lowered.channels == (ch,)
        seen.append(lowered.channels[0]._seed[0])
        del ch, lowered
    return seen
"""
    assert await result_of(guest, host, source) == list(range(200))
    assert len(host.payloads("program")) == 1


async def test_endless_different_epilogues_do_not_pile_up(guest: Local, host: ScriptedHost) -> None:
    source = """
from inferlet import _memo, _programs
from inferlet.eta import *
async def main(input):
    for k in range(500):
        t = 1.0 + k
        _programs.lower(lambda: reduce_argmax(intrinsics.output(0, 'logits') / t))
    return [len(_memo._results), len(_memo._plans)]
"""
    entries, plans = await result_of(guest, host, source)
    assert entries <= 64
    assert plans <= 64
