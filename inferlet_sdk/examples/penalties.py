"""Repetition, presence and frequency penalties over the last tokens of the answer, a ring of ids that stays on the device."""

from inferlet import chat, model
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    frequency_penalty,
    gather,
    gumbel_max,
    intrinsics,
    iota,
    presence_penalty,
    repetition_penalty,
    select,
    token_counts,
)

LAST = 64  # tokens that the penalties look back on; -1 is no token
GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), repetition (1.1), presence (0.3), frequency (0.3), temperature (0.8; 0 is greedy), seed (0)."""
    repetition = float(input.get("repetition", 1.1))
    presence = float(input.get("presence", 0.3))
    frequency = float(input.get("frequency", 0.3))
    if not 0 < repetition < float("inf"):
        raise ValueError(f"repetition is {repetition}; use a number above 0; 1 changes nothing")
    if not all(abs(penalty) < float("inf") for penalty in (presence, frequency)):
        raise ValueError(f"presence is {presence} and frequency {frequency}; use finite numbers; 0 changes nothing")
    temperature = float(input.get("temperature", 0.8))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng, history = WorkingSet(), Pipeline(), Channel.counter(seed), Channel.of([-1] * LAST)

    def epilogue():
        x, seen, place = intrinsics.output(0, "logits"), history.take(), iota(LAST)
        counts = token_counts(seen, model.vocab)
        x = presence_penalty(frequency_penalty(repetition_penalty(x, counts, repetition), counts, frequency), counts, presence)
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
