"""Runs inferlets as WebAssembly components in wasmtime: no files, no network, no threads, and budgets on memory, CPU and output."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wasmtime import Config, Engine, Store, WasmtimeError
from wasmtime.component import Func, Linker

from pie_core.host.port import GuestPort
from pie_server.build.cpu_module import cache_root
from pie_server.build.python_component import python_component
from pie_server.compiled import load_component
from pie_server.epochs import EpochTicker, watch
from pie_server.step_pool import StepPool
from pie_server.wasi import add_partial_wasi
from pie_server.wit_strings import add_string_func, call_string

HOST = "pie:abi/host@0.1.0"
GUEST = "pie:abi/guest@0.1.0"
_CONFIG = "epochs, native stack 2 MiB"
STACK_BYTES = 2 << 20


BRIEF_S = 0.002  # CPU time of a step whose posts may wait for its end
_MOST_USED = 8  # guests that may wait to be freed: their memory is still held


class SandboxError(Exception):
    """A guest was ended by the sandbox. The message is all there is to it."""

    def again(self) -> SandboxError:
        """The same error, to be raised: one that a guest keeps must not collect frames, which hold the guest."""
        return type(self)(*self.args)


class CpuBudgetExceeded(SandboxError):
    """The guest used more CPU time than one step, or the whole run, may."""


class MemoryLimitExceeded(SandboxError):
    """The guest needed more memory than it may have."""


class OutputLimitExceeded(SandboxError):
    """One text from the guest to the host is too long."""


class GuestTrap(SandboxError):
    """The guest's code trapped: a forbidden system call, an exhausted stack, a crash."""


class StackLimitExceeded(GuestTrap):
    """Calls or data of the guest are nested too deeply for its stack."""


class GuestClosed(SandboxError):
    """The guest was closed, or ended before, and cannot run any more."""


class Port(Protocol):
    """Answers the guest's host calls, in the guest's thread; must not block."""

    def call(self, op: str, payload: str, /) -> str: ...


@dataclass(frozen=True)
class Limits:
    """Budgets of one guest. CPU seconds are thread time: waiting, or a busy machine, costs a guest nothing."""

    memory_bytes: int = 256 << 20
    step_cpu_s: float = 10.0
    total_cpu_s: float = 120.0
    text_chars: int = 16 << 20  # longest answer of a step, and longest payload of a host call


