"""Inferlets that the end-to-end tests run."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "inferlet_sdk" / "examples"
HELLO = (EXAMPLES / "hello.py").read_text()
FORK = (EXAMPLES / "fork.py").read_text()

HEAD = """
import asyncio
from inferlet import chat, model, send, receive, log, sleep
from inferlet.eta import *

GREEDY = lambda: reduce_argmax(intrinsics.output(0, "logits"))
"""

GENERATE = (
    HEAD
    + """
async def main(input):
    tokens = list(input["prompt"]) if isinstance(input["prompt"], list) else chat.prefix() + model.encode(input["prompt"])
    ws, pipe, made = WorkingSet(), Pipeline(), []
    feed = tokens
    for _ in range(input["n"]):
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(GREEDY)
        pipe.submit(fwd)
        feed = [await out]
        made += feed
        if input.get("send"):
            send(feed[0])
    pipe.close()
    return {"tokens": made, "text": model.decode(made)}
"""
)

FORKS = (
    HEAD
    + """
async def grow(ws, pipe, first, n):
    made, feed = [], [first]
    for _ in range(n):
        fwd = ForwardPass()
        fwd.embed(feed)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(GREEDY)
        pipe.submit(fwd)
        feed = [await out]
        made += feed
    return made

async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = ForwardPass()
    fwd.embed(input["prompt"])
    fwd.state([ws], StateGeometry.folding())
    pipe.submit(fwd)
    forks = [ws.fork(pipe) for _ in input["firsts"]]
    grown = await asyncio.gather(*[grow(f, Pipeline(), t, input["n"]) for f, t in zip(forks, input["firsts"])])
    alone = []
    for first in input["firsts"]:
        fresh, own = WorkingSet(), Pipeline()
        fwd = ForwardPass()
        fwd.embed(input["prompt"])
        fwd.state([fresh], StateGeometry.folding())
        own.submit(fwd)
        alone.append(await grow(fresh, own, first, input["n"]))
    return {"forked": grown, "alone": alone}
"""
)

# The next token goes from a cell to the embedding on the device; outputs of the passes show it to the program
DEVICE_FED = (
    HEAD
    + """
async def main(input):
    ws, pipe, token = WorkingSet(), Pipeline(), Channel("i32", (1,), 1)

    def step():
        best = reduce_argmax(intrinsics.output(0, "logits"))
        token.put(best)
        return best

    outs = []
    for k in range(input["n"]):
        fwd = ForwardPass()
        fwd.embed(token if k else input["prompt"])
        fwd.state([ws], StateGeometry.folding())
        outs.append(fwd.epilogue(step))
        pipe.submit(fwd)
    return {"tokens": [await out for out in outs]}
"""
)

REUSE = (
    HEAD
    + """
from inferlet.errors import ContextLengthExceeded, InvalidPass

async def ask(ids, reuse):
    ws, pipe, fwd = WorkingSet(reuse=reuse), Pipeline(), ForwardPass()
    fwd.embed(ids)
    fwd.state([ws])
    out = fwd.epilogue(GREEDY)
    pipe.submit(fwd)
    return [await out, await ws.cached()]

async def refused(ids):
    try:
        await model.prewarm(ids)
    except (ContextLengthExceeded, InvalidPass) as error:
        return str(error)

async def main(input):
    ids = input["prompt"]
    ahead = [await model.prewarm(ids), await model.prewarm(ids[:15])]
    return [ahead, await ask(ids, True), await ask(ids, False), await refused([model.vocab]), await refused([1] * (model.context + 1))]
"""
)

ENDLESS = "async def main(input):\n    while True:\n        pass\n"
RAISES = "from inferlet import send\n\nasync def main(input):\n    send('before')\n    raise ValueError('what went wrong')\n"

# Calls that are refused, each caught at its own line; the last one only the engine can refuse in a page, behind the call.
REFUSED = (
    HEAD
    + """
from inferlet.errors import ChannelFull, InferletError

async def main(input):
    told, cleaned = [], []

    def attempt(call, *arguments, **named):
        try:
            call(*arguments, **named)
            told.append("taken")
        except InferletError as error:
            told.append([type(error).__name__, str(error)])
        finally:
            cleaned.append(1)

    def make(tokens, ws, geometry=StateGeometry.folding(), read=None):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], geometry)
        if read is not None:
            fwd.read(read)
        return fwd, fwd.epilogue(GREEDY)

    ws, pipe, ids = WorkingSet(), Pipeline(), list(range(20, 100))
    attempt(ws.commit, 1)
    attempt(ws.discard, 9)
    attempt(pipe.submit, make(ids[:3], ws, StateGeometry.folding(tree=[-1, -1, -1]))[0])
    attempt(pipe.submit, make(ids, ws, read=range(70))[0])
    fwd, out = make(ids[:3], ws)
    pipe.submit(fwd)
    await out
    attempt(ws.truncate, 99)
    fork = ws.fork()
    await fork.length()                               # it has happened
    attempt(fork.truncate, 0)
    fwd, out = make(ids[:3], ws, StateGeometry.buffered(tree=[-1, -1, 0]))
    pipe.submit(fwd)
    await out
    attempt(ws.commit, [0, 1])
    attempt(ws.commit, [0, 2])
    await ws.length()
    attempt(ws.truncate, 4)
    await ws.save("kept")
    opened = await WorkingSet.open("kept")
    fwd, out = make(ids[:3], opened)
    pipe.submit(fwd)
    await out
    attempt(opened.truncate, 0)
    ring = Channel("i32")
    ring.put(40)
    attempt(ring.put, 41)
    stop = Channel("bool")
    fwd = ForwardPass()
    fwd.embed(ids[:1])
    fwd.state([ws])
    fwd.epilogue(lambda: stop.put(reduce_argmax(intrinsics.output(0, "logits")) == 0))
    pipe.submit(fwd)
    attempt(pipe.stop_when, stop)
    pipe.submit(make(ids * 4, ws)[0])                 # a long pass in front of the one that takes the cell
    try:
        fwd = ForwardPass()
        fwd.embed(ring)
        fwd.state([ws])
        pipe.submit(fwd)
        ring.put(41)
        await ws.length()
        told.append("taken")
    except ChannelFull as error:
        told.append(["ChannelFull", str(error)])
    for value in range(9000):
        if not input.get("quiet"):
            send(value)
    return [told, len(cleaned)]
"""
)
