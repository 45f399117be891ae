"""Branching: the prompt is computed once, then several continuations grow from forks of its working set, all at the same time."""

import asyncio

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics


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


async def main(input: dict) -> dict:
    """Input: prompt, branches (3), max_tokens (16), seed (0)."""
    prompt = chat.prefix() + model.encode(input.get("prompt", "The best thing about rain is"))
    seed, n = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    ws, pipe = WorkingSet(), Pipeline()

    if len(prompt) > 1:  # the last token is fed to each branch, which samples from it
        fwd = ForwardPass()
        fwd.embed(prompt[:-1])
        fwd.state([ws], StateGeometry.folding())
        pipe.submit(fwd)
    branches = [ws.fork(pipe) for _ in range(int(input.get("branches", 3)))]
    texts = await asyncio.gather(*[branch(b, prompt[-1], seed + k, n) for k, b in enumerate(branches)])
    pipe.close()

    return {"texts": texts}
