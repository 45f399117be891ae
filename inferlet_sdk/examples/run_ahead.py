"""Sampling with run-ahead: each token goes to the next pass on the device and the program only listens, a few passes behind; a stop
channel ends the loop at the end of the answer, and what was submitted behind that is cancelled whole."""

from collections import deque

from inferlet import chat, model, send
from inferlet.errors import PassSkipped
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics
from inferlet.text import Detokenizer

AHEAD = 8  # passes submitted and not answered: more than a device keeps enqueued
GREEDY = 1e-30  # the temperature that stands for 0: it leaves nothing to chance, and a division by 0 leaves no numbers


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), temperature (0.7; 0 is greedy), seed (0). Streams the text as it grows."""
    temperature, max_tokens = float(input.get("temperature", 0.7)), int(input.get("max_tokens", 32))
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; use a number >= 0")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; use 1 or more")
    prompt = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    rng, feed, stop = Channel.counter(int(input.get("seed", 0))), Channel("i32"), Channel("bool")
    ws, pipe, text = WorkingSet(), Pipeline(), Detokenizer()
    pipe.stop_when(stop)

    def epilogue():
        token = gumbel_max(intrinsics.output(0, "logits") / max(temperature, GREEDY), rng.take())
        feed.put(token)  # which the next pass takes
        ends = token == model.eos[0]
        for eos in model.eos[1:]:
            ends = ends | (token == eos)
        stop.put(ends)
        return token

    def submit(tokens):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        outs.append(fwd.epilogue(epilogue))
        pipe.submit(fwd)

    outs, pieces = deque(), []
    submit(prompt)
    submitted = 1
    while outs:
        while submitted < max_tokens and len(outs) < AHEAD:
            submit(feed)
            submitted += 1
        try:
            token = await outs.popleft()
        except PassSkipped:  # so are all behind it
            break
        if token not in model.eos:
            pieces.append(text.feed(model.token_bytes(token)))
            send(pieces[-1])
    pipe.close()

    return {"text": "".join(pieces)}
