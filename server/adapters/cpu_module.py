"""Runs the cpu device's WebAssembly module in wasmtime, on one thread of its own behind an ordered queue."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from queue import SimpleQueue
from typing import Any, TypeVar

from wasmtime import Config, Engine, Func, Instance, Memory, Module, Store, Trap, WasmtimeError

from pie_core.device.cpu import MEMORY_LIMIT, CpuDevice
from pie_core.device.cpu_module import fault_text
from pie_core.device.protocol import Data, DeviceError, DeviceLost, DeviceOutOfMemory
from pie_server.build.cpu_module import cpu_module
from pie_server.logs import fault, log

PAGE_BYTES = 1 << 16
# Smaller writes are copied at the call; for larger ones the caller waits while the thread takes them straight from its memory.
COPIED_WRITE_BYTES = 1 << 16

# Work waits until somebody reads, at most so many pieces: a step is then one turn of the thread, and its plans are one call. Each call
# gives the interpreter's lock away and must get it back, from an event loop that has use for it.
OPEN_WORK = 64
PLAN_CALLS = 16  # MAX_PLAN_CALLS of kernels_wasm/plan.c

Work = Callable[["_Wasm"], None]
PlanCall = tuple[int, ...]  # arguments of run_plan
T = TypeVar("T")


def open_cpu_device(memory_limit: int = MEMORY_LIMIT) -> CpuDevice:
    """The cpu device on this machine; builds the module when needed (seconds, once). Raises BuildError and DeviceError."""
    return CpuDevice(WasmtimeCpuModule(cpu_module().read_bytes()), memory_limit)


@lru_cache(maxsize=1)
def _compile(code: bytes) -> tuple[Engine, Module]:
    """Machine code of the module; about 50 ms, once a process."""
    config = Config()
    config.wasm_simd = True
    # A reservation of the whole address space: bounds checks cost nothing and growing never moves memory.
    config.memory_reservation = 1 << 32
    engine = Engine(config)
    return engine, Module(engine, code)


class _Wasm:
    """The instance; only the module's thread touches it."""

    def __init__(self, code: bytes) -> None:
        engine, module = _compile(code)
        self.store = Store(engine)
        self.exports = Instance(self.store, module, []).exports(self.store)
        memory = self.exports["memory"]
        assert isinstance(memory, Memory)  # device.h exports it
        self.memory = memory
        self.functions: dict[str, Func] = {}
        self.view = memoryview(b"")
        self.refresh()
        self.plan_calls_at = self.call("plan_calls_at", ())

    def refresh(self) -> None:
        """Look at linear memory again after it grew."""
        size = self.memory.data_len(self.store)
        base = ctypes.addressof(self.memory.data_ptr(self.store).contents)
        self.view = memoryview((ctypes.c_ubyte * size).from_address(base)).cast("B")

    def grow(self, end: int) -> None:
        missing = end - len(self.view)
        if missing <= 0:
            return
        try:
            self.memory.grow(self.store, -(-missing // PAGE_BYTES))
        except WasmtimeError as error:
            raise DeviceOutOfMemory(f"the cpu device has {len(self.view)} bytes of memory and the system refused {missing} more") from error
        self.refresh()

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        self.view[address : address + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        if address + size > len(self.view):  # a slice would be short without a word
            raise DeviceError(f"a read of {size} bytes at {address} leaves the module's memory of {len(self.view)} bytes")
        return bytes(self.view[address : address + size])

    def run_plans(self, calls: list[PlanCall]) -> int:
        """Up to PLAN_CALLS calls of run_plan as one; its result, or the first that is not 0."""
        if len(calls) == 1:
            return self.call("run_plan", calls[0])
        words = [word for arguments in calls for word in arguments]
        self.write(self.plan_calls_at, struct.pack(f"<{len(words)}I", *words))
        return self.call("run_plans", (len(calls),))

    def call(self, export: str, arguments: tuple[int, ...]) -> int:
        function = self.functions.get(export)
        if function is None:
            found = self.exports[export]
            assert isinstance(found, Func)  # plan.c exports functions only
            function = self.functions[export] = found
        # wasmtime takes i32 as signed
        result = function(self.store, *[a - (1 << 32) if a >> 31 else a for a in arguments])
        return int(result) & 0xFFFFFFFF


class WasmtimeCpuModule:
    """The `CpuModule` of the server (see pie_core/device/cpu_module.py for what each method promises)."""

    def __init__(self, code: bytes) -> None:
        self._queue: SimpleQueue[list[Work | list[PlanCall]] | None] = SimpleQueue()
        self._open: list[Work | list[PlanCall]] = []  # not handed to the thread yet
        self._error: DeviceError | None = None  # set once, by the thread
        self._closed = False
        self._lock = threading.Lock()  # close against enqueue
        self._heap_base = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(code, ready), name="cpu-device", daemon=True)
        self._thread.start()
        ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def description(self) -> str:
        """Engine and version."""
        return f"WebAssembly SIMD kernels in wasmtime {metadata.version('wasmtime')}, one thread"

    @property
    def heap_base(self) -> int:
        """First byte that the module does not use itself."""
        return self._heap_base

    # Enqueueing

    def _put(self, work: Work, *, now: bool = True) -> None:
        """Enqueue; `now`: the thread begins with all that is open."""
        with self._lock:
            if self._closed:
                raise DeviceLost("the cpu device is closed")
            self._open.append(work)
            if now or len(self._open) >= OPEN_WORK:
                self._hand_over()

    def _put_plan(self, arguments: PlanCall) -> None:
        """Enqueue a call of run_plan, in one with those right before it."""
        with self._lock:
            if self._closed:
                raise DeviceLost("the cpu device is closed")
            last = self._open[-1] if self._open else None
            if isinstance(last, list) and len(last) < PLAN_CALLS:
                last.append(arguments)
            else:
                self._open.append([arguments])
                if len(self._open) >= OPEN_WORK:
                    self._hand_over()

    def _hand_over(self) -> None:
        if self._open:
            work, self._open = self._open, []
            self._queue.put(work)

    def grow(self, end: int) -> None:
        """Have at least `end` bytes of linear memory."""
        self._put(lambda wasm: self._guard("growing memory", wasm.grow, end))

    def write(self, address: int, data: Data) -> None:
        """Copy into linear memory."""
        flat = memoryview(data).cast("B") if isinstance(data, bytearray | memoryview) else bytes(data)
        if isinstance(flat, bytes) or len(flat) <= COPIED_WRITE_BYTES:
            kept = bytes(flat)
            self._put(lambda wasm: self._guard("a write", wasm.write, address, kept), now=False)
            return
        done = threading.Event()

        def work(wasm: _Wasm) -> None:
            try:
                self._guard("a write", wasm.write, address, flat)
            finally:
                done.set()

        self._put(work)
        done.wait()

    def call(self, export: str, *arguments: int) -> None:
        """Run an export; a result other than 0 is an error."""
        if export == "run_plan":
            self._put_plan(arguments)
        else:
            self._put(lambda wasm: self._guard(export, lambda: _check(export, wasm.call(export, arguments))))

    def read(self, address: int, size: int) -> Awaitable[bytes]:
        """Bytes of linear memory, delivered to the running event loop."""
        return self._answer("a read", lambda wasm: wasm.read(address, size))

    def thread_time(self) -> Awaitable[float]:
        """CPU seconds that the module's thread has used for everything enqueued before this call; for benches."""
        return self._answer("a clock", lambda _: time.thread_time())

    def _answer(self, what: str, question: Callable[[_Wasm], T]) -> Awaitable[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work(wasm: _Wasm) -> None:
            found: list[T] = []
            self._guard(what, lambda: found.append(question(wasm)))
            error = self._error
            if error is not None and not isinstance(error, DeviceLost):  # told by its own type once: nothing works from here on
                self._error = DeviceLost(f"the cpu device stopped: {error}")
            with suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, found, error)

        self._put(work)
        return future

    def close(self) -> None:
        """Finish what is enqueued, end the thread and join it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._hand_over()
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread

    def _guard(self, what: str, function: Callable[..., None], *arguments: Any) -> None:
        """Run unless something failed before; the first failure ends the device, since nothing after it can be trusted."""
        if self._error is not None:
            return
        try:
            function(*arguments)
        except DeviceOutOfMemory as error:
            self._error = error
        except DeviceError as error:
            self._error = DeviceLost(f"the cpu device stopped in {what}: {error}")
        except (Trap, WasmtimeError) as error:
            self._error = DeviceLost(f"the cpu device stopped in {what}: {_reason(error)}")
        except Exception as error:  # a bug here must reach the readers, not end the thread that they wait for
            log("cpu_device_fault", logging.ERROR, **fault(error))
            self._error = DeviceLost(f"the cpu device stopped in {what}: {type(error).__name__}: {error}")

    def _serve(self, code: bytes, ready: threading.Event) -> None:
        try:
            wasm = _Wasm(code)
            self._heap_base = wasm.call("heap_base", ())
        except (WasmtimeError, KeyError) as error:
            self._error = DeviceError(f"wasmtime cannot run the cpu module: {_reason(error)}")
            return
        finally:
            ready.set()
        get = self._queue.get
        while (works := get()) is not None:
            for work in works:
                if isinstance(work, list):
                    self._guard("run_plan", self._run_plans, wasm, work)
                else:
                    work(wasm)

    @staticmethod
    def _run_plans(wasm: _Wasm, calls: list[PlanCall]) -> None:
        _check("run_plan", wasm.run_plans(calls))


def _check(export: str, code: int) -> None:
    if code:
        raise DeviceError(fault_text(export, code))


def _settle(future: asyncio.Future[T], found: list[T], error: DeviceError | None) -> None:
    if future.done():  # cancelled by its reader
        return
    if found:
        future.set_result(found[0])
    elif error is not None:
        future.set_exception(type(error)(*error.args))  # one object a reader: tracebacks must not pile up


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
