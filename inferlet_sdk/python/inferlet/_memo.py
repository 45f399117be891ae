"""Recognises an epilogue that would trace to the same program again, so that a loop traces once and not once a token.

A function qualifies only when its trace provably depends on nothing but the key: its bytecode has no stores outside its locals, no
nested functions, no imports and no loops, and all it can reach are eta's functions, a few pure builtins, immutable scalars, and channels
(by identity). Everything else is traced anew each time.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from pie_core.eta import FUNCTIONS, intrinsics

from ._channel import Channel

_OPCODES = frozenset(
    [
        "RESUME",
        "NOP",
        "CACHE",
        "EXTENDED_ARG",
        "NOT_TAKEN",
        "COPY_FREE_VARS",
        "PUSH_NULL",
        "POP_TOP",
        "COPY",
        "SWAP",
        "LOAD_CONST",
        "LOAD_CONST_IMMORTAL",
        "LOAD_SMALL_INT",
        "LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_LOAD_FAST",
        "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
        "STORE_FAST",
        "STORE_FAST_LOAD_FAST",
        "STORE_FAST_STORE_FAST",
        "LOAD_DEREF",
        "LOAD_GLOBAL",
        "LOAD_ATTR",
        "LOAD_METHOD",
        "PRECALL",
        "KW_NAMES",
        "CALL",
        "CALL_KW",
        "BINARY_OP",
        "COMPARE_OP",
        "IS_OP",
        "UNARY_NEGATIVE",
        "UNARY_NOT",
        "UNARY_INVERT",
        "TO_BOOL",
        "BUILD_TUPLE",
        "RETURN_VALUE",
        "RETURN_CONST",
        "JUMP_FORWARD",
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_IF_TRUE",
        "POP_JUMP_IF_NONE",
        "POP_JUMP_IF_NOT_NONE",
        "POP_JUMP_FORWARD_IF_FALSE",
        "POP_JUMP_FORWARD_IF_TRUE",
    ]
)
_ATTRIBUTES = frozenset({"output", "take", "read", "put", "cast", "dtype", "shape"})
_PURE = frozenset(map(id, [*FUNCTIONS.values(), intrinsics, abs, bool, float, int, len, max, min, round]))
_SCALARS = frozenset({int, float, bool, str, type(None)})
_BUILTINS = vars(builtins)
_MOST = 64  # entries; a program that makes endless different epilogues must not grow

Key = tuple[Any, ...]
_plans: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}  # id of a code object -> (kept alive, the globals it loads or None)
_seen_once: dict[int, CodeType] = {}
_results: dict[Key, tuple[Any, tuple[Any, ...]]] = {}  # the second part keeps alive what the key names by id


def lookup(fn: Callable[[], Any]) -> tuple[Any, Callable[[Any], None] | None]:
    """(the result stored for an equal function or None, how to store one or None where that is not sound)."""
    if type(fn) is not FunctionType:
        return None, None
    code = fn.__code__
    plan = _plans.get(id(code))
    if plan is None:
        _first_time(code)
        return None, None
    names = plan[1]
    if names is None:
        return None, None
    values = list(fn.__defaults__ or ())
    scope = fn.__globals__
    for name in names:
        if name in scope:
            values.append(scope[name])
        elif name in _BUILTINS:
            values.append(_BUILTINS[name])
        else:
            return None, None
    try:
        values.extend([cell.cell_contents for cell in fn.__closure__ or ()])
    except ValueError:  # a variable that has no value yet
        return None, None
    parts: list[Any] = [id(code)]
    for value in values:
        kind = type(value)
        if kind in _SCALARS:
            parts.append(kind)
            parts.append(value if value or kind is not float else str(value))  # 0.0 equals -0.0
        elif kind is Channel or id(value) in _PURE:
            parts.append(id(value))
        else:
            return None, None
    key = tuple(parts)
    found = _results.get(key)
    if found is not None:
        return found[0], None

    def store(result: Any) -> None:
        if len(_results) >= _MOST:
            _results.clear()
        _results[key] = (result, tuple(values))

    return None, store


def _first_time(code: CodeType) -> None:
    """Look into the bytecode when a code object comes a second time: most functions that come once never come again."""
    if id(code) in _seen_once:
        if len(_plans) >= _MOST:
            _plans.clear()
            _results.clear()
        _plans[id(code)] = (code, _globals_of(code))
        del _seen_once[id(code)]
    else:
        if len(_seen_once) >= _MOST:
            _seen_once.clear()
        _seen_once[id(code)] = code


def _globals_of(code: CodeType) -> tuple[str, ...] | None:
    """The global names that `code` loads, when nothing else from outside can influence it; else None."""
    if code.co_flags & ~0x13 or code.co_kwonlyargcount:  # anything but optimised, new locals, nested: generators, coroutines, *args
        return None
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _OPCODES:
            return None
        if instruction.opname == "LOAD_GLOBAL":
            names[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval not in _ATTRIBUTES:
            return None
    return tuple(names)
