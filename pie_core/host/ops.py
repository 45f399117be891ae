"""The op table of `host.call` (docs/architecture.md, section 7): names, classes, fields with their caps, and the one validator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pie_core.eta.json_text import TooLarge, loads
from pie_core.host.brief import brief
from pie_core.host.budget import Refusal

OpClass = Literal["sync", "posted", "future"]
Check = Callable[[Any], "str | None"]  # what is wanted instead, or None when the value is fine
Payload = dict[str, Any]

MAX_ID = (1 << 53) - 1
MAX_TEXT = 1 << 20  # characters of one text
MAX_CALL = 1 << 24  # characters that any call brings: for texts whose own limit the tokenizer tells, with both lengths
MAX_IDS = 1 << 20  # token ids or words in one list
MAX_SETS = 256
MAX_CHANNELS = 64
MAX_OUTS = 64
MAX_PATH = 1 << 16  # tokens of a tree path
MAX_NAME = 100  # characters of the name of a saved set
MAX_MESSAGES = 4096
MAX_READS = 1 << 14  # positions of one pass
MAX_FIELDS = 16  # of a geometry
MAX_RANDOM = 4096  # bytes
MAX_SLEEP_MS = 1 << 40


def _whole(low: int, high: int) -> Check:
    wanted = f"a whole number {low} .. {high}"

    def check(value: Any) -> str | None:
        return None if type(value) is int and low <= value <= high else wanted

    return check


def _text(most: int = MAX_TEXT) -> Check:
    def check(value: Any) -> str | None:
        return None if isinstance(value, str) and len(value) <= most else f"text of at most {most} characters"

    return check


def _numbers(most: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, list) and len(value) <= most and (not value or _all_ints(value, high)):
            return None
        return f"a list of at most {most} whole numbers 0 .. {high}"

    return check


def _all_ints(values: list[Any], high: int) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= high


def _maybe(check: Check) -> Check:
    def optional(value: Any) -> str | None:
        if value is None:
            return None
        wanted = check(value)
        return None if wanted is None else f"{wanted}, or null"

    return optional


def _one_of(*allowed: str) -> Check:
    return lambda value: None if isinstance(value, str) and value in allowed else f"one of {', '.join(allowed)}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _anything(value: Any) -> str | None:
    return None


def _list(most: int) -> Check:
    return lambda value: None if isinstance(value, list) and len(value) <= most else f"a list of at most {most} entries"


def _slight(value: Any, most: int = 1000) -> bool:
    """Whether a value holds at most `most` entries and characters: then it may be looked at and shown whole."""
    if isinstance(value, str):
        return len(value) <= most
    seen, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            seen += len(item)
        elif isinstance(item, (list, dict)):
            seen += 2 * len(item) + 1
            if seen <= most:
                stack += item if isinstance(item, list) else [*item, *item.values()]
        else:
            seen += item.bit_length() >> 6 if isinstance(item, int) else 1
        if seen > most:
            return False
    return True


def _plain(value: Any) -> bool:
    """Whether it is a list of numbers, flags and nulls."""
    return isinstance(value, list) and set(map(type, value)).isdisjoint((list, dict, str))


def _plain_rows(value: Any) -> bool:
    return isinstance(value, list) and all(value) and all(map(_plain, value))


# What the entries of tokens, reads and geo mean is the engine's to check and to tell. Here only that they have a form which it can look at
# and show: garbage of a million entries would take seconds.


def _tokens(value: Any) -> str | None:
    if isinstance(value, list) and (_plain(value) or _plain_rows(value) or _slight(value)):
        return None if len(value) <= MAX_IDS else f"at most {MAX_IDS} ids"
    if isinstance(value, dict) and set(value) == {"ch"} and _id(value["ch"]) is None:
        return None
    return 'a list of ids, a list of lists, or {"ch": id}'


def _commit(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("ch", "out") and _id(next(iter(value.values()))) is None:
        return None
    if (_path if isinstance(value, list) else _count)(value) is None:
        return None
    return f'a whole number, a list of at most {MAX_PATH} indices, {{"ch": id}} or {{"out": id}}'


def _reads(value: Any) -> str | None:
    if isinstance(value, list) and len(value) <= MAX_SETS and _slight(value, MAX_READS):
        return None
    return f"a list of at most {MAX_SETS} lists with at most {MAX_READS} positions together"


_GEOMETRY = f"an object of at most {MAX_FIELDS} fields, where only mask (rows) and tree (at most {MAX_PATH} parents) are long"


def _geometry(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "an object"
    if len(value) > MAX_FIELDS:
        return _GEOMETRY
    for key, field in value.items():
        if len(key) > MAX_NAME:
            return _GEOMETRY
        if isinstance(field, list) and (
            (key == "mask" and _plain_rows(field)) or (key == "tree" and len(field) <= MAX_PATH and _plain(field))
        ):
            continue
        if type(field) is not int and field is not None and not _slight(field):
            return _GEOMETRY
    return None


_id = _whole(1, MAX_ID)
_ids = _numbers(MAX_SETS, MAX_ID)
_tokens_list = _numbers(MAX_IDS, (1 << 32) - 1)
_words = _numbers(MAX_IDS, (1 << 32) - 1)
_count = _whole(0, 1 << 31)
_path = _numbers(MAX_PATH, 1 << 31)
_shape = _numbers(4, 1 << 20)


class Size(NamedTuple):
    """What the payload of an op may be at most, so that one that is refused costs little: `chars` characters, and `values` and `lists`
    as `json_text.loads` counts them."""

    chars: int
    values: int
    lists: int


SMALL = Size(1 << 16, 1 << 12, 1 << 10)
_TEXT = Size(6 * MAX_TEXT + SMALL.chars, SMALL.values, SMALL.lists)  # each character may be written as an escape
_LONG_TEXT = Size(MAX_CALL, SMALL.values, SMALL.lists)
_NUMBERS = Size(MAX_CALL, MAX_IDS + SMALL.values, SMALL.lists)
_PASS = _NUMBERS._replace(values=MAX_IDS + (1 << 17), lists=1 << 15)  # a mask has a row for each token
_CONVERSATION = Size(MAX_CALL, 1 << 18, 1 << 16)


@dataclass(frozen=True, slots=True)
class Op:
    """sync: answered beside the guest. posted: checked against the instance's table, handed over, answered with nothing.
    future: settles later, under the future id in field `f`. Fields in `defaults` may be left out."""

    name: str
    kind: OpClass
    fields: Mapping[str, Check]
    doc: str
    size: Size
    defaults: Mapping[str, Any]


OPS: dict[str, Op] = {}


def _op(name: str, kind: OpClass, fields: Mapping[str, Check], doc: str, size: Size = SMALL, **defaults: Any) -> None:
    OPS[name] = Op(name, kind, fields, doc, size, defaults)


_op("encode", "sync", {"text": _text(MAX_CALL)}, "Token ids of text; special tokens in it stay plain text.", _LONG_TEXT)
_op("decode", "sync", {"ids": _tokens_list}, "Text of token ids.", _NUMBERS)
_op("bytes", "sync", {"ids": _tokens_list}, "Hex of the bytes of each token.", _NUMBERS)
_op("chat.render", "sync", {"messages": _list(MAX_MESSAGES), "cue": _flag, "tools": _maybe(_list(MAX_MESSAGES))},
    "Token ids of a conversation.", _CONVERSATION, cue=True, tools=None)  # fmt: skip
_op("chat.text", "sync", {"messages": _list(MAX_MESSAGES), "cue": _flag, "tools": _maybe(_list(MAX_MESSAGES))},
    "Text of a conversation.", _CONVERSATION, cue=True, tools=None)  # fmt: skip
_op("chat.role", "sync", {"role": _text(64), "content": _text(MAX_CALL)}, "Token ids of one turn.", _LONG_TEXT)
_op("chat.cue", "sync", {}, "Token ids that open an answer.")
_op("chat.seal", "sync", {}, "Token ids that close an answer.")
_op("log", "sync", {"level": _one_of("debug", "info", "warning", "error"), "text": _text()}, "A line for the log.", _TEXT)
_op("time", "sync", {}, "Wall clock and monotonic clock, seconds.")
_op("random", "sync", {"n": _whole(0, MAX_RANDOM)}, "Hex of random bytes.")

_op("ws.new", "posted", {"ws": _id, "reuse": _flag}, "A working set; without reuse, one that shares no pages with later or earlier ones.",
    reuse=True)  # fmt: skip
_op("ws.drop", "posted", {"ws": _id}, "Free it, after the passes submitted so far.")
_op("ws.fork", "posted", {"ws": _id, "of": _id, "pipe": _maybe(_id), "buffer": _flag}, "A new working set that shares the prefix of `of`.",
    pipe=None, buffer=False)  # fmt: skip
_op("ws.commit", "posted", {"ws": _id, "n": _commit}, "Freeze the first n buffered tokens, or a path of indices and drop the others.",
    Size(1 << 20, MAX_PATH + SMALL.values, SMALL.lists))  # fmt: skip
_op("ws.discard", "posted", {"ws": _id, "n": _maybe(_count)}, "Drop the last n buffered tokens, or all of them.")
_op("ws.truncate", "posted", {"ws": _id, "n": _count}, "Cut back to n tokens.")
_op("pipe.new", "posted", {"pipe": _id}, "A pipeline.")
_op("pipe.close", "posted", {"pipe": _id}, "No more submits.")
_op("pipe.stop_when", "posted", {"pipe": _id, "ch": _id}, "End it at the first true put into a channel.")
_op("ch.new", "posted", {"ch": _id, "dtype": _one_of("f32", "i32", "u32", "bool"), "shape": _shape, "capacity": _whole(1, 1 << 12),
    "seed": _maybe(_words), "host": _maybe(_one_of("reader", "writer"))}, "A channel.", _NUMBERS,
    shape=[], capacity=1, seed=None, host=None)  # fmt: skip
_op("ch.put", "posted", {"ch": _id, "words": _words}, "Put one cell from the host.", _NUMBERS)
_op("ch.set", "posted", {"ch": _id, "words": _words}, "Replace the committed front.", _NUMBERS)
_op("ch.drop", "posted", {"ch": _id}, "No more uses; its cells are free when what was submitted so far needs them no more.")
_op("program", "posted", {"prog": _id, "text": _text(1 << 18)}, "A tensor program by its canonical text.", _TEXT)
_op("program.drop", "posted", {"prog": _id}, "No more submits of it.")
_op("submit", "posted", {"pipe": _id, "tokens": _tokens, "ws": _ids, "geo": _geometry, "reads": _maybe(_reads), "prog": _maybe(_id),
    "params": _words, "chans": _numbers(MAX_CHANNELS, MAX_ID), "outs": _numbers(MAX_OUTS, MAX_ID)}, "A forward pass.", _PASS,
    reads=None, prog=None, params=[], chans=[], outs=[])  # fmt: skip
_op("send", "posted", {"value": _anything}, "Stream a value to the client.", Size(MAX_CALL, 1 << 19, 1 << 17))

_op("ch.take", "future", {"ch": _id, "f": _id}, "The next value of a channel, removed.")
_op("ch.read", "future", {"ch": _id, "f": _id}, "The next value of a channel, left in place.")
_op("sleep", "future", {"ms": _whole(0, MAX_SLEEP_MS), "f": _id}, "Settles after ms milliseconds.")
_op("receive", "future", {"f": _id}, "The next value that the client sends.")
_op("ws.length", "future", {"ws": _id, "f": _id}, "Tokens of a working set, after the passes submitted so far.")
_op("ws.cached", "future", {"ws": _id, "f": _id}, "How many of its tokens came out of the cache, after the passes submitted so far.")
_op("ws.save", "future", {"ws": _id, "name": _text(MAX_NAME), "f": _id}, "Keep it under a name, after the passes submitted so far.")
_op("ws.open", "future", {"ws": _id, "name": _text(MAX_NAME), "f": _id}, "A new working set that is what was saved; its tokens.")
_op("prewarm", "future", {"ids": _tokens_list, "f": _id}, "Compute and cache the full pages of ids; how many of them are cached then.",
    _NUMBERS)  # fmt: skip


def parse(name: str, payload: str) -> Payload:
    """The checked fields of a call. Raises Refusal (type UsageError) naming op, field, value and what is wanted."""
    op = OPS.get(name)
    if op is None:
        raise Refusal("UsageError", f"unknown op {name[:80]!r}; known: {', '.join(OPS)}")
    if len(payload) > op.size.chars:
        raise Refusal("UsageError", f"{name}: the payload has {len(payload)} characters, of this op at most {op.size.chars} are taken")
    try:
        fields = loads(payload, values=op.size.values, lists=op.size.lists) if payload else {}
    except TooLarge as error:
        raise Refusal("UsageError", f"{name}: the payload is too large: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal("UsageError", f"{name}: the payload is not JSON: {error}") from None
    if type(fields) is not dict:
        raise Refusal("UsageError", f"{name}: the payload must be an object, got {type(fields).__name__}")
    checks = op.fields
    for key, check in checks.items():
        if key not in fields:
            if key not in op.defaults:
                raise Refusal("UsageError", f"{name}: field {key!r} is missing")
            fields[key] = op.defaults[key]
            continue
        wanted = check(fields[key])
        if wanted is not None:
            raise Refusal("UsageError", f"{name}: {key} = {brief(fields[key])} must be {wanted}")
    if len(fields) > len(checks):
        extra = next(key for key in fields if key not in checks)
        raise Refusal("UsageError", f"{name}: unknown field {extra[:80]!r}; known: {', '.join(checks)}")
    return fields
