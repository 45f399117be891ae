"""host.call in Python: JSON in, JSON out, ids chosen here, refusals raised as typed errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from wit_world.imports import host as _wit

from .errors import from_wire

new_id: Callable[[], int] = itertools.count(1).__next__  # ids of handles and futures share one space
dumps: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode
_raw: Callable[[str, str], str] = _wit.call
_loads = json.loads


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
    """As `call`, with the payload built from `fields`."""
    return call(op, dumps(fields))
