"""DRY ("don't repeat yourself"): the longer the run of tokens that a token would repeat, the lower its logit; all on the device."""

from inferlet import chat, model
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    dry,
    gather,
    gumbel_max,
    intrinsics,
    iota,
    select,
)

LAST = 128  # tokens of prompt and answer that are searched; -1 is no token
BREAKERS = b'\n:"*'  # no run goes over a token with one of these
GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), multiplier (0.8; 0 is off), base (1.75), allowed (2), temperature (0.8; 0 is greedy), seed (0)."""
    multiplier, base = float(input.get("multiplier", 0.8)), float(input.get("base", 1.75))
    if not 0 <= multiplier < float("inf"):
        raise ValueError(f"multiplier is {multiplier}; use a number >= 0; 0 changes nothing")
    if not 1 <= base <= 10:
        raise ValueError(f"base is {base}; use a number from 1 to 10")
    allowed = int(input.get("allowed", 2))
    if not 1 <= allowed <= 32:
        raise ValueError(f"allowed is {allowed}; use 1 to 32: runs of so many tokens are penalised, longer ones more")
    temperature = float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    breakers = [any(b in BREAKERS for b in text) for text in model.token_bytes(list(range(model.vocab)))]
    ws, pipe, rng, ends = WorkingSet(), Pipeline(), Channel.counter(seed), Channel.of(breakers)
    history = Channel.of(([-1] * LAST + tokens)[-LAST:])

    def epilogue():
        seen, place = history.take(), iota(LAST)
        x = dry(intrinsics.output(0, "logits"), seen, multiplier, base, allowed, ends.read())
        token = gumbel_max(x / max(temperature, GREEDY), rng.take())
        history.put(select(place == LAST - 1, token, gather(seen, place + 1)))  # all move up, the oldest goes
        return token

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
