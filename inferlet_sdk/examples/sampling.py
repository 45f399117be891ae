"""Temperature sampling on the device: each pass draws one token with Gumbel noise; the same seed gives the same text."""

from inferlet import chat, model, send
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics, reduce_argmax
from inferlet.text import Detokenizer

GREEDY_BELOW = 1e-5  # logits divided by less than this leave nothing to chance, and by 0 they are no numbers any more


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), temperature (0.7; 0 takes the likeliest token), seed (0). Streams the text as it grows."""
    temperature, max_tokens = float(input.get("temperature", 0.7)), int(input.get("max_tokens", 32))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; use 1 or more")
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    rng = Channel.counter(int(input.get("seed", 0)))
    ws, pipe, text = WorkingSet(), Pipeline(), Detokenizer()

    def likeliest():
        return reduce_argmax(intrinsics.output(0, "logits"))

    def drawn():
        return gumbel_max(intrinsics.output(0, "logits") / temperature, rng.take())

    pieces = []
    for _ in range(max_tokens):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(drawn if temperature >= GREEDY_BELOW else likeliest)
        pipe.submit(fwd)
        token = await out
        if token in model.eos:
            break
        tokens = [token]
        pieces.append(text.feed(model.token_bytes(token)))
        send(pieces[-1])
    pipe.close()

    return {"text": "".join(pieces)}
