"""Eta sampling (arXiv:2210.15191): cut off tokens below a probability that falls with the entropy."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, eta_cutoff, gumbel_max, intrinsics, masked

GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), epsilon (0.002), temperature (0.8; 0 is greedy), seed (0)."""
    epsilon = float(input.get("epsilon", 0.002))
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}; use a probability, 0 to 1")
    temperature = float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng = WorkingSet(), Pipeline(), Channel.counter(seed)

    def epilogue():
        x = intrinsics.output(0, "logits") / max(temperature, GREEDY)
        return gumbel_max(masked(x, eta_cutoff(x, epsilon)), rng.take())

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
