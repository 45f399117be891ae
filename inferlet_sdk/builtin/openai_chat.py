"""POST /v1/chat/completions as an inferlet: a checked request in; OpenAI chunks out as they come, or one completion at the end.

Input: {"id", "created", "model", "request"}, the request as pie_server.api.openai_schema describes it.
Result: {"body": completion or null when streamed, "usage"}, or {"status", "error"} when the request cannot be served.
"""

import asyncio
import os

from inferlet import chat, model, send
from inferlet.errors import ContextLengthExceeded, InferletError, OutOfPages
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel_max, intrinsics, reduce_argmax

from pie_core.text.stream import Detokenizer, StopMatcher

GREEDY_BELOW = 1e-5  # temperatures this close to 0 leave nothing to chance


class Reply:
    """The OpenAI objects of one request; streams chunks when the request asks for it."""

    def __init__(self, head: dict, request: dict) -> None:
        self.head, self.stream, self.include_usage = head, request["stream"], request["include_usage"]

    def chunk(self, index: int, delta: dict, finish: str | None = None) -> None:
        """Send one chunk of choice `index`."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        self._send({"choices": [choice], **({"usage": None} if self.include_usage else {})})

    def end(self, usage: dict) -> None:
        """Send the usage chunk when it was asked for."""
        if self.include_usage:
            self._send({"choices": [], "usage": usage})

    def completion(self, choices: "list[Choice]", usage: dict) -> dict:
        """The whole answer of a request that does not stream."""
        return {**self.head, "object": "chat.completion", "choices": [choice.whole() for choice in choices], "usage": usage}

    def _send(self, fields: dict) -> None:
        send({**self.head, "object": "chat.completion.chunk", **fields})


class Choice:
    """One answer: turns tokens into text, watches for its end, and passes text on as soon as it is certain."""

    def __init__(self, index: int, reply: Reply, stops: list[str], limit: int) -> None:
        self.index, self.reply, self.limit = index, reply, limit
        self.detokenizer, self.stops = Detokenizer(), StopMatcher(stops)
        self.texts: list[str] = []
        self.tokens = 0
        self.finish: str | None = None

    def accept(self, token: int) -> None:
        """Take the next token; sets `finish` when it was the last."""
        if self.tokens == 0 and self.reply.stream:
            self.reply.chunk(self.index, {"role": "assistant", "content": ""})
        self.tokens += 1
        if token in model.eos:
            self._end("stop")
            return
        self._emit(self.stops.feed(self.detokenizer.feed(model.token_bytes(token))))
        if self.stops.stopped is not None:
            self._finish("stop")
        elif self.tokens >= self.limit:
            self._end("length")

    def _end(self, reason: str) -> None:
        """Release what was held back; a stop string may still complete in it."""
        self._emit(self.stops.feed(self.detokenizer.flush()) + self.stops.flush())
        self._finish("stop" if self.stops.stopped is not None else reason)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self.reply.stream:
            self.reply.chunk(self.index, {"content": text})
        else:
            self.texts.append(text)

    def _finish(self, reason: str) -> None:
        self.finish = reason
        if self.reply.stream:
            self.reply.chunk(self.index, {}, reason)

    def whole(self) -> dict:
        """The choice object of a completion."""
        message = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        return {"index": self.index, "message": message, "logprobs": None, "finish_reason": self.finish}


def key_of(seed: int | None, index: int) -> int:
    """The 32-bit RNG key of choice `index`: all of `seed`'s bits count, and each choice draws its own numbers."""
    if seed is None:
        return int.from_bytes(os.urandom(4), "little")
    x = (seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64  # splitmix64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 32


async def generate(choice: Choice, ws: WorkingSet, pipe: Pipeline, tokens: list[int], *, temperature: float, key: int) -> None:
    """Run passes until the choice ends; `tokens` is what `ws` does not hold yet."""
    if temperature < GREEDY_BELOW:

        def sample():
            return reduce_argmax(intrinsics.output(0, "logits"))
    else:
        rng = Channel.counter(key)

        def sample():
            return gumbel_max(intrinsics.output(0, "logits") / temperature, rng.take())

    while choice.finish is None:
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        token = fwd.epilogue(sample)
        pipe.submit(fwd)
        tokens = [await token]
        choice.accept(tokens[0])
    pipe.close()


def room_to_answer(prompt: int, n: int) -> int:
    """The most tokens that each of `n` answers to a prompt of that many tokens may have, so that all of them fit side by side.

    A request alone must never need more pages than there are: then no waiting would help it. So an answer ends with "length" where
    the context, or its share of the KV cache, ends, whatever max_tokens asks for. The last token of an answer needs no place.
    """
    room = model.context - prompt
    if n > 1 and model.pages:
        shared = (prompt - 1) // model.page_tokens  # full pages of the prompt but its last token, which all choices read
        room = min(room, (shared + (model.pages - shared) // n) * model.page_tokens - prompt + 1)
    return room


def does_not_fit(prompt: int, n: int) -> dict:
    """The refusal of a prompt that leaves no room to answer; says what would help."""
    capacity = model.pages * model.page_tokens
    if prompt < model.context:
        message = f"{n} answers to messages of {prompt} tokens do not fit into the KV cache of {capacity} tokens; ask for a smaller n"
        return refusal(f"{message}, or start the server with a larger --kv-pool-mb", param="n")
    limit = f"the context of {model.name} is {model.context}"
    if model.context == capacity:
        limit = f"the KV cache of this server holds {capacity}"
    message = f"the messages are {prompt} tokens, {limit}, and at least 1 must be left to answer"
    return refusal(message + ("; a larger --kv-pool-mb makes room" if model.context == capacity else ""))


async def main(input: dict) -> dict:
    request = input["request"]
    try:
        prompt = chat.render(request["messages"])
    except InferletError as error:
        if error.fields.get("too_long") or type(error).__name__ == "OutputLimitExceeded":  # limits far beyond any context
            return refusal(f"the messages are far longer than the context of {model.name}, {model.context} tokens: {error}")
        return refusal(str(error), "invalid_messages")  # no template, or one that refuses this order of roles
    room = room_to_answer(len(prompt), request["n"])
    if room < 1:
        return does_not_fit(len(prompt), request["n"])
    limit = min(room, request["max_tokens"] or room)
    reply = Reply({"id": input["id"], "created": input["created"], "model": input["model"]}, request)
    choices = [Choice(i, reply, request["stop"], limit) for i in range(request["n"])]

    ws, pipes = WorkingSet(), [Pipeline() for _ in choices]
    tokens = prompt
    if len(choices) > 1 and len(prompt) > 1:  # compute the prompt once; each choice adds its last token, whose logits it samples
        prefill = ForwardPass()
        prefill.embed(prompt[:-1])
        prefill.state([ws], StateGeometry.folding())
        pipes[0].submit(prefill)
        tokens = prompt[-1:]
    sets = [ws, *(ws.fork(pipes[0]) for _ in choices[1:])]
    try:
        await asyncio.gather(
            *(
                generate(choice, ws, pipe, tokens, temperature=request["temperature"], key=key_of(request["seed"], choice.index))
                for choice, ws, pipe in zip(choices, sets, pipes, strict=True)
            )
        )
    except ContextLengthExceeded as error:
        return refusal(str(error))
    except OutOfPages as error:  # others hold the pages: the request itself may fit later
        return {"status": 503, "error": {"message": str(error), "type": "server_error", "param": None, "code": "kv_cache_full"}}

    generated = sum(choice.tokens for choice in choices)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": generated, "total_tokens": len(prompt) + generated}
    if reply.stream:
        reply.end(usage)
        return {"body": None, "usage": usage}
    return {"body": reply.completion(choices, usage), "usage": usage}


def refusal(message: str, code: str = "context_length_exceeded", param: str = "messages") -> dict:
    """The answer to messages that do not fit, or that the template refuses."""
    return {
        "status": 400,
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code},
    }
