"""Streaming attention: each token sees the last `window` tokens and the first `sinks` ones, so that a step's attention costs the same
however long the text grows. The state keeps all tokens; what a token sees is a matter of the pass."""

from inferlet import chat, model, send
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax
from inferlet.text import Detokenizer


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), window (64; 0 is all), sinks (4). Streams the text, which is greedy."""
    limit, window, sinks = int(input.get("max_tokens", 32)), int(input.get("window", 64)), int(input.get("sinks", 4))
    if limit < 1 or window < 0 or sinks < 0:
        raise ValueError(f"max_tokens is {limit}, window {window} and sinks {sinks}; use 1 or more, and 0 or more")
    geometry = StateGeometry.folding(window=window, sinks=sinks) if window else StateGeometry.folding()
    fresh = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, text, pieces = WorkingSet(), Pipeline(), Detokenizer(), []
    for _ in range(limit):
        fwd = ForwardPass()
        fwd.embed(fresh)
        fwd.state([ws], geometry)
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        fresh = [await out]
        if fresh[0] in model.eos:
            break
        pieces.append(text.feed(model.token_bytes(fresh[0])))
        send(pieces[-1])
    pipe.close()
    return {"text": "".join(pieces), "tokens_kept": await ws.length()}
