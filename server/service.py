"""The service: one model in one engine, and inferlets run on it in the sandbox."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pie_core.device.protocol import PAGE_TOKENS, Device
from pie_core.device.selftest import self_test
from pie_core.engine.errors import EngineError, OutOfPages
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.host.process import InferletFailed, Process
from pie_core.host.services import ModelFacts, Services
from pie_server import memory
from pie_server.api.backend import InferletError, ModelCard, OnMessage, Progress, Status
from pie_server.config import DeviceName, Settings
from pie_server.errors import UserError, one_sentence
from pie_server.loading import (
    USER_ERRORS,
    Source,
    Text,
    describe,
    device_facts,
    load_runner,
    load_text,
    open_device,
    open_source,
    set_store,
)
from pie_server.logs import log, where
from pie_server.prewarm import Opening, opening, read_messages
from pie_server.sandbox import Sandbox
from pie_server.threads import in_thread

OnProgress = Callable[[Progress], None]
OnLog = Callable[[str, str], None]  # (level, text)

_GAUGES = {
    "pages_used",
    "pages_free",
    "pages_shared",
    "pages_cached",
    "arena_words_used",
    "instances",
    "in_flight",
    "queue_wait_max",
}  # the rest are counters

__all__ = ["USER_ERRORS", "Service"]


class Service:
    """A served model. Made with its checkpoint already checked; `load` brings it up; `run` runs inferlets; `close` frees all.

    Implements `api.backend.Backend`. Everything but the constructor belongs to one event loop.
    """

    def __init__(
        self,
        source: Source,
        device: DeviceName,
        kv_pool_mb: int,
        on_progress: OnProgress | None = None,
        *,
        deterministic: bool = False,
        timed: bool = False,
        openings: Sequence[Opening] = (),
        text: Text | None = None,
    ) -> None:
        self._source, self._wanted, self._kv_pool_mb, self._on_progress = source, device, kv_pool_mb, on_progress
        self._deterministic, self._timed = deterministic, timed
        self._openings, self._prewarmed = openings, 0
        self._text = text  # where somebody needed it before `load`
        self._status = Status("loading", Progress("starting"))
        created = int(source.path.stat().st_mtime)
        self._card = ModelCard(source.name, created, source.architecture, source.context, source.path)
        self._stages: dict[str, Progress] = {}  # of the parts that load side by side, the last to change last
        self._sandbox: Sandbox | None = None
        self._device: Device | None = None
        self._engine: Engine | None = None
        self._services: Services | None = None

    @classmethod
    def from_settings(cls, settings: Settings, on_progress: OnProgress | None = None) -> Service:
        """The service that `settings` describe, not yet loaded. Raises UserError and USER_ERRORS for what can be known at once."""
        beginnings = [(file, read_messages(file)) for file in settings.prewarm]
        source = open_source(settings.model, settings.poem)
        try:
            text = load_text(source.checkpoint) if beginnings else None
            openings = [opening(file, messages, text.chat, source.context) for file, messages in beginnings] if text is not None else []
        except BaseException:
            source.checkpoint.close()
            raise
        return cls(
            source, settings.device, settings.kv_pool_mb, on_progress, deterministic=settings.deterministic, timed=settings.timeline,
            openings=openings, text=text,
        )  # fmt: skip

    @property
    def status(self) -> Status:
        """Where loading stands."""
        return self._status

    @property
    def card(self) -> ModelCard:
        """The model; its `context` is also bounded by the KV pool once that is known."""
        return self._card

    @property
    def device_text(self) -> str:
        """What really runs, for people; "none" before the device is open."""
        return describe(self._device.info) if self._device is not None else "none"

    @property
    def pool_text(self) -> str:
        """The size of the KV cache, for people; "none" before the model is loaded."""
        if self._engine is None:
            return "none"
        return f"{self._kv_pool_mb} MB, {self._engine.pool.total * PAGE_TOKENS:,} tokens of all requests together"

    @property
    def prewarm_text(self) -> str:
        """What was computed ahead, for people; "" where nothing was asked for."""
        files = len(self._openings)
        return f"{self._prewarmed:,} tokens of {files} file{'s' * (files > 1)}" if files else ""

    def stats(self) -> Mapping[str, float]:
        """The engine's counters, and its pages; empty while loading."""
        if self._engine is None:
            return {}
        status = self._engine.status()
        return {name if name in _GAUGES else f"{name}_total": float(value) for name, value in status.items()}

    def timeline(self, since: int) -> Mapping[str, object]:
        """The engine's steps after number `since`; empty while loading."""
        return self._engine.timeline(since) if self._engine is not None else {}

    def _progress(self, part: str, stage: str | None, done: int = 0, total: int = 0) -> None:
        """`part` of the load has come to `stage`, or has ended (None): then a part that still goes on is shown."""
        if self._status.state != "loading":  # a straggler of a load that failed
            return
        self._stages.pop(part, None)
        if stage is not None:
            self._stages[part] = Progress(stage, done, total)
        if self._stages:
            progress = list(self._stages.values())[-1]
            self._status = Status("loading", progress)
            if self._on_progress is not None:
                self._on_progress(progress)

    async def load(self) -> None:
        """Bring everything up. Ends with a status of ready, or of failed with one sentence; raises only CancelledError."""
        started = time.perf_counter()
        try:
            await self._load()
        except USER_ERRORS as err:
            self._fail(one_sentence(str(err)))
        except Exception as err:  # loading's boundary: /health must be able to tell, whatever it was
            log("load_fault", logging.ERROR, error=where(err))
            self._fail(one_sentence(f"{type(err).__name__}: {err}"))
        else:
            assert self._device is not None  # _load set it
            self._status = Status("ready", Progress("ready"), device=device_facts(self._device.info))
            log("loaded", logging.DEBUG, seconds=round(time.perf_counter() - started, 2))

    def _fail(self, sentence: str) -> None:
        self._status = Status("failed", self._status.progress, error=sentence)

    async def _load(self) -> None:
        loads = (
            asyncio.create_task(self._load_runner()),
            asyncio.create_task(self._load_sandbox()),
            asyncio.create_task(self._load_text()),
            asyncio.create_task(in_thread(set_store, self._source)),
        )
        try:
            runner, sandbox, text, sets = await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
        limits = runner.limits
        self._card = replace(self._card, context=min(limits.context, limits.pages * PAGE_TOKENS))
        eos = tuple(text.spec["eos"])
        facts = ModelFacts(self._card.name, limits.vocab, limits.hidden, self._card.context, eos, limits.pages)
        self._services = Services(facts, text.tokenizer, text.chat)
        self._engine = Engine(runner, sets=sets)
        self._engine.start()
        await in_thread(sandbox.warm)
        await self._prewarm(self._engine)
        self._source.checkpoint.release()
        await in_thread(memory.give_back)

    async def _load_text(self) -> Text:
        return self._text if self._text is not None else await in_thread(load_text, self._source.checkpoint)

    async def _prewarm(self, engine: Engine) -> None:
        """Compute the openings. They are the operator's own words, not those of one tenant, so that all find them computed."""
        for done, start in enumerate(self._openings):
            self._progress("prewarm", f"computing {start.file.name} ahead", done, len(self._openings))
            try:
                tokens = await engine.prewarm(start.ids, None)
            except EngineError as err:
                raise UserError(f"the --prewarm file {start.file}: {self._with_fix(err.type_name, err.message)}") from None
            log("prewarmed", file=start.file.name, tokens=tokens)
            self._prewarmed += tokens
        self._progress("prewarm", None)

    async def _load_runner(self) -> ModelRunner:
        loop = asyncio.get_running_loop()

        def bytes_done(done: int, total: int) -> None:
            loop.call_soon_threadsafe(self._progress, "device", "loading weights", done, total)

        self._progress("device", "opening the device")
        self._device = await open_device(self._wanted, timed=self._timed)
        self._progress("device", "testing the device's kernels")
        await self_test(self._device)
        self._progress("device", "loading weights")
        load = partial(load_runner, self._device, self._source, self._kv_pool_mb, bytes_done, deterministic=self._deterministic)
        runner = await in_thread(load)
        if self._timed:
            runner.timer = self._device.step_timer()
        self._progress("device", None)
        return runner

    async def _load_sandbox(self) -> Sandbox:
        loop = asyncio.get_running_loop()
        self._progress("sandbox", "opening the sandbox")
        self._sandbox = await in_thread(Sandbox, progress=lambda line: loop.call_soon_threadsafe(self._progress, "sandbox", line))
        self._progress("sandbox", None)
        return self._sandbox

    async def run(
        self,
        source: str,
        name: str,
        input: Mapping[str, Any],
        on_message: OnMessage | None = None,
        on_log: OnLog | None = None,
        *,
        tenant: str = "",
    ) -> Any:
        """Run an inferlet to its result (JSON values). `on_message` gets what it sends, in order, and may be slow: then the
        inferlet's output waits. Only runs of one `tenant` share cached prefixes and saved sets. Cancelling ends the inferlet and frees all
        it held. Raises InferletError; UserError before `load`."""
        if self._engine is None or self._sandbox is None or self._services is None:
            raise UserError("the model is not loaded")
        try:
            process = Process(self._engine, self._services, name, tenant=tenant, on_log=on_log, receives=False)
        except EngineError as err:
            raise InferletError(err.type_name, err.message) from err
        guest = self._sandbox.open(process.port)
        running = asyncio.create_task(process.run(guest, process.request(source, input)), name=f"inferlet {name}")
        try:
            async for message in process.messages():
                if on_message is not None:
                    await on_message(message)
            return await running
        except InferletFailed as err:
            raise InferletError(err.type, self._with_fix(err.type, err.message), err.file, err.line, err.traceback) from err
        finally:
            await _end(running)
            process.close()  # a task that is cancelled before its first step never gets to its own clean-up
            guest.close()

    def _with_fix(self, kind: str, message: str) -> str:
        """The message, with the flag that would help: the engine knows of pages, only this server of flags."""
        if kind != OutOfPages.type_name:
            return message
        return f"{message}; the KV cache has {self._kv_pool_mb} MB, a larger --kv-pool-mb makes room"

    async def close(self) -> None:
        """End running inferlets and free the device. May be called at any time, and twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await in_thread(sandbox.close)
        device, self._device = self._device, None
        if device is not None:
            device.close()
        self._source.checkpoint.close()


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its clean-up; its outcome was taken or does not matter any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
