"""Beam search: each step runs all beams in one batch, keeps the likeliest continuations of all together, and forks the states of those
that go on. The device tells only the best few tokens of each beam; forks share what they have in common."""

import asyncio

from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, log_softmax, top_k


async def best(pipe: Pipeline, ws: WorkingSet, tokens: list[int], n: int) -> list[tuple[float, int]]:
    """Feed `tokens` to `ws`; the `n` likeliest next tokens with their log-probabilities."""
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state([ws], StateGeometry.folding())
    values, ids = fwd.epilogue(lambda: top_k(log_softmax(intrinsics.output(0, "logits")), n))
    pipe.submit(fwd)
    return list(zip(await values, await ids, strict=True))


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), beams (4). The likeliest text found, with the sum of its log-probabilities."""
    limit, beams = int(input.get("max_tokens", 16)), int(input.get("beams", 4))
    if limit < 1 or not 1 <= beams <= 32:
        raise ValueError(f"max_tokens is {limit} and beams {beams}; use 1 or more, and 1 to 32")
    prompt = chat.prefix() + model.encode(input.get("prompt", "The best thing about rain is"))
    pipe, ended = Pipeline(), []
    alive = [(0.0, [], WorkingSet(), prompt)]  # log-probability, answer, state, tokens that the state does not hold yet
    for _ in range(limit):
        found = await asyncio.gather(*[best(pipe, ws, fresh, beams) for _, _, ws, fresh in alive])
        options = [(score + p, k, token) for k, (score, *_) in enumerate(alive) for p, token in found[k]]
        grown, last = [], {}
        for score, k, token in sorted(options, reverse=True)[:beams]:
            _, answer, ws, _ = alive[k]
            if token in model.eos:
                ended.append((score, answer))
            else:
                last[k] = len(grown)
                grown.append((score, [*answer, token], ws.fork(), [token]))
        for k, at in last.items():  # the last branch takes the state itself over
            score, answer, _, fresh = grown[at]
            grown[at] = (score, answer, alive[k][2], fresh)
        alive = grown
        if not alive or len(ended) >= beams:
            break
    pipe.close()
    score, answer = max([*ended, *((score, answer) for score, answer, *_ in alive)])
    return {"text": model.decode(answer), "logprob": score, "tokens": answer}
