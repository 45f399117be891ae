"""Dynamic temperature: hot where the model is unsure, cold where it is sure, between two bounds."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, dynamic_temperature, gumbel_max, intrinsics


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), low (0.2), high (1.4), seed (0)."""
    low = float(input.get("low", 0.2))
    high = float(input.get("high", 1.4))
    if not 0 <= low <= high < float("inf"):
        raise ValueError(f"low is {low} and high {high}; use numbers >= 0, the low one first")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng = WorkingSet(), Pipeline(), Channel.counter(seed)

    def epilogue():
        return gumbel_max(dynamic_temperature(intrinsics.output(0, "logits"), low, high), rng.take())

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
