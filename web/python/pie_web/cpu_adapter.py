"""The cpu device's module in this worker: a `CpuModule` over engine/cpu.ts.

A call blocks the worker for its length. So calls wait in a queue that is worked off in tasks of their own, one a read-back: what the
engine has answered leaves first, and the turns of inferlets pass beside the step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from pyodide.ffi import JsException

from pie_core.device.cpu_module import fault_text
from pie_core.device.protocol import Data, DeviceError, DeviceLost, DeviceOutOfMemory
from pie_web.js_bytes import JsBytes
from pie_web.turns import Turns


class _Read(NamedTuple):
    """A read-back that waits in the queue."""

    address: int
    size: int
    future: asyncio.Future[bytes]


class PageCpuModule:
    """`kernels` is a CpuKernels."""

    def __init__(self, kernels: Any, turns: Turns) -> None:
        self._kernels = kernels
        self._turns = turns
        self._queue: deque[_Read | Callable[[], None]] = deque()
        self._scheduled = False
        self._call = kernels.call
        self._window = kernels.window
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
        elif self._queue:
            self._queue.append(partial(self._copy_in, address, bytes(data)))
        else:
            self._copy_in(address, data if isinstance(data, (bytes, bytearray, memoryview)) else bytes(data))

    def call(self, export: str, *arguments: int) -> None:
        """Run an export; a result other than 0 is an error."""
        if self._usable():
            self._enqueue(partial(self._run_export, export, arguments))

    def read(self, address: int, size: int) -> Awaitable[bytes]:
        """Bytes of linear memory behind everything before."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._usable()  # a failed module answers too: with its error
        self._enqueue(_Read(address, size, future))
        return future

    def close(self) -> None:
        """Finish what is enqueued, then let go of the module and its memory."""
        self._finish()
        self._closed = True
        self._kernels = self._call = self._window = None

    # --- the queue

    def _enqueue(self, work: _Read | Callable[[], None]) -> None:
        self._queue.append(work)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        self._turns.alone(self._step)

    def _step(self) -> None:
        """Work until the next read was answered: between steps, messages are served."""
        self._scheduled = False
        while self._queue and not self._next():
            pass
        if self._queue:
            self._schedule()

    def _finish(self) -> None:
        """Work until nothing is left."""
        while self._queue:
            self._next()

    def _next(self) -> bool:
        """Do the first piece of work; whether it was a read."""
        work = self._queue.popleft()
        if isinstance(work, _Read):
            self._answer(work)
            return True
        if self._error is None:
            work()
        return False

    def _run_export(self, export: str, arguments: tuple[int, ...]) -> None:
        try:
            code = self._call(export, *arguments)
        except JsException as error:
            self._error = DeviceLost(f"the cpu device stopped in {export}: {error.message}")
            return
        if code:
            self._error = DeviceError(fault_text(export, int(code)))

    def _copy_in(self, address: int, data: bytes | bytearray | memoryview) -> None:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self._window(address, size).assign(data)

    def _answer(self, read: _Read) -> None:
        if self._error is None:
            try:
                data = self._window(read.address, read.size).to_bytes()
            except JsException as error:
                self._error = DeviceError(f"a read failed: {error.message}")
        if read.future.done():  # cancelled by its reader
            return
        if self._error is None:
            read.future.set_result(data)
        else:
            read.future.set_exception(type(self._error)(*self._error.args))  # one object a reader: tracebacks must not pile up

    def _usable(self) -> bool:
        if self._closed:
            raise DeviceLost("the cpu device is closed")
        return self._error is None
