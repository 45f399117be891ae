"""Speculative decoding by prompt lookup: what followed the last tokens before is drafted, one pass verifies the drafts, and the device
counts how many the model agrees with and commits them. The tokens are those of plain greedy decoding, in fewer passes."""

from inferlet import chat, eta, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics


def look_up(tokens: list[int], ngram: int, most: int) -> list[int]:
    """What followed the latest earlier occurrence of the last `ngram` tokens, or of fewer."""
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix:
                text = list(tokens)
                for k in range(most):  # what repeats itself is read on into the drafts
                    text.append(text[end + k])
                return text[len(tokens) :]
    return []


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), drafts (8; 0 is plain greedy decoding), ngram (3)."""
    limit, most, ngram = int(input.get("max_tokens", 32)), int(input.get("drafts", 8)), int(input.get("ngram", 3))
    if limit < 1 or not 0 <= most <= 32:
        raise ValueError(f"max_tokens is {limit} and drafts {most}; use 1 or more, and 0 to 32")
    tokens = chat.prefix() + model.encode(input.get("prompt", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1,"))
    start, ws, pipe, passes = len(tokens), WorkingSet(), Pipeline(), 0
    drafted, accepted = Channel("i32", (most + 1,)), Channel("i32", host="reader")
    fresh, drafts = tokens, []  # the tokens that no pass has seen yet, and the guesses of what follows them

    def epilogue():
        chosen = eta.reduce_argmax(intrinsics.outputs("logits"))  # behind the last known token, and behind each draft
        agreed = eta.gather(drafted.take(), eta.iota(chosen.shape[0])) == chosen  # -1, behind the drafts, is never chosen
        accepted.put(known + eta.reduce_sum(eta.cumprod(agreed.cast("i32"))))
        return chosen

    while len(tokens) - start < limit:
        known = len(fresh)
        drafted.put(drafts + [-1] * (most + 1 - len(drafts)))
        fwd = ForwardPass()
        fwd.embed(fresh + drafts)
        fwd.state([ws], StateGeometry.buffered())
        fwd.read(range(known - 1, known + len(drafts)))
        out = fwd.epilogue(epilogue)
        pipe.submit(fwd)
        ws.commit(accepted)  # the count never goes through this program
        ws.discard()
        passes += 1
        chosen = await out
        right = next((k for k, draft in enumerate(drafts) if draft != chosen[k]), len(drafts))
        new = chosen[: right + 1]
        stop = next((k for k, token in enumerate(new) if token in model.eos), None)
        tokens += new[:stop]
        if stop is not None:
            break
        fresh, drafts = new[-1:], look_up(tokens, ngram, most)
    pipe.close()
    made = tokens[start:][:limit]
    return {"text": model.decode(made), "tokens": made, "passes": passes}
