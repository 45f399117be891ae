"""POST /v1/chat/completions as an inferlet: a checked request in; OpenAI chunks out as they come, or one completion at the end.

Input: {"id", "created", "model", "request"}, the request as pie_server.api.openai_schema describes it.
Result: {"body": completion or null when streamed, "usage"}, or {"status", "error"} when the request cannot be served.
"""

import asyncio
import os

from inferlet import chat, model, send
from inferlet.errors import ArenaFull, BudgetExceeded, ContextLengthExceeded, InferletError, OutOfPages
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    exp,
    frequency_penalty,
    gather,
    intrinsics,
    iota,
    log,
    presence_penalty,
    reduce_argmax,
    reduce_max,
    reduce_sum,
    sample,
    scatter_add,
    select,
    token_counts,
    top_k,
)
from inferlet.text import Detokenizer, StopMatcher

GREEDY_BELOW = 1e-5  # temperatures this close to 0 leave nothing to chance
HISTORIES = (64, 256, 1024)  # tokens that penalties look back on; few sizes, so that requests share kernels
BIASES = (8, 64, 1024)  # places for logit biases
MAX_LOGPROBS = 120_000  # entries of one answer, which is one text of at most 16 million characters


class Reply:
    """The OpenAI objects of one request; streams chunks when the request asks for it."""

    def __init__(self, head: dict, request: dict) -> None:
        self.head, self.stream, self.include_usage = head, request["stream"], request["include_usage"]

    def chunk(self, index: int, delta: dict, finish: str | None = None, logprobs: dict | None = None) -> None:
        """Send one chunk of choice `index`."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
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

    def __init__(self, index: int, reply: Reply, stops: list[str], limit: int, *, logprobs: bool) -> None:
        self.index, self.reply, self.limit, self.with_logprobs = index, reply, limit, logprobs
        self.detokenizer, self.stops = Detokenizer(), StopMatcher(stops)
        self.texts: list[str] = []
        self.logprobs: list[dict] = []
        self.tokens = 0
        self.finish: str | None = None
        self._seen = self._sent = 0  # characters made, and passed on
        self._waiting: list[tuple[int, dict]] = []  # log-probabilities of tokens whose text was not passed on, and where it begins

    def accept(self, token: int, logprob: dict | None = None) -> None:
        """Take the next token; sets `finish` when it was the last. `logprob` is its entry in the answer."""
        if self.tokens == 0 and self.reply.stream:
            self.reply.chunk(self.index, {"role": "assistant", "content": ""})
        self.tokens += 1
        if token in model.eos:
            self._end("stop")
            return
        if logprob is not None:
            self._waiting.append((self._seen, logprob))
        piece = self.detokenizer.feed(model.token_bytes(token))
        self._seen += len(piece)
        self._emit(self.stops.feed(piece))
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
        self._sent += len(text)
        logprobs = self._take_logprobs(self._sent)
        if self.reply.stream:
            self.reply.chunk(self.index, {"content": text}, None, logprobs)
        else:
            self.texts.append(text)

    def _finish(self, reason: str) -> None:
        self.finish = reason
        rest = None
        if self.stops.stopped is None and self._waiting:  # tokens without text of their own; those of a stop string are not told
            rest = self._take_logprobs(self._seen + 1)
        if self.reply.stream:
            self.reply.chunk(self.index, {}, reason, rest)

    def _take_logprobs(self, end: int) -> dict | None:
        """The entries of the tokens that begin before character `end` and were not told yet."""
        if not self.with_logprobs:
            return None
        ready = [entry for begin, entry in self._waiting if begin < end]
        self._waiting = self._waiting[len(ready) :]
        if not self.reply.stream:
            self.logprobs += ready
        return {"content": ready, "refusal": None}

    def whole(self) -> dict:
        """The choice object of a completion."""
        message = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        logprobs = {"content": self.logprobs, "refusal": None} if self.with_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish}


class Sampler:
    """What a request asks of its epilogue. Everything runs on the device: bias and penalties on the logits, then temperature, top-k, top-p
    and min-p, each over what the one before left. Log-probabilities are the model's own, before all of that."""

    def __init__(self, request: dict, key: int, limit: int) -> None:
        self.logprobs = request["logprobs"]
        frequency, presence = request["frequency_penalty"], request["presence_penalty"]
        temperature = request["temperature"] if request["temperature"] >= GREEDY_BELOW else 0
        k = min(request["top_k"], model.vocab) if request["top_k"] else None
        p = request["top_p"] if request["top_p"] < 1 else None
        least = request["min_p"] or None
        rng = Channel.counter(key) if temperature else None
        size = at_least(HISTORIES, limit)
        history = Channel.of([-1] * size) if frequency or presence else None  # -1 is no token
        tokens, biases = bias_channels(request["logit_bias"])
        alternatives = min(request["top_logprobs"], model.vocab) if self.logprobs else None

        def epilogue():
            logits = x = intrinsics.output(0, "logits")
            if tokens is not None:
                x = scatter_add(x, tokens.read(), biases.read())
            if history is not None:
                seen = history.take()
                counts = token_counts(seen, model.vocab)
                x = presence_penalty(frequency_penalty(x, counts, frequency), counts, presence)
            token = sample(x, rng.take(), temperature, k, p, least) if rng is not None else reduce_argmax(x)
            if history is not None:
                place = iota(size)
                history.put(select(place == size - 1, token, gather(seen, place + 1)))  # the oldest goes
            if alternatives is None:
                return token
            best = reduce_max(logits)
            norm = best + log(reduce_sum(exp(logits - best)))
            if not alternatives:
                return token, gather(logits, token) - norm
            values, ids = top_k(logits, alternatives)
            return token, gather(logits, token) - norm, values - norm, ids

        self.epilogue = epilogue

    async def result(self, out) -> tuple[int, dict | None]:
        """The token that a pass drew, and its entry of log-probabilities when they are asked for."""
        if not self.logprobs:
            return await out, None
        token, logprob, *rest = await out
        values, ids = rest if rest else ([], [])
        texts = model.token_bytes([token, *ids])
        entry = logprob_entry(texts[0], logprob)
        entry["top_logprobs"] = [logprob_entry(data, value) for data, value in zip(texts[1:], values, strict=True)]
        return token, entry


