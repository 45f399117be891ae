"""Self-consistency: several reasonings about one question are sampled from forks of its state, side by side, and the last number of
each is its vote. The question is computed once, however many vote."""

import asyncio
import re
from collections import Counter

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics

GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers
QUESTION = "Tom has 3 apples and buys 2 more. How many apples does he have now?"


def vote(text: str) -> str | None:
    """The last number of `text`."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else None


async def main(input: dict) -> dict:
    """Input: question, votes (5), max_tokens (64), temperature (0.6; 0 is greedy), seed (0)."""
    votes, limit, temperature = int(input.get("votes", 5)), int(input.get("max_tokens", 64)), float(input.get("temperature", 0.6))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    if not 1 <= votes <= 32 or limit < 1:
        raise ValueError(f"votes is {votes} and max_tokens {limit}; use 1 to 32, and 1 or more")
    prompt = chat.render([{"role": "user", "content": str(input.get("question", QUESTION))}])
    asked, pipe, seed = WorkingSet(), Pipeline(), int(input.get("seed", 0))
    fwd = ForwardPass()
    fwd.embed(prompt[:-1])
    fwd.state([asked], StateGeometry.folding())
    pipe.submit(fwd)

    async def answer(k: int) -> str:
        ws, rng, fresh, tokens = asked.fork(), Channel.counter(seed + k), prompt[-1:], []
        with Pipeline() as pipe:  # of its own: the answers wait for nothing but their own passes
            while len(tokens) < limit:
                fwd = ForwardPass()
                fwd.embed(fresh)
                fwd.state([ws], StateGeometry.folding())
                out = fwd.epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / max(temperature, GREEDY), rng.take()))
                pipe.submit(fwd)
                fresh = [await out]
                if fresh[0] in model.eos:
                    break
                tokens += fresh
        return model.decode(tokens)

    texts = await asyncio.gather(*[answer(k) for k in range(votes)])
    counts = Counter(found for found in map(vote, texts) if found is not None)
    return {"answer": counts.most_common(1)[0][0] if counts else None, "votes": dict(counts.most_common()), "texts": texts}
