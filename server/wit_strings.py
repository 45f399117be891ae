"""Component functions of strings without wasmtime-py's type reflection, which would cost more than the calls themselves.

Uses the C API under wasmtime-py (its version is pinned); tests hold these calls against leaks and non-ASCII text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from wasmtime import Store, WasmtimeError
from wasmtime import _ffi as ffi
from wasmtime.component import Func, LinkerInstance

from pie_core.host.ops import MAX_CALL

_MOST = 4 * MAX_CALL + 4  # bytes: more than MAX_CALL characters, whatever they are
_STRING = ffi.WASMTIME_COMPONENT_STRING.value
_val = ffi.wasmtime_component_val_t
_byref, _memmove, _string_at = ctypes.byref, ctypes.memmove, ctypes.string_at
_new_bytes, _delete_bytes = ffi.wasm_byte_vec_new_uninitialized, ffi.wasm_byte_vec_delete
_func_call, _delete_val = ffi.wasmtime_component_func_call, ffi.wasmtime_component_val_delete


def call_string(store: Store, func: Func, text: str) -> str:
    """`func(text)` for an export `func(string) -> string`. Raises WasmtimeError when the guest traps."""
    argument, result = _val(), _val()
    _fill(argument, text)
    try:
        error = _func_call(_byref(func._func), store._context(), _byref(argument), 1, _byref(result), 1)
        if error:
            raise WasmtimeError._from_ptr(error)
        answer = _text(result)
        _delete_bytes(_byref(result.of.string))
        return answer
    finally:
        _delete_val(_byref(argument))


def add_string_func(instance: LinkerInstance, name: str, function: Callable[[str, str], str]) -> None:
    """Define the import `name: func(string, string) -> string` on `instance`. `function` must not raise."""
    data = name.encode()
    buffer = ctypes.create_string_buffer(data)

    @ffi.wasmtime_component_func_callback_t  # type: ignore[untyped-decorator]
    def callback(_data: Any, _context: Any, _type: Any, args: Any, _nargs: int, results: Any, _nresults: int) -> int:
        _fill(results[0], function(_text(args[0]), _text(args[1])))
        return 0

    _KEPT.append(callback)  # wasmtime holds only its address
    error = ffi.wasmtime_component_linker_instance_add_func(instance.ptr(), buffer, len(data), callback, None, _NO_FINALIZER)
    if error:
        raise WasmtimeError._from_ptr(error)


def _text(value: Any) -> str:
    """The text, cut off where it is too long for any call in any case: decoded, one wide character makes it four times its bytes."""
    string = value.of.string
    return _string_at(string.data, min(string.size, _MOST)).decode("utf-8", "strict" if string.size <= _MOST else "ignore")


def _fill(value: Any, text: str) -> None:
    """Make `value` own a copy of `text`; a lone surrogate, which a WIT string cannot hold, becomes "?"."""
    data = text.encode("utf-8", "replace")
    value.kind = _STRING
    string = value.of.string
    _new_bytes(_byref(string), len(data))
    _memmove(string.data, data, len(data))


_KEPT: list[Any] = []
_NO_FINALIZER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(0)  # a null pointer
