"""Validates the body of POST /v1/chat/completions: a plain request for the inferlet, or a 400 naming the field."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pie_server.errors import ApiError

T = TypeVar("T")

MAX_N = 8
MAX_STOPS = 4
MAX_STOP_CHARS = 1_000
MAX_MESSAGES = 4_096
MAX_BIASES = 1_024
MAX_BIAS = 100
MAX_PENALTY = 2
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant")

# Known parameters that are not supported yet, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
_MESSAGE_FIELDS = {"role", "content", "name"}
# What clients echo from an earlier answer of the server; only the empty forms are accepted.
_MESSAGE_ECHOES = {"tool_calls", "function_call", "refusal", "audio", "annotations", "tool_call_id"}


def _bad(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def show(value: Any) -> str:
    """`value` for an error message: its JSON, cut at 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    except ValueError:  # an int of more digits than Python prints
        text = "a number too long to print"
    except RecursionError:
        text = "a value nested too deeply to print"
    return text if len(text) <= 60 else text[:57] + "..."


def _name(value: str) -> str:
    """A field's name inside a path: as it is, in printable characters, cut."""
    return show(value)[1:-1] if len(value) <= 57 else f"{show(value[:50])[1:-1]}..."


def _plain(value: Any, wanted: Any) -> bool:
    """Equal, and equal in kind: JSON's false is not 0."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise _bad(param, f"{param} must be a string, got {show(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise _bad(
            param, f"{param} holds a lone surrogate (U+{ord(value[err.start]):04X}) at character {err.start}; send valid Unicode"
        ) from err
    return value


def _integer(value: Any, param: str, low: int, high: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(param, f"{param} must be an integer from {low} to {high}, got {show(value)}")
    if not low <= value <= high:
        raise _bad(param, f"{param} must be from {low} to {high}, got {show(value)}")
    return value


def _number(value: Any, param: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(param, f"{param} must be a number from {low:g} to {high:g}, got {show(value)}")
    if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
        raise _bad(param, f"{param} must be from {low:g} to {high:g}, got {show(value)}")
    return float(value)


def _boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise _bad(param, f"{param} must be true or false, got {show(value)}")
    return value


def _labels(value: Any, param: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _bad(param, f'{param} must be an object of strings like {{"topic": "demo"}}, got {show(value)}')
    return {key: _text(text, f"{param}.{_name(key)}") for key, text in value.items()}


# Without effect here, since they concern accounts, billing or storage at the API's origin: each has to be of its type, or null.
_IGNORED: dict[str, Callable[[Any, str], object]] = {
    "user": _text, "metadata": _labels, "store": _boolean, "service_tier": _text, "safety_identifier": _text, "prompt_cache_key": _text,
    "prompt_cache_retention": _text, "parallel_tool_calls": _boolean,
}  # fmt: skip


def _optional(body: Mapping[str, Any], name: str, read: Callable[[Any, str], T], default: T) -> T:
    value = body.get(name)
    return default if value is None else read(value, name)


def _content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return _text(value, param)
    if not isinstance(value, list):
        raise _bad(param, f"{param} must be a string or a list of text parts, got {show(value)}")
    if not value:
        raise _bad(param, f"{param} is an empty list; give at least one text part")
    texts = []
    for i, part in enumerate(value):
        where = f"{param}[{i}]"
        if not isinstance(part, dict):
            raise _bad(where, f'{where} must be an object like {{"type": "text", "text": "..."}}, got {show(part)}')
        if part.get("type") != "text":
            raise _bad(
                f"{where}.type", f'{where}.type is {show(part.get("type"))}; only "text" parts are supported yet', "unsupported_value"
            )
        texts.append(_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _bad(where, f"{where} must be an object with role and content, got {show(value)}")
    role = value.get("role")
    if role is None:
        raise _bad(f"{where}.role", f"{where}.role is missing; use one of {', '.join(ROLES)}")
    if role in ("tool", "function"):
        raise _bad(f"{where}.role", f"{where}.role is {show(role)}; tools are not supported yet", "unsupported_value")
    if role not in ROLES:
        raise _bad(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, got {show(role)}")
    for name in value:
        if name in _MESSAGE_ECHOES and value[name] in (None, []):
            continue
        if name not in _MESSAGE_FIELDS:
            known = "is not supported yet" if name in _MESSAGE_ECHOES else "is not a field of a message"
            raise _bad(f"{where}.{_name(name)}", f"{where}.{_name(name)} {known}; leave it out", "unsupported_parameter")
    if value.get("name") is not None:
        _text(value["name"], f"{where}.name")
    if value.get("content") is None:
        raise _bad(f"{where}.content", f"{where}.content is missing; give a string or a list of text parts")
    return {"role": "system" if role == "developer" else role, "content": _content(value["content"], f"{where}.content")}


def parse_messages(value: Any) -> list[dict[str, str]]:
    """The messages as [{role, content}] with plain string contents. Raises ApiError 400 naming the field."""
    if value is None:
        raise _bad("messages", "messages is missing; give a list with at least one message")
    if not isinstance(value, list):
        raise _bad("messages", f"messages must be a list, got {show(value)}")
    if not value:
        raise _bad("messages", "messages is empty; give at least one message")
    if len(value) > MAX_MESSAGES:
        raise _bad("messages", f"messages holds {len(value)} messages, over the limit of {MAX_MESSAGES}")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _stop(value: Any, param: str) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _bad(param, f"stop must be a string or a list of up to {MAX_STOPS} strings, got {show(value)}")
    if len(stops) > MAX_STOPS:
        raise _bad(param, f"stop holds {len(stops)} strings, over the limit of {MAX_STOPS}")
    for i, stop in enumerate(stops):
        where = param if isinstance(value, str) else f"{param}[{i}]"
        _text(stop, where)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad(where, f"{where} must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
    return stops


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise _bad("stream_options", f"stream_options must be an object, got {show(value)}")
    if not stream:
        raise _bad("stream_options", "stream_options is only allowed when stream is true")
    for name in value:
        if name not in ("include_usage", "include_obfuscation"):
            raise _bad("stream_options", f"stream_options has no field {show(name)}; leave it out", "unknown_parameter")
    if _optional(value, "include_obfuscation", lambda v, _: _boolean(v, "stream_options.include_obfuscation"), False):
        raise _bad("stream_options.include_obfuscation", "stream_options.include_obfuscation is not supported yet", "unsupported_parameter")
    return _optional(value, "include_usage", lambda v, _: _boolean(v, "stream_options.include_usage"), False)


def _logit_bias(value: Any, param: str) -> list[list[float]]:
    """[[token id, bias], …] in the order of the ids; the vocabulary is the inferlet's to check."""
    if not isinstance(value, dict):
        raise _bad(param, f'{param} must be an object like {{"50256": -100}} of token ids and biases, got {show(value)}')
    if len(value) > MAX_BIASES:
        raise _bad(param, f"{param} holds {len(value)} token ids, over the limit of {MAX_BIASES}")
    biases = {}
    for key, bias in value.items():
        where = f"{param}.{_name(key)}"
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31):
            raise _bad(where, f"{where}: the keys of {param} are token ids, whole numbers in decimal digits, got {show(key)}")
        biases[int(key)] = _number(bias, where, -MAX_BIAS, MAX_BIAS)
    return [[token, bias] for token, bias in sorted(biases.items())]


