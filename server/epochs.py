"""Interrupts WebAssembly: while guests run, each is asked every few milliseconds whether it may go on.

wasmtime's epochs count wall time; asking a callback in the guest's own thread lets the answer depend on CPU time instead, so a
guest that the operating system does not schedule is not punished.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from wasmtime import Engine, Store
from wasmtime import _ffi as ffi  # the public API has no epoch callback; wasmtime's version is pinned

TICK_S = 0.01
_IDLE_TICKS = 50  # ticks without any running guest after which the ticker blocks
_CONTINUE = 0  # WASMTIME_UPDATE_DEADLINE_CONTINUE
_here = threading.local()  # .check: what the guest running in this thread is asked


class EpochTicker:
    """Advances the epoch of `engine` while guests run. Call `guarded` around each call into a guest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._tick, name="epochs", daemon=True)
        self._thread.start()

    def guarded(self, store: Store, check: Callable[[], str | None], call: Callable[[], Any]) -> Any:
        """`call()` in this thread; while it runs, a sentence returned by `check` traps the guest of `store`. `check` must not raise."""
        _here.check = check
        with self._lock:
            self._running += 1
        if not self._wake.is_set():
            self._wake.set()
        try:
            store.set_epoch_deadline(1)
            return call()
        finally:
            with self._lock:
                self._running -= 1
            _here.check = None

    def close(self) -> None:
        """End the ticker's thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _tick(self) -> None:
        idle = 0
        while not self._closed:
            time.sleep(TICK_S)
            if self._running:
                idle = 0
                self._engine.increment_epoch()
            else:
                idle += 1
                if idle > _IDLE_TICKS:
                    idle = 0
                    self._wake.clear()
                    if not self._running and not self._closed:
                        self._wake.wait()


def watch(store: Store) -> None:
    """Make guests of `store` ask the `check` of `EpochTicker.guarded` at each tick."""
    ffi.wasmtime_store_epoch_deadline_callback(store.ptr(), _at_epoch, None, _NO_FINALIZER)


@ctypes.CFUNCTYPE(  # type: ignore[untyped-decorator]
    ctypes.c_size_t,
    ctypes.POINTER(ffi.wasmtime_context_t),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ffi.wasmtime_update_deadline_kind_t),
)
def _at_epoch(_context: Any, _data: Any, delta: Any, kind: Any) -> int:
    check = getattr(_here, "check", None)
    reason = check() if check is not None else None
    if reason is not None:
        error = ffi.wasmtime_error_new(reason.encode())
        return ctypes.addressof(error.contents)  # wasmtime takes ownership; `cast` would leave a cycle behind
    delta[0] = 1
    kind[0] = _CONTINUE
    return 0


_NO_FINALIZER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(0)  # a null pointer
