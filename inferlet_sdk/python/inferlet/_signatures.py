"""How a function of the SDK is called, for the TypeError of a call that does not fit: Python names the fault, this names the fix."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import inferlet

_CALL = re.compile(r"((?:\w+\.)*\w+)\(\) (?:takes|missing|got) ")
_MODULES = {"inferlet": inferlet, "eta": inferlet.eta, "chat": inferlet.chat, "model": inferlet.model}


def call_hint(message: str, scope: Mapping[str, Any]) -> str:
    """`; call it as …` when `message` is Python's about the arguments of one of our functions, else nothing. `scope` is the author's
    module: only what goes by our name there is ours."""
    found = _CALL.match(message)
    if found is None:
        return ""
    first, *rest = found[1].removesuffix(".__init__").split(".")
    for name, module in _MODULES.items():
        target = module.__dict__.get(first)
        if not callable(target):
            continue
        if scope.get(first) is target:
            called = first
        elif scope.get(name) is module:
            called = f"{name}.{first}"
        else:
            continue
        for part in rest:
            target = getattr(target, part, None)
        if callable(target):
            return f"; call it as {'.'.join([called, *rest])}{_plain(target)}"
    return ""


def _plain(function: Any) -> str:
    """The parameters without their types and without self."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