def _penalty(value: Any, param: str) -> float:
    return _number(value, param, -MAX_PENALTY, MAX_PENALTY)


def _top_k(value: Any, param: str) -> int | None:
    k = _integer(value, param, -1, 2**31 - 1)
    return k if k > 0 else None


def _top_logprobs(body: Mapping[str, Any], logprobs: bool) -> int:
    n = _optional(body, "top_logprobs", lambda v, p: _integer(v, p, 0, MAX_TOP_LOGPROBS), 0)
    if n and not logprobs:
        raise _bad("top_logprobs", f"top_logprobs = {n} needs logprobs = true; set it, or leave top_logprobs out")
    return n


_READ = {
    "messages", "model", "temperature", "seed", "max_tokens", "max_completion_tokens", "stop", "n", "stream", "stream_options",
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "cache_prompt",
}  # fmt: skip


_OF_COMPLETIONS = ("prompt", "best_of", "echo", "suffix")


def _fix(name: str) -> str:
    """What to do about a parameter that this API does not have."""
    if name in _OF_COMPLETIONS:
        fix = "send messages" if name == "prompt" else "send messages and leave it out"
        return f"it belongs to the older completions API, which is not served: {fix}"
    near = difflib.get_close_matches(name[:60], [*_READ, *_UNSUPPORTED], n=1, cutoff=0.8)
    return f'leave it out, or did you mean "{near[0]}"?' if near else "it is not in the OpenAI chat API: leave it out"