def logprob_entry(data: bytes, logprob: float) -> dict:
    """One token of the answer's log-probabilities; the API's lowest number stands for minus infinity."""
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": max(logprob, -9999.0)}


def at_least(sizes: tuple[int, ...], n: int) -> int:
    """The smallest of the sizes that holds n, or the largest."""
    return next((size for size in sizes if size >= n), sizes[-1])


def bias_channels(pairs: list[list[float]]) -> tuple[Channel | None, Channel | None]:
    """Token ids and their biases as channels that passes read; unused places hold the id -1, which no token has."""
    if not pairs:
        return None, None
    empty = at_least(BIASES, len(pairs)) - len(pairs)
    return Channel.of([token for token, _ in pairs] + [-1] * empty), Channel.of([float(bias) for _, bias in pairs] + [0.0] * empty)


def key_of(seed: int | None, index: int) -> int:
    """The 32-bit RNG key of choice `index`: all of `seed`'s bits count, and each choice draws its own numbers."""
    if seed is None:
        return int.from_bytes(os.urandom(4), "little")
    x = (seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64  # splitmix64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 32


async def generate(choice: Choice, ws: WorkingSet, pipe: Pipeline, tokens: list[int], sampler: Sampler) -> None:
    """Run passes until the choice ends; `tokens` is what `ws` does not hold yet."""
    while choice.finish is None:
        fwd = ForwardPass()
        fwd.embed(tokens)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(sampler.epilogue)
        pipe.submit(fwd)
        token, logprob = await sampler.result(out)
        tokens = [token]
        choice.accept(token, logprob)
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
    if fault := unknown_tokens(request) or too_many_logprobs(request, limit):
        return fault
    reply = Reply({"id": input["id"], "created": input["created"], "model": input["model"]}, request)
    choices = [Choice(i, reply, request["stop"], limit, logprobs=request["logprobs"]) for i in range(request["n"])]

    ws, pipes = WorkingSet(reuse=request["cache_prompt"]), [Pipeline() for _ in choices]
    tokens = prompt
    if len(choices) > 1 and len(prompt) > 1:  # compute the prompt once; each choice adds its last token, whose logits it samples
        prefill = ForwardPass()
        prefill.embed(prompt[:-1])
        prefill.state([ws], StateGeometry.folding())
        pipes[0].submit(prefill)
        tokens = prompt[-1:]
    sets = [ws, *(ws.fork(pipes[0]) for _ in choices[1:])]
    try:
        *_, cached = await asyncio.gather(
            *(
                generate(choice, ws, pipe, tokens, Sampler(request, key_of(request["seed"], choice.index), limit))
                for choice, ws, pipe in zip(choices, sets, pipes, strict=True)
            ),
            ws.cached(),  # the last to begin: by then every choice has submitted its first pass
        )
    except ContextLengthExceeded as error:
        return refusal(str(error))
    except BudgetExceeded as error:  # so many choices with their histories never fit
        return refusal(str(error), None, "n")
    except (ArenaFull, OutOfPages) as error:  # others hold the memory: the request itself may fit later
        return {"status": 503, "error": {"message": str(error), "type": "server_error", "param": None, "code": "kv_cache_full"}}

    generated = sum(choice.tokens for choice in choices)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reply.stream:
        reply.end(usage)
        return {"body": None, "usage": usage}
    return {"body": reply.completion(choices, usage), "usage": usage}


def unknown_tokens(request: dict) -> dict | None:
    """The refusal of a logit bias for a token that the model does not have."""
    for token, _ in request["logit_bias"]:
        if token >= model.vocab:
            where = f"logit_bias.{token}"
            message = f"{where}: the tokens of {model.name} are 0 to {model.vocab - 1}"
            return refusal(message, None, where)
    return None


def too_many_logprobs(request: dict, limit: int) -> dict | None:
    """The refusal of an answer that would be one enormous text; a stream has no such limit."""
    entries = request["n"] * limit * (1 + request["top_logprobs"])
    if not request["logprobs"] or request["stream"] or entries <= MAX_LOGPROBS:
        return None
    message = f"{entries:,} log-probabilities are too many for one answer, which may have {MAX_LOGPROBS:,}"
    return refusal(f"{message}: ask for a smaller max_tokens, n or top_logprobs, or stream", None, "top_logprobs")


def refusal(message: str, code: str | None = "context_length_exceeded", param: str = "messages") -> dict:
    """The answer to messages that do not fit, or that the template refuses."""
    return {
        "status": 400,
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code},
    }
