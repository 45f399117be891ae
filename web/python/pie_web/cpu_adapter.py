"""The cpu device's module in this worker: a `CpuModule` over engine/cpu.ts. A call blocks; what is read arrives a task later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from pyodide.ffi import JsException

from pie_core.device.cpu_module import fault_text
from pie_core.device.protocol import Data, DeviceError, DeviceLost, DeviceOutOfMemory
from pie_web.js_bytes import JsBytes


class PageCpuModule:
    """`kernels` is a CpuKernels."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
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
        if isinstance(data, JsBytes):
            self._kernels.write(address, data.array)
        else:
            size = data.nbytes if isinstance(data, memoryview) else len(data)
            self._window(address, size).assign(data)

    def call(self, export: str, *arguments: int) -> None:
        """Run an export; a result other than 0 is an error."""
        if not self._usable():
            return
        try:
            code = self._call(export, *arguments)
        except JsException as error:
            self._error = DeviceLost(f"the cpu device stopped in {export}: {error.message}")
            return
        if code:
            self._error = DeviceError(fault_text(export, int(code)))

    def read(self, address: int, size: int) -> Awaitable[bytes]:
        """Bytes of linear memory as they are now, delivered by a timer: the ports of inferlets are served between steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        data: bytes | None = None
        if self._usable():
            try:
                data = self._window(address, size).to_bytes()
            except JsException as error:
                self._error = DeviceError(f"a read failed: {error.message}")
        loop.call_later(0, self._deliver, future, data)
        return future

    def _deliver(self, future: asyncio.Future[bytes], data: bytes | None) -> None:
        if future.done():  # cancelled by its reader
            return
        if data is not None:
            future.set_result(data)
        else:
            error = self._error or DeviceLost("the cpu device is closed")
            future.set_exception(type(error)(*error.args))  # one object a reader: tracebacks must not pile up

    def _usable(self) -> bool:
        if self._closed:
            raise DeviceLost("the cpu device is closed")
        return self._error is None

    def close(self) -> None:
        """Let go of the module and its memory."""
        self._closed = True
        self._kernels = self._call = self._window = None