class Sandbox:
    """One wasmtime engine with the Python component loaded; `open` makes guests. Thread-safe.

    The constructor builds and compiles what the cache lacks (up to half a minute the first time, then about 0.1 s): call it
    off the event loop. `progress` gets a line for each slow stage. Raises BuildError or CompiledCacheError.
    """

    def __init__(
        self,
        component: Path | None = None,
        *,
        limits: Limits | None = None,
        workers: int = 0,
        spares: int = 2,
        cache: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._spares_wanted = spares
        cache = cache or cache_root()
        config = Config()
        config.epoch_interruption = True
        config.max_wasm_stack = STACK_BYTES
        self._engine = Engine(config)
        wasm = component or python_component(cache, progress)
        self._component = load_component(self._engine, _CONFIG, wasm, cache / "compiled", progress)
        self._linker = Linker(self._engine)
        with self._linker.root() as root, root.add_instance(HOST) as host:
            add_string_func(host, "call", _host_call)
        add_partial_wasi(self._linker, self._engine, self._component)
        self._spares: deque[_Machine] = deque()
        self._guests: weakref.WeakSet[GuestInstance] = weakref.WeakSet()
        self._ticker = EpochTicker(self._engine)
        self._pool = StepPool(workers or (os.cpu_count() or 1) + 6, "inferlet")
        self._spare_pool = ThreadPoolExecutor(1, thread_name_prefix="inferlet-spares", initializer=_lower_priority)
        self._used: deque[_Machine] = deque()  # their memory waits to be freed
        self._closed = False

    def open(self, port: Port, limits: Limits | None = None) -> GuestInstance:
        """A fresh guest whose host calls go to `port`. Nothing runs before its `start`."""
        if self._closed:
            raise GuestClosed("the sandbox is closed")
        guest = GuestInstance(self, port, limits or self.limits)
        self._guests.add(guest)
        return guest

    def warm(self) -> None:
        """Make the spare guests now, so that the first request finds one."""
        self._spare_pool.submit(self._refill).result()

    def close(self) -> None:
        """End running guests and release threads and memory."""
        self._closed = True
        for guest in list(self._guests):
            guest.close()
        self._spare_pool.shutdown(wait=True)
        self._pool.close()  # steps that run end at their next tick, steps that wait refuse to begin
        self._ticker.close()
        while self._spares:
            self._spares.pop().store.close()

    def _machine(self) -> _Machine:
        try:
            return self._spares.popleft()
        except IndexError:
            return _Machine(self._engine, self._linker, self._component)

    def _discard(self, machine: _Machine) -> None:
        """Free a used guest's memory: half a millisecond that neither the event loop nor a waiting client should pay."""
        if len(self._used) >= _MOST_USED:
            machine.store.close()
            return
        self._used.append(machine)
        try:
            self._spare_pool.submit(self._free_used)
        except RuntimeError:  # the pool was shut down meanwhile
            self._free_used()

    def _free_used(self) -> None:
        try:
            machine = self._used.popleft()
        except IndexError:  # another thread took it
            return
        machine.store.close()

    def _refill_soon(self) -> None:
        if len(self._spares) < self._spares_wanted and not self._closed:
            try:
                self._spare_pool.submit(self._refill)
            except RuntimeError:  # the pool was shut down meanwhile
                return

    def _refill(self) -> None:
        while len(self._spares) < self._spares_wanted and not self._closed:
            machine = _Machine(self._engine, self._linker, self._component)
            machine.warm_up()
            self._spares.append(machine)


def _lower_priority() -> None:
    """Spares are made when nobody needs the CPU more urgently; threads have their own priority on Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class _Machine:
    """A store with one instance of the component; used by one guest, once."""

    __slots__ = ("resume", "start", "store")

    def __init__(self, engine: Engine, linker: Linker, component: Any) -> None:
        self.store = Store(engine)
        self.store.set_epoch_deadline(1 << 40)  # instantiation runs no code of the author
        instance = linker.instantiate(self.store, component)
        guest = instance.get_export_index(self.store, GUEST)
        self.start = _export(self.store, instance, "start", guest)
        self.resume = _export(self.store, instance, "resume", guest)
        watch(self.store)

    def warm_up(self) -> None:
        """Let the guest touch its memory before a request waits for it: the first writes to its pages are most of a start's time."""
        call_string(self.store, self.resume, "")


def _export(store: Store, instance: Any, name: str, guest: Any) -> Func:
    func = instance.get_func(store, instance.get_export_index(store, name, guest))
    if func is None:
        raise GuestTrap(f"the component does not export {GUEST}.{name}")
    return func  # type: ignore[no-any-return]


class GuestInstance:
    """One running inferlet, as pie_core.host drives it: `start` once, then `resume` until it is done; one step at a time."""

    def __init__(self, sandbox: Sandbox, port: Port, limits: Limits) -> None:
        self.port = port
        self.limits = limits
        self.cpu_s = 0.0  # thread time used so far
        self._sandbox = sandbox
        self._machine: _Machine | None = None
        self._lock = threading.Lock()  # held while a step runs
        self._step_began = 0.0
        self._brief = False  # the last step was: then what the next one posts can wait for its end, which saves the loop a wake
        self._held = port if isinstance(port, GuestPort) else None
        self._stop: SandboxError | None = None  # why the running step must end, or why there are no more steps

    async def start(self, request: str) -> str:
        """Run the request until the guest waits, is done or failed; its answer. Raises SandboxError."""
        return await self._run("start", request)

    async def resume(self, events: str) -> str:
        """Deliver events and run on. Raises SandboxError."""
        return await self._run("resume", events)

    def close(self) -> None:
        """Free the guest; a step that runs ends within some milliseconds."""
        if self._stop is None:
            self._stop = GuestClosed("the inferlet was closed")
        if self._lock.acquire(blocking=False):  # else the step's thread frees it
            try:
                self._free()
            finally:
                self._lock.release()

    async def _run(self, export: str, text: str) -> str:
        self._go_on()
        answer: str = await self._sandbox._pool.run(self._step, export, text)
        return answer

    def _step(self, export: str, text: str) -> str:
        with self._lock:
            try:
                self._go_on()
                fresh = self._machine is None
                if self._machine is None:
                    self._machine = self._sandbox._machine()
                    self._machine.store.set_limits(memory_size=self.limits.memory_bytes)
                answer = self._call(self._machine, export, text)
            except SandboxError as error:
                self._stop = self._stop or error.again()
                raise
            finally:
                if self._stop is not None:
                    self._free()
        if fresh:
            self._sandbox._refill_soon()
        return answer

    def _go_on(self) -> None:
        """Raises why there are no more steps."""
        if self._stop is not None:
            raise self._stop.again()

    def _free(self) -> None:
        machine, self._machine = self._machine, None
        if machine is not None:
            self._sandbox._discard(machine)

    def _call(self, machine: _Machine, export: str, text: str) -> str:
        """One step in this thread, under its budgets."""
        _here.guest = self
        held = self._held
        if held is not None:
            held.held = self._brief
        self._step_began = began = time.thread_time()
        func = machine.start if export == "start" else machine.resume
        try:
            answer: str = self._sandbox._ticker.guarded(machine.store, self._check, lambda: call_string(machine.store, func, text))
        except WasmtimeError as error:
            raise (self._stop.again() if self._stop is not None else _trap(error, self.limits)) from None
        finally:
            used = time.thread_time() - began
            self.cpu_s += used
            self._brief = used < BRIEF_S
            _here.guest = None
        self._go_on()  # unless it was closed, or went over a budget, in the step's last moments
        if len(answer) > self.limits.text_chars:
            raise OutputLimitExceeded(f"the inferlet answered {len(answer):,} characters at once; the limit is {self.limits.text_chars:,}")
        if self.cpu_s > self.limits.total_cpu_s:
            raise CpuBudgetExceeded(self._over_total())
        return answer

    def _check(self) -> str | None:
        """Whether the running step may go on; called in its thread at each epoch tick. Must not raise."""
        if self._held is not None and self._held.held:
            self._held.flush()
        if self._stop is None:
            used = time.thread_time() - self._step_began
            if used > self.limits.step_cpu_s:
                self._stop = CpuBudgetExceeded(
                    f"the inferlet ran for {used:.1f} s of CPU time without awaiting; the limit is {self.limits.step_cpu_s:g} s"
                )
            elif self.cpu_s + used > self.limits.total_cpu_s:
                self._stop = CpuBudgetExceeded(self._over_total())
        return None if self._stop is None else str(self._stop)

    def _over_total(self) -> str:
        return f"the inferlet used {self.limits.total_cpu_s:g} s of CPU time in total, which is its limit"


_here = threading.local()  # .guest: whose step runs in this thread


def _host_call(op: str, payload: str) -> str:
    """host.call of whichever guest runs in this thread. Never raises: wasmtime-py keeps one exception slot for all guests."""
    try:
        guest: GuestInstance = _here.guest
        limit = guest.limits.text_chars
        if len(payload) > limit:
            return _refusal("OutputLimitExceeded", f"{op}: {len(payload):,} characters in one call; the limit is {limit:,}")
        return guest.port.call(op, payload)
    except Exception as error:  # the boundary to the guest
        logging.getLogger(__name__).exception("host op %r failed", op[:40])
        return _refusal("HostError", f"the host op {op[:40]!r} failed: {type(error).__name__}")


def _refusal(kind: str, message: str) -> str:
    return json.dumps({"error": {"type": kind, "message": message}})


# The runtime frees an object that is none any more: what CPython makes of a text whose growth in place (s += s) was refused. The
# engine does not tell of refused growth, and pure Python has no other way there.
_DEALLOC = re.compile(r"[^\n]*backtrace:\n0: 0x[0-9a-f]+ - \S*!_Py_Dealloc\n")


def _trap(error: WasmtimeError, limits: Limits) -> SandboxError:
    """wasmtime gives no codes: the cause is the last line of its message."""
    room = f"its {limits.memory_bytes >> 20} MiB of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "\n".join(lines)
    last = lines[-1].partition(": ")[2] or lines[-1] if lines else "no message"
    if "memory" in last and "limit" in last:
        return MemoryLimitExceeded(f"the inferlet needs more than {room}")
    if "call stack exhausted" in text:
        return StackLimitExceeded(
            f"the inferlet nested too deeply and exhausted its stack of {STACK_BYTES >> 20} MiB: "
            "deep data in json, repr or a comparison, or deep calls through C"
        )
    if "PyErr_Display" in text or "Py_FatalError" in text or "fatal_error" in text:
        return MemoryLimitExceeded(f"the inferlet's Python runtime failed outside the program, most likely beyond {room}")
    if "uninitialized element" in last and _DEALLOC.match(text):
        return MemoryLimitExceeded(f"the inferlet's Python runtime failed while an object grew, most likely beyond {room}")
    if "has not been defined" in last:  # an import that define_unknown_imports_as_traps filled in
        return GuestTrap(f"the inferlet made a system call that it may not make: {last.partition('`')[2].partition('`')[0]}")
    return GuestTrap(f"the inferlet crashed: {last}")
