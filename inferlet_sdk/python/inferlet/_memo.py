"""Recognises an epilogue that would trace to the same program again, so that a loop traces once and not once a token.

The rule. A function qualifies when its trace provably depends on nothing but its key. Its bytecode, and that of every helper it can reach,
stores nothing outside its locals, makes no functions and catches nothing; what it loads from outside (globals, closure cells, defaults,
and attributes of modules such as `model.vocab`) are eta's functions, pure functions of `math` and builtins, immutable scalars and tuples
of them, helper functions that qualify themselves, and channels. The key holds the identity of each code object and, read anew at every
look-up, each of those values: a changed global, closure constant or helper is another key; channels count by identity. Anything else (a
list, an object, a call of `random`) means that the function is traced anew each time.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pie_core.eta import FUNCTIONS, Tensor, intrinsics

from ._channel import Channel

_OPCODES = frozenset(  # one a line would be 70 lines
    """
    RESUME NOP CACHE EXTENDED_ARG NOT_TAKEN COPY_FREE_VARS PUSH_NULL POP_TOP COPY SWAP PRECALL KW_NAMES CALL CALL_KW
    LOAD_CONST LOAD_CONST_IMMORTAL LOAD_SMALL_INT LOAD_DEREF LOAD_GLOBAL LOAD_ATTR LOAD_METHOD
    LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_AND_CLEAR LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW
    STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_FAST_MAYBE_NULL DELETE_FAST
    BINARY_OP BINARY_SUBSCR BINARY_SLICE COMPARE_OP IS_OP CONTAINS_OP UNARY_NEGATIVE UNARY_NOT UNARY_INVERT TO_BOOL
    BUILD_TUPLE BUILD_LIST BUILD_SLICE LIST_APPEND LIST_EXTEND UNPACK_SEQUENCE RETURN_VALUE RETURN_CONST
    GET_ITER FOR_ITER END_FOR POP_ITER JUMP_BACKWARD JUMP_FORWARD
    POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE
    """.split()  # noqa: SIM905
)
_TRANSPARENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})  # may stand between a load and the attribute of what it loaded
# On a tensor or channel; whatever else a qualifying function can hold is immutable or its own.
_METHODS = {name for name in vars(Tensor) if name[0] != "_" and name != "trace"}
_INTRINSICS = {name for name in vars(intrinsics) if getattr(vars(intrinsics)[name], "__module__", "") == intrinsics.__name__}
_ATTRIBUTES = frozenset({"take", "read", "put", "dtype", "shape"} | _METHODS | _INTRINSICS)
_PURE_BUILTINS = (abs, bool, divmod, enumerate, float, int, len, list, max, min, pow, range, reversed, round, sum, tuple, zip)
_PURE_KEPT = [*FUNCTIONS.values(), intrinsics, *_PURE_BUILTINS, *(f for name, f in vars(math).items() if callable(f) and name[0] != "_")]
_PURE = frozenset(map(id, _PURE_KEPT))
_SCALARS = frozenset({int, float, bool, str, type(None)})
_BUILTINS = vars(builtins)
_MOST = 64  # entries; a program that makes endless different epilogues must not grow
_MOST_NESTED = 8  # helpers that call helpers

Key = tuple[Any, ...]
Path = tuple[str, ...]  # a global or closure variable, and the attributes loaded from it


class _Plan:
    """What a code object loads from outside, by name."""

    __slots__ = ("cells", "code", "names")

    def __init__(self, code: CodeType, names: tuple[Path, ...], cells: dict[str, list[Path]]) -> None:
        self.code = code  # kept alive: it is known by its id
        self.names = names
        self.cells = cells


class _Unknown(Exception):
    """The function reaches something that a key cannot hold."""


_plans: dict[int, tuple[CodeType, _Plan | None]] = {}  # by id of a code object; None: it does not qualify
_seen_once: dict[int, CodeType] = {}
_results: dict[Key, tuple[Any, list[Any]]] = {}  # the second part keeps alive what the key names by id


def forget() -> None:
    """Let go of all results, and of the channels in them."""
    _results.clear()


def lookup(fn: Callable[[], Any], rows: int | None = None) -> tuple[Any, Callable[[Any], None] | None]:
    """(the result stored for an equal function and number of read-outs or None, how to store one or None where that is not sound)."""
    if type(fn) is not FunctionType:
        return None, None
    code = fn.__code__
    if id(code) not in _plans and not _second_time(code):
        return None, None
    parts: list[Any] = [rows]
    kept: list[Any] = []
    try:
        _add_function(fn, parts, kept, 0)
    except _Unknown:
        return None, None
    key = tuple(parts)
    found = _results.get(key)
    if found is not None:
        return found[0], None

    def store(result: Any) -> None:
        if len(_results) >= _MOST:
            _results.clear()
        _results[key] = (result, kept)

    return None, store


def _add_function(fn: FunctionType, parts: list[Any], kept: list[Any], depth: int) -> None:
    """Append to a key all that `fn` can depend on. Raises _Unknown."""
    code = fn.__code__
    entry = _plans.get(id(code)) or _plan(code)
    plan = entry[1]
    if plan is None or depth > _MOST_NESTED:
        raise _Unknown
    parts.append(id(code))
    kept.append(code)
    if fn.__defaults__:
        for value in fn.__defaults__:
            _add(value, parts, kept, depth)
    if fn.__kwdefaults__:
        for name, value in fn.__kwdefaults__.items():
            parts.append(name)
            _add(value, parts, kept, depth)
    scope = fn.__globals__
    for path in plan.names:
        name = path[0]
        if name in scope:
            value = scope[name]
        elif name in _BUILTINS:
            value = _BUILTINS[name]
        else:
            raise _Unknown
        _add_path(value, path, parts, kept, depth)
    if fn.__closure__:
        for name, cell in zip(code.co_freevars, fn.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                raise _Unknown from None
            for path in plan.cells.get(name, ()):
                _add_path(value, path, parts, kept, depth)


def _add_path(value: Any, path: Path, parts: list[Any], kept: list[Any], depth: int) -> None:
    """The value that `path` leads to: through modules, whose attributes are read now; on anything else only harmless names."""
    for k in range(1, len(path)):
        if type(value) is ModuleType and id(value) not in _PURE:
            value = vars(value).get(path[k], _Unknown)
        elif _ATTRIBUTES.issuperset(path[k:]):
            break
        else:
            raise _Unknown
    _add(value, parts, kept, depth)


def _add(value: Any, parts: list[Any], kept: list[Any], depth: int) -> None:
    kind = type(value)
    if kind in _SCALARS:
        parts.append(kind)
        parts.append(value if value or kind is not float else str(value))  # 0.0 equals -0.0
    elif kind is Channel or id(value) in _PURE:
        parts.append(id(value))
        kept.append(value)
    elif kind is tuple:
        parts.append(tuple)
        parts.append(len(value))
        for item in value:
            _add(item, parts, kept, depth)
    elif kind is FunctionType:
        parts.append(FunctionType)
        _add_function(value, parts, kept, depth + 1)
    else:
        raise _Unknown


def _second_time(code: CodeType) -> bool:
    """Whether a code object was seen before, and is worth looking into: most functions that come once never come again."""
    if _seen_once.pop(id(code), None) is not None:
        return True
    if len(_seen_once) >= _MOST:
        _seen_once.clear()
    _seen_once[id(code)] = code
    return False


def _plan(code: CodeType) -> tuple[CodeType, _Plan | None]:
    if len(_plans) >= _MOST:
        _plans.clear()
        _results.clear()
    entry = _plans[id(code)] = (code, _analyse(code))
    return entry


def _analyse(code: CodeType) -> _Plan | None:
    """What `code` loads from outside when nothing else can influence it; else None."""
    if code.co_flags & ~0x13 or code.co_cellvars:  # anything but optimised, new locals, nested: generators, coroutines, *args
        return None
    names: dict[Path, None] = {}
    cells: dict[str, list[Path]] = {}
    path: list[str] = []
    opened = ""

    def close() -> None:
        if opened == "LOAD_GLOBAL":
            names[tuple(path)] = None
        elif opened:
            cells.setdefault(path[0], []).append(tuple(path))

    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name not in _OPCODES:
            return None
        joins = instruction.is_jump_target  # another value may be on the stack here
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            if opened and not joins:
                path.append(instruction.argval)
                continue
            if instruction.argval not in _ATTRIBUTES:
                return None
        elif name in _TRANSPARENT and not joins:
            continue
        close()
        opened = ""
        if name in ("LOAD_GLOBAL", "LOAD_DEREF"):
            path, opened = [instruction.argval], name
    close()
    return _Plan(code, tuple(names), cells)
