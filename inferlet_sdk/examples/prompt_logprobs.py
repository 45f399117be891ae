"""Log-probabilities of a text under the model: several read-outs of one pass, and only one number a token comes back."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gather_row, intrinsics, log_softmax

AT_ONCE = 32  # read-outs of one pass


async def main(input: dict) -> dict:
    """Input: text. Gives each token but the first with its log-probability, and the perplexity of all."""
    ids = chat.prefix() + model.encode(input.get("text", "The quick brown fox jumps over the lazy dog."))
    if len(ids) < 2:
        raise ValueError("text is one token or none; nothing comes before it that could tell its probability")
    ws, pipe, outs = WorkingSet(), Pipeline(), []
    for at in range(0, len(ids) - 1, AT_ONCE):
        part, following = ids[:-1][at : at + AT_ONCE], Channel.of(ids[at + 1 : at + 1 + AT_ONCE])
        fwd = ForwardPass()
        fwd.embed(part)
        fwd.state([ws], StateGeometry.folding())
        fwd.read(range(len(part)))
        outs.append(fwd.epilogue(lambda ch=following: gather_row(log_softmax(intrinsics.outputs("logits")), ch.read())))
        pipe.submit(fwd)
    pipe.close()
    logprobs = [value for out in outs for value in await out]
    tokens = [[model.decode(token), value] for token, value in zip(ids[1:], logprobs, strict=True)]
    return {"tokens": tokens, "perplexity": 2.718281828459045 ** (-sum(logprobs) / len(logprobs))}
