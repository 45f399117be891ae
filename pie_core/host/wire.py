"""Values and errors as JSON text of the inferlet ABI."""

from __future__ import annotations

import base64
import json
import math
import struct

from pie_core.engine.errors import EngineError
from pie_core.engine.values import Cell, Value
from pie_core.host.budget import error_value

_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def value_json(value: Value) -> str:
    """A pass output or cell: a number or bool for a scalar, else {"b64","dtype","shape"}; also for floats that JSON has no word for."""
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return _cell(Cell("f32", (), struct.pack("<f", value)))
    return _cell(value)


def _cell(cell: Cell) -> str:
    data = base64.b64encode(cell.data).decode("ascii")
    return f'{{"b64":"{data}","dtype":"{cell.dtype}","shape":[{",".join(map(str, cell.shape))}]}}'


def settled(future: int, value: str) -> str:
    """The event of a future that has a value (JSON text)."""
    return f"[{future},true,{value}]"


def rejected(future: int, error: EngineError) -> str:
    """The event of a future that failed."""
    return f"[{future},false,{_text(error_value(error.type_name, error.message, error.fields))}]"
