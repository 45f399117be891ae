"""Mirostat 2 (arXiv:2007.14966): steers the surprise of the text to a target; its state stays on the device."""

from inferlet import chat, model
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, mirostat


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (16), tau (3.0), rate (0.1), seed (0)."""
    tau = float(input.get("tau", 3.0))
    rate = float(input.get("rate", 0.1))
    if not 0 <= tau < float("inf") or not 0 <= rate < float("inf"):
        raise ValueError(f"tau is {tau} and rate {rate}; use numbers >= 0")
    seed, max_tokens = int(input.get("seed", 0)), int(input.get("max_tokens", 16))
    tokens = chat.prefix() + model.encode(input.get("prompt", "Once upon a time"))
    ws, pipe, rng, mu = WorkingSet(), Pipeline(), Channel.counter(seed), Channel.of(2 * tau)

    def epilogue():
        token, then = mirostat(intrinsics.output(0, "logits"), mu.take(), rng.take(), tau, rate)
        mu.put(then)
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
