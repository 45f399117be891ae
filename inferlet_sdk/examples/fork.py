"""Branching: the prompt is computed once, then several continuations grow from forks of its working set, all at the same time."""

import asyncio

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics

AT_ONCE = 32  # branches that run together; an inferlet may have 64 passes outstanding


async def step(pipe: Pipeline, ws: WorkingSet, tokens: list[int], rng: Channel) -> int:
    """Feed `tokens` to `ws` and sample the next one."""
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state([ws], StateGeometry.folding())
    out = fwd.epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / 0.8, rng.take()))
    pipe.submit(fwd)
    return await out


async def branch(ws: WorkingSet, last: int, seed: int, n: int) -> str:
    """Continue the forked sequence from its last token by up to `n` tokens."""
    pipe, rng, tokens = Pipeline(), Channel.counter(seed), []
    token = last
    for _ in range(n):
        token = await step(pipe, ws, [token], rng)
        if token in model.eos:
            break
        tokens.append(token)
    pipe.close()
    return model.decode(tokens)


def count(input: dict, name: str, default: int, most: int) -> int:
    """A whole number of the input, checked."""
    n = int(input.get(name, default))
    if not 1 <= n <= most:
        raise ValueError(f"{name} is {n}; use 1 to {most}")
    return n


async def main(input: dict) -> dict:
    """Input: prompt, branches (3), max_tokens (16), seed (0)."""
    branches, n = count(input, "branches", 3, 1000), count(input, "max_tokens", 16, model.context)
    prompt = chat.prefix() + model.encode(input.get("prompt", "The best thing about rain is"))
    seed = int(input.get("seed", 0))
    ws, pipe = WorkingSet(), Pipeline()

    if len(prompt) > 1:  # the last token is fed to each branch, which samples from it
        fwd = ForwardPass()
        fwd.embed(prompt[:-1])
        fwd.state([ws], StateGeometry.folding())
        pipe.submit(fwd)
    running = asyncio.Semaphore(AT_ONCE)

    async def grow(k: int) -> str:
        async with running:  # forked only now, and dropped at its end: a branch holds pages while it runs
            return await branch(ws.fork(pipe), prompt[-1], seed + k, n)

    texts = await asyncio.gather(*[grow(k) for k in range(branches)])
    pipe.close()

    return {"texts": texts}
