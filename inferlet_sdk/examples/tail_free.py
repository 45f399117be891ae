"""Tail-free sampling: cut the sorted probabilities where their curve flattens."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics, masked, tail_free

GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), z (0.95), temperature (0.8; 0 is greedy), seed (0)."""
    z = float(input.get("z", 0.95))
    if not 0 <= z < float("inf"):
        raise ValueError(f"z is {z}; use a number >= 0, such as 0.95; from 1 on all tokens stay")
    temperature = float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng = WorkingSet(), Pipeline(), Channel.counter(seed)

    def epilogue():
        x = intrinsics.output(0, "logits") / max(temperature, GREEDY)
        return gumbel_max(masked(x, tail_free(x, z)), rng.take())

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
