"""One life of the served model: its device, its weights there, and the engine over them. A loss takes all of it, and a new one is made."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pie_core.device.protocol import PAGE_TOKENS, Device, DeviceError, DeviceLost
from pie_core.device.selftest import self_test
from pie_core.engine.errors import EngineError, EngineLost
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.saved_sets import SetStore
from pie_server import memory
from pie_server.config import DeviceName
from pie_server.loading import Source, load_runner, open_device
from pie_server.threads import in_thread

STOP_S = 5.0  # that steps in flight get to end; those of a device that hangs never do
PROBE_S = 5.0  # that a device has to answer
PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.32)  # between looks whether all of a closed model is free
OnStage = Callable[[str | None, int, int], None]  # (stage or None at its end, done, total)
OnLost = Callable[["LiveModel", EngineError], None]

_GAUGES = {
    "pages_used",
    "pages_free",
    "pages_shared",
    "pages_cached",
    "arena_words_used",
    "instances",
    "in_flight",
    "queue_wait_max",
    "state_slots_used",
    "state_slots_free",
}  # the rest are counters


@dataclass(frozen=True)
class LiveOptions:
    """What the operator asked for."""

    device: DeviceName
    kv_pool_mb: int
    deterministic: bool = False
    timed: bool = False


class _Engine(Engine):
    """An engine that says when it is lost, at that moment and not when somebody asks."""

    _cause: EngineError | None = None

    def __init__(self, runner: ModelRunner, sets: SetStore, on_lost: Callable[[EngineError], None]) -> None:
        self._on_lost = on_lost
        super().__init__(runner, sets=sets)

    @property
    def lost(self) -> EngineError | None:
        """Why no pass can run any more."""
        return self._cause

    @lost.setter
    def lost(self, cause: EngineError | None) -> None:
        first = self._cause is None and cause is not None
        self._cause = cause
        if first and cause is not None:
            self._on_lost(cause)


class LiveModel:
    """`load`, then `start`, then `engine` serves until `on_lost` is called with the cause; `close` frees all of it.

    Everything belongs to one event loop.
    """

    def __init__(self, source: Source, options: LiveOptions, on_stage: OnStage, on_lost: OnLost) -> None:
        self._source, self._options, self._on_stage, self._on_lost = source, options, on_stage, on_lost
        self._closed = False
        self.device: Device | None = None
        self.engine: Engine | None = None
        self._runner: ModelRunner | None = None

    async def load(self) -> ModelRunner:
        """Open the device, test it, put the weights there. Raises USER_ERRORS."""
        loop = asyncio.get_running_loop()
        options, tell = self._options, self._on_stage

        def bytes_done(done: int, total: int) -> None:
            loop.call_soon_threadsafe(tell, "loading weights", done, total)

        tell("opening the device", 0, 0)
        self.device = await open_device(options.device, timed=options.timed)
        tell("testing the device's kernels", 0, 0)
        await self_test(self.device)
        tell("loading weights", 0, 0)
        work = partial(load_runner, self.device, self._source, options.kv_pool_mb, bytes_done, deterministic=options.deterministic)
        runner = await in_thread(work)
        if options.timed:
            runner.timer = self.device.step_timer()
        tell(None, 0, 0)
        return runner

    def start(self, runner: ModelRunner, sets: SetStore) -> Engine:
        """The engine, running."""
        self._runner = runner
        self.engine = _Engine(runner, sets, self._lost)
        self.engine.start()
        return self.engine

    def _lost(self, cause: EngineError) -> None:
        if not self._closed:
            self._on_lost(self, cause)

    async def probe(self) -> None:
        """Ask the device for a sign of life; a loss is told like one that the engine meets. What a step in flight waits for from a device
        that is gone may never come."""
        device, runner = self.device, self._runner
        if device is None or runner is None:
            return
        try:
            async with asyncio.timeout(PROBE_S):
                await device.read(runner.results, 0, 4)
        except DeviceLost as error:
            self._lost(EngineLost(f"the device was lost: {error}"))
        except (DeviceError, TimeoutError):  # a busy device, or a fault that the steps meet too
            return

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 before `start`."""
        return self.engine.pool.total * PAGE_TOKENS if self.engine is not None else 0

    def counters(self) -> dict[str, float]:
        """What the engine has counted, as `*_total`."""
        return {f"{name}_total": value for name, value in self._status().items() if name not in _GAUGES}

    def gauges(self) -> dict[str, float]:
        """What is held now."""
        return {name: value for name, value in self._status().items() if name in _GAUGES}

    def _status(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self.engine.status().items()} if self.engine is not None else {}

    def timeline(self, since: int) -> dict[str, Any]:
        """The engine's steps after number `since`; empty before `start`."""
        return dict(self.engine.timeline(since)) if self.engine is not None else {}

    async def close(self) -> None:
        """End running inferlets, stop the device and free what it held. May be called at any time, and twice."""
        self._closed, self._runner = True, None
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                await _stop(engine)
        finally:
            device, self.device = self.device, None
            if device is not None:
                await in_thread(device.close)  # waits for the step that runs


async def _stop(engine: Engine) -> None:
    stopping = asyncio.ensure_future(engine.stop())
    try:
        await asyncio.wait([stopping], timeout=STOP_S)
        if stopping.done():
            stopping.result()  # a fault of the engine's own end is told, not lost
    finally:
        stopping.cancel()


async def close_and_free(live: LiveModel) -> None:
    """Close `live` and have its memory back: passes, plans and errors with their frames refer to each other, and the requests that are
    told of the loss hold on to it for a moment."""
    held = [weakref.ref(thing) for thing in (live.engine, live.device) if thing is not None]
    await live.close()
    for pause in PAUSES_S:
        gc.collect()
        if all(thing() is None for thing in held):
            break
        await asyncio.sleep(pause)
    await in_thread(memory.give_back)
