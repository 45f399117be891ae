"""The cpu device's module in this worker: a `CpuModule` over engine/cpu.ts.

A call blocks the worker for its length. So calls wait in lists that are worked off in tasks of their own, one a read-back: what the
engine has answered leaves first, and the turns of inferlets pass beside the step. A list crosses to JavaScript as one call: numbers in
an array, bytes by their addresses in Python's memory, since each object that crosses costs as much as a hundred lines of Python.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable
from typing import Any, Final

import pyodide_js  # type: ignore[import-not-found]  # of Pyodide alone, without stubs
from pyodide.ffi import JsException

from pie_core.device.cpu_module import fault_text
from pie_core.device.protocol import Data, DeviceError, DeviceLost, DeviceOutOfMemory
from pie_web.js_bytes import JsBytes
from pie_web.turns import Turns

CALL: Final = 0  # as in engine/cpu.ts
WRITE: Final = 1
READ: Final = 2


class _List:
    """Work up to a read-back. `words`: what to do; `kept`: bytes that are written from; `into`: where the read's bytes go."""

    __slots__ = ("future", "into", "kept", "words")

    def __init__(self) -> None:
        self.words: array[int] = array("I")
        self.kept: list[array[int]] = []
        self.into: array[int] = array("B")
        self.future: asyncio.Future[bytes] | None = None


class PageCpuModule:
    """`kernels` is a CpuKernels."""

    def __init__(self, kernels: Any, turns: Turns) -> None:
        self._kernels = kernels
        kernels.useHeap(pyodide_js._module)
        self._turns = turns
        self._lists: deque[_List] = deque()
        self._last: _List | None = None  # the one that is not closed by a read
        self._scheduled = False
        self._work = kernels.work
        self._exports: dict[str, int] = {}
        self._error: DeviceError | None = None  # the first; nothing after it can be trusted
        self._closed = False

    @property
    def description(self) -> str:
        """What runs it."""
        return "WebAssembly SIMD kernels in this browser, one thread"

    @property
    def heap_base(self) -> int:
        """First byte that the module does not use itself."""
        return int(self._kernels.heapBase)

    @property
    def memory_bytes(self) -> int:
        """Bytes of linear memory."""
        return 0 if self._closed else int(self._kernels.size)

    @property
    def busy_ms(self) -> float:
        """Milliseconds spent in calls."""
        return 0.0 if self._closed else float(self._kernels.busyMs)

    def grow(self, end: int) -> None:
        """Have at least `end` bytes of linear memory."""
        if self._usable() and not self._kernels.grow(end):
            size = int(self._kernels.size)
            self._error = DeviceOutOfMemory(f"the cpu device has {size} bytes of memory and the browser refused {end - size} more")

    def write(self, address: int, data: Data) -> None:
        """Copy into linear memory."""
        if not self._usable():
            return
        if isinstance(data, JsBytes):  # weights, in pieces that are used again: the queue would only hold copies
            self._finish()
            self._kernels.write(address, data.array)
            return
        copy: array[int] = array("B")
        copy.frombytes(data if isinstance(data, (bytes, bytearray, memoryview)) else bytes(data))
        place, size = copy.buffer_info()
        work = self._open()
        work.kept.append(copy)
        work.words.extend((WRITE, address, size, place))

    def call(self, export: str, *arguments: int) -> None:
        """Run an export; a result other than 0 is an error."""
        if self._usable():
            index = self._exports.get(export)
            if index is None:
                index = self._exports[export] = int(self._kernels.indexOf(export))
                if index < 0:
                    raise DeviceError(f"the cpu module has no export {export}")
            self._open().words.extend((CALL, index, len(arguments), *arguments))

    def read(self, address: int, size: int) -> Awaitable[bytes]:
        """Bytes of linear memory behind everything before."""
        future: asyncio.Future[bytes] = self._turns.loop.create_future()
        self._usable()  # a failed module answers too: with its error
        work = self._open()
        work.future = future
        if size:
            work.into = array("B", bytes(size))
            work.words.extend((READ, address, size, work.into.buffer_info()[0]))
        self._last = None
        return future

    def close(self) -> None:
        """Finish what is enqueued, then let go of the module and its memory."""
        self._finish()
        self._closed = True
        self._kernels = self._work = None

    # --- the lists

    def _open(self) -> _List:
        """The list that takes more work."""
        work = self._last
        if work is None:
            work = self._last = _List()
            self._lists.append(work)
            if not self._scheduled:
                self._schedule()
        return work

    def _schedule(self) -> None:
        self._scheduled = True
        self._turns.alone(self._step)

    def _step(self) -> None:
        """Work until the next read was answered: between steps, messages are served."""
        self._scheduled = False
        if self._lists:
            self._next()
        if self._lists:
            self._schedule()

    def _finish(self) -> None:
        """Work until nothing is left."""
        while self._lists:
            self._next()

    def _next(self) -> None:
        work = self._lists.popleft()
        if work is self._last:
            self._last = None
        if self._error is None and work.words:
            self._error = self._run(work.words)
        future = work.future
        if future is None or future.done():  # nobody reads, or the reader was cancelled
            return
        if self._error is None:
            future.set_result(work.into.tobytes())
        else:
            future.set_exception(type(self._error)(*self._error.args))  # one object a reader: tracebacks must not pile up

    def _run(self, words: array[int]) -> DeviceError | None:
        try:
            code = self._work(*words.buffer_info())
        except JsException as error:
            if error.name == "OutsideMemory":
                return DeviceError(f"a read or write failed: {error.message}")
            return DeviceLost(f"the cpu device stopped in {self._kernels.lastExport}: {error.message}")
        return DeviceError(fault_text(str(self._kernels.lastExport), int(code))) if code else None

    def _usable(self) -> bool:
        if self._closed:
            raise DeviceLost("the cpu device is closed")
        return self._error is None
