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
