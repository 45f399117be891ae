"""Temperature sampling on the device: each pass draws one token with Gumbel noise; the same seed gives the same text."""

from inferlet import chat, model, send
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics
from inferlet.text import Detokenizer


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), temperature (0.7), seed (0). Streams the text as it grows."""
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    temperature = float(input.get("temperature", 0.7))
    rng = Channel.counter(int(input.get("seed", 0)))
    ws, pipe, text = WorkingSet(), Pipeline(), Detokenizer()

    pieces = []
    for _ in range(int(input.get("max_tokens", 32))):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / temperature, rng.take()))
        pipe.submit(fwd)
        token = await out
        if token in model.eos:
            break
        tokens = [token]
        pieces.append(text.feed(model.token_bytes(token)))
        send(pieces[-1])
    pipe.close()

    return {"text": "".join(pieces)}