def _check_names(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ:
            continue
        if name in _IGNORED:
            _optional(body, name, _IGNORED[name], None)
            continue
        if name not in _UNSUPPORTED:
            raise _bad(_name(name), f"unknown parameter {show(name)}; {_fix(name)}", "unknown_parameter")
        if value is not None and not any(_plain(value, fine) for fine in _UNSUPPORTED[name]):
            raise _bad(name, f"{name} = {show(value)} is not supported yet; leave it out", "unsupported_parameter")


def parse_chat_request(body: Any) -> dict[str, Any]:
    """The checked request as the inferlet takes it: messages [{role, content}] with plain string contents, model (str or
    None), temperature (float, 0 is greedy), top_p, min_p (floats), top_k (int or None), frequency_penalty, presence_penalty (floats),
    logit_bias ([[id, float]]), logprobs (bool), top_logprobs (int), seed (int or None), max_tokens (int or None), stop ([str]), n,
    stream, include_usage, cache_prompt (bool). Raises ApiError 400 naming the field."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {show(body)}")
    _check_names(body)
    stream = _optional(body, "stream", _boolean, False)
    limit = None
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name wins when both are given
        limit = _optional(body, name, lambda v, p: _integer(v, p, 1, 2**31 - 1), limit)
    model = body.get("model")
    logprobs = _optional(body, "logprobs", _boolean, False)
    return {
        "messages": parse_messages(body.get("messages")),
        "model": None if model is None else _text(model, "model"),
        "temperature": _optional(body, "temperature", lambda v, p: _number(v, p, 0.0, 2.0), 1.0),
        "top_p": _optional(body, "top_p", lambda v, p: _number(v, p, 0.0, 1.0), 1.0),
        "top_k": _optional(body, "top_k", _top_k, None),
        "min_p": _optional(body, "min_p", lambda v, p: _number(v, p, 0.0, 1.0), 0.0),
        "frequency_penalty": _optional(body, "frequency_penalty", _penalty, 0.0),
        "presence_penalty": _optional(body, "presence_penalty", _penalty, 0.0),
        "logit_bias": _optional(body, "logit_bias", _logit_bias, list[list[float]]()),
        "logprobs": logprobs,
        "top_logprobs": _top_logprobs(body, logprobs),
        "seed": _optional(body, "seed", lambda v, p: _integer(v, p, -(2**63), 2**64 - 1), None),
        "max_tokens": limit,
        "stop": _optional(body, "stop", _stop, list[str]()),
        "n": _optional(body, "n", lambda v, p: _integer(v, p, 1, MAX_N), 1),
        "stream": stream,
        "include_usage": _stream_options(body.get("stream_options"), stream),
        "cache_prompt": _optional(body, "cache_prompt", _boolean, True),
    }
