"""Exclude top choices: now and then strike all likely tokens but the least likely of them, for less expected text."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics, masked, xtc

GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), threshold (0.1), probability (0.5), temperature (0.8; 0 is greedy), seed (0)."""
    threshold = float(input.get("threshold", 0.1))
    probability = float(input.get("probability", 0.5))
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold is {threshold}; use a number >= 0; above 0.5 nothing is struck")
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}; use a number from 0 to 1")
    temperature = float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng, coin = WorkingSet(), Pipeline(), Channel.counter(seed), Channel.counter(seed + 1)

    def epilogue():
        x = intrinsics.output(0, "logits") / max(temperature, GREEDY)
        return gumbel_max(masked(x, xtc(x, threshold, probability, coin.take())), rng.take())

    answer: list[int] = []
    while len(answer) < max_tokens:
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(epilogue)
        pipe.submit(fwd)
        tokens = [await out]
        if tokens[0] in model.eos:
            break
        answer += tokens
    pipe.close()

    return {"text": model.decode(answer)}
