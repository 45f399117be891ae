"""host.call in Python: JSON in, JSON out, ids chosen here, refusals raised as typed errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from wit_world.imports import host as _wit

from ._values import json_fault
from .errors import UsageError, from_wire

new_id: Callable[[], int] = itertools.count(1).__next__  # ids of handles and futures share one space
_encode: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False, ensure_ascii=False).encode
_raw: Callable[[str, str], str] = _wit.call
_loads = json.loads


def dumps(value: Any) -> str:
    """`value` as JSON text that can cross the ABI. Raises TypeError or ValueError; `json_fault` says in words what is wrong."""
    text = _encode(value)
    if not text.isascii():
        text.encode()  # a lone surrogate is a character of Python but not of Unicode, and neither WIT nor UTF-8 can carry it
    return text


def call(op: str, payload: str) -> Any:
    """Run `op` with JSON text `payload`; the parsed answer (None when empty). Raises the host's refusal."""
    answer = _raw(op, payload)
    if not answer:
        return None
    value = _loads(answer)
    if type(value) is dict and "error" in value:
        raise from_wire(value["error"])
    return value


def call_with(op: str, **fields: Any) -> Any:
    """As `call`, with the payload built from `fields`. Raises UsageError for a field that JSON cannot hold."""
    try:
        payload = dumps(fields)
    except (TypeError, ValueError) as error:
        faults = (json_fault(value, name) for name, value in fields.items())
        raise UsageError(f"{op}: {next(filter(None, faults), str(error))}") from None
    return call(op, payload)
