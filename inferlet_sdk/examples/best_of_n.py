"""Best of n: forks of one prompt are sampled side by side, and the answer with the highest mean log-probability wins. The device tells
each token's log-probability beside the token, so that scoring costs no pass of its own."""

import asyncio

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gather, gumbel_max, intrinsics, log_softmax

GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def sample(ws: WorkingSet, last: int, seed: int, temperature: float, limit: int) -> tuple[float, list[int]]:
    """(mean log-probability, tokens) of one answer that begins behind the token `last`."""
    rng, tokens, total, token = Channel.counter(seed), [], 0.0, last

    def epilogue():
        logits = intrinsics.output(0, "logits")
        token = gumbel_max(logits / max(temperature, GREEDY), rng.take())
        return token, gather(log_softmax(logits), token)

    with Pipeline() as pipe:
        while len(tokens) < limit:
            fwd = ForwardPass()
            fwd.embed([token])
            fwd.state([ws], StateGeometry.folding())
            out = fwd.epilogue(epilogue)
            pipe.submit(fwd)
            token, logprob = await out
            total += logprob
            tokens.append(token)
            if token in model.eos:
                break
    return total / len(tokens), tokens


async def main(input: dict) -> dict:
    """Input: prompt, n (4), max_tokens (24), temperature (0.8; 0 is greedy), seed (0)."""
    n, limit, temperature = int(input.get("n", 4)), int(input.get("max_tokens", 24)), float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    if not 1 <= n <= 32 or limit < 1:
        raise ValueError(f"n is {n} and max_tokens {limit}; use 1 to 32, and 1 or more")
    prompt = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, seed = WorkingSet(), Pipeline(), int(input.get("seed", 0))
    if len(prompt) > 1:
        fwd = ForwardPass()
        fwd.embed(prompt[:-1])
        fwd.state([ws], StateGeometry.folding())
        pipe.submit(fwd)
    answers = await asyncio.gather(*[sample(ws.fork(), prompt[-1], seed + k, temperature, limit) for k in range(n)])
    texts = [model.decode([t for t in tokens if t not in model.eos]) for _, tokens in answers]
    best = max(range(n), key=lambda k: answers[k][0])
    return {"text": texts[best], "best": best, "scores": [score for score, _ in answers], "texts": texts}
