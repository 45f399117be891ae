"""Constrained decoding: the answer is one of a list of choices; before each token the program says which tokens may come."""

from itertools import pairwise

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, mask_apply, reduce_argmax


def packed(ids: set[int]) -> list[int]:
    """One bit a token, in u32 words."""
    words = [0] * -(-model.vocab // 32)
    for i in ids:
        words[i // 32] |= 1 << i % 32
    return words


async def main(input: dict) -> dict:
    """Input: question, choices (texts of which none begins another). Of the tokens that go on with a choice the likeliest wins."""
    given = input.get("choices", ["yes", "no"])
    choices = [str(choice) for choice in given] if isinstance(given, list) else []
    question = input.get("question", "Is the sky blue? Answer yes or no.")
    left = {choice: model.encode(choice) for choice in choices}
    if not left or any(not ids for ids in left.values()):
        raise ValueError("choices must be a list of texts, none of them empty")
    for first, then in pairwise(sorted(left)):
        if then.startswith(first):
            raise ValueError(f"of the choices {first!r} begins {then!r}; use texts of which none begins another")
    tokens = chat.render([{"role": "user", "content": question}])
    ws, pipe, allowed = WorkingSet(), Pipeline(), Channel("u32", (-(-model.vocab // 32),))
    while len(left) > 1:
        allowed.put(packed({ids[0] for ids in left.values()}))
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(mask_apply(intrinsics.output(0, "logits"), allowed.take())))
        pipe.submit(fwd)
        tokens = [await out]
        left = {choice: ids[1:] for choice, ids in left.items() if ids[0] == tokens[0]}
    pipe.close()
    return {"answer": next(iter(left))}
