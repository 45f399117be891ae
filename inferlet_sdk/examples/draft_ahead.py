"""Speculative decoding without a word from the program: the device guesses by a table of what followed each token last, verifies, commits
what holds, learns, and feeds the next pass. The tokens are those of greedy decoding, in fewer passes and without host round trips."""

from collections import deque

from inferlet import chat, eta, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gather, intrinsics, iota, select

AHEAD = 6  # passes submitted and not answered


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), width (4: a known token and three guesses)."""
    limit, width = int(input.get("max_tokens", 32)), int(input.get("width", 4))
    if limit < 1 or not 2 <= width <= 16:
        raise ValueError(f"max_tokens is {limit} and width {width}; use 1 or more, and 2 to 16")
    prompt = chat.prefix() + model.encode(input.get("prompt", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1,"))
    followers = {prompt[k - 1]: prompt[k] for k in range(1, len(prompt))}
    table = Channel.of([followers.get(token, -1) for token in range(model.vocab)])
    feed, guesses = (Channel.of([prompt[-1]] * width) for _ in range(2))  # the same tokens, for the pass and for its epilogue
    counts = Channel("i32", (), AHEAD, host="reader")
    ws, pipe, outs, made, passes = WorkingSet(), Pipeline(), deque(), [], 0

    def epilogue():
        chosen, row, place = eta.reduce_argmax(intrinsics.outputs("logits")), guesses.take(), iota(width).cast("i32")
        right = (gather(row, place + 1) == chosen) & (place < width - 1)
        count = 1 + eta.reduce_sum(eta.cumprod(right.cast("i32")))  # the known token, and the guesses that the model agrees with
        known = eta.scatter_set(table.take(), select(place < count, row, -1), chosen)  # a place of -1 is skipped
        token = gather(chosen, count - 1)
        row = select(place == 0, token, 0)
        for k in range(1, width):  # a token without a known follower is guessed to come again
            follower = gather(known, token)
            token = select(follower < 0, token, follower)
            row = select(place == k, token, row)
        for channel, value in ((counts, count), (table, known), (feed, row), (guesses, row)):
            channel.put(value)
        return chosen, count

    def submit(tokens, geometry):
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], geometry)
        if tokens is feed:
            fwd.read(range(width))
            outs.append(fwd.epilogue(epilogue))
        pipe.submit(fwd)

    if prompt[:-1]:
        submit(prompt[:-1], StateGeometry.folding())
    while len(made) < limit and not set(made) & set(model.eos):
        while len(outs) < AHEAD:
            submit(feed, StateGeometry.buffered())
            ws.commit(counts)
            ws.discard()
        chosen, count = await outs.popleft()
        made, passes = made + chosen[:count], passes + 1
    pipe.close()
    made = made[: next((k for k, token in enumerate(made) if token in model.eos or k == limit), len(made))]
    return {"text": model.decode(made), "tokens": made, "passes": passes}
