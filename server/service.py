"""The service: one model in one engine, and inferlets run on it in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import ContextLengthExceeded, EngineError, EngineLost, OutOfPages
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.set_files import FileStore
from pie_core.host.process import InferletFailed, Process
from pie_core.host.services import ModelFacts, Services
from pie_server import memory
from pie_server.api.backend import InferletError, ModelCard, OnMessage, Progress, Status
from pie_server.config import Settings
from pie_server.errors import UserError, one_sentence
from pie_server.live_model import LiveModel, LiveOptions, close_and_free
from pie_server.loading import USER_ERRORS, Source, Text, describe, device_facts, load_text, open_source, set_store
from pie_server.logs import fault, log
from pie_server.pace import Paces
from pie_server.prewarm import Opening, opening, read_messages
from pie_server.recovery import Recovery
from pie_server.sandbox import Sandbox
from pie_server.threads import in_thread

OnProgress = Callable[[Progress], None]
OnLog = Callable[[str, str], None]  # (level, text)

WATCH_S = 5.0  # between looks at a device without work
TELL_S = 1.0  # that running inferlets get to tell of a loss themselves; the rest are ended

__all__ = ["USER_ERRORS", "Service"]


class Service:
    """A served model. Made with its checkpoint already checked; `load` brings it up; `run` runs inferlets; `close` frees all.

    Implements `api.backend.Backend`. Everything but the constructor belongs to one event loop.
    """

    def __init__(
        self,
        source: Source,
        options: LiveOptions,
        on_progress: OnProgress | None = None,
        *,
        openings: Sequence[Opening] = (),
        text: Text | None = None,
    ) -> None:
        self._source, self._options, self._on_progress = source, options, on_progress
        self._openings, self._prewarmed = openings, 0
        self._text = text  # where somebody needed it before `load`
        self._status = Status("loading", Progress("starting"))
        created = int(source.path.stat().st_mtime)
        self._card = ModelCard(source.name, created, source.architecture, source.context, source.path)
        self._stages: dict[str, Progress] = {}  # of the parts that load side by side, the last to change last
        self._paces = Paces()
        self._sandbox: Sandbox | None = None
        self._sets: FileStore | None = None
        self._live: LiveModel | None = None
        self._services: Services | None = None
        self._runs: dict[Process, str | None] = {}  # and why one was ended
        self._idle = asyncio.Event()  # no runs
        self._idle.set()
        self._recovery = Recovery(self._drop, self._rebuild)
        self._counted: dict[str, float] = {}  # by engines that were lost
        self._steps = 0  # of engines that were lost, in the timeline

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
        options = LiveOptions(settings.device, settings.kv_pool_mb, settings.deterministic, settings.timeline)
        return cls(source, options, on_progress, openings=openings, text=text)

    @property
    def status(self) -> Status:
        """Where loading stands, or the recovery from a loss."""
        outage = self._recovery.outage
        if outage is None:
            return self._status
        return Status("recovering", self._status.progress, error=outage.cause, outage=outage)

    @property
    def card(self) -> ModelCard:
        """The model; its `context` is also bounded by the KV pool once that is known."""
        return self._card

    @property
    def device_text(self) -> str:
        """What really runs, for people; "none" before the device is open."""
        device = self._live.device if self._live is not None else None
        return describe(device.info) if device is not None else "none"

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV cache holds, of all requests together; 0 before the model is loaded."""
        return self._live.pool_tokens if self._live is not None else 0

    @property
    def pool_text(self) -> str:
        """The size of the KV cache, for people; "none" before the model is loaded."""
        tokens = self.pool_tokens
        return f"{self._options.kv_pool_mb} MB, {tokens:,} tokens of all requests together" if tokens else "none"

    @property
    def prewarm_text(self) -> str:
        """What was computed ahead, for people; "" where nothing was asked for."""
        files, short = len(self._openings), sum(start.short for start in self._openings)
        text = f"{self._prewarmed:,} tokens of {files} file{'s' * (files > 1)}" if files else ""
        return f"{text}, {short} of them too short to be kept" if short else text

    def stats(self) -> Mapping[str, float]:
        """The engine's counters, which go on over losses, and its pages; empty while loading."""
        if self._status.state != "ready":
            return {}
        live = self._live
        counters, gauges = (live.counters(), live.gauges()) if live is not None else ({}, {})
        return {**_sum(self._counted, counters), **gauges, **self._recovery.counters()}

    def timeline(self, since: int) -> Mapping[str, object]:
        """The engine's steps after number `since`; empty while loading. Numbers go on over losses."""
        found = self._live.timeline(since - self._steps) if self._live is not None else {}
        if self._steps and found:
            found["steps"] = [[number + self._steps, *rest] for number, *rest in found["steps"]]
        return found

    def _progress(self, part: str, stage: str | None, done: int = 0, total: int = 0) -> None:
        """`part` of the load has come to `stage`, or has ended (None): then a part that still goes on is shown."""
        recovering = self._recovery.outage is not None
        if self._status.state != "loading" and not recovering:  # a straggler of a load that failed
            return
        self._stages.pop(part, None)
        if stage is not None:
            self._stages[part] = Progress(stage, done, total, self._paces.ends_at(part, done, total))
        else:
            self._paces.forget(part)
        if self._stages:
            progress = list(self._stages.values())[-1]
            self._status = replace(self._status, progress=progress)
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
            log("load_fault", logging.ERROR, **fault(err))
            self._fail(one_sentence(f"{type(err).__name__}: {err}"))
        else:
            took = time.perf_counter() - started
            self._recovery.ready(took)
            log("loaded", logging.DEBUG, seconds=round(took, 2))

    def _fail(self, sentence: str) -> None:
        self._status = Status("failed", self._status.progress, error=sentence)

    async def _load(self) -> None:
        live = self._new_live()
        loads = (
            asyncio.create_task(live.load()),
            asyncio.create_task(self._load_sandbox()),
            asyncio.create_task(self._load_text()),
            asyncio.create_task(in_thread(set_store, self._source)),
        )
        try:
            runner, sandbox, self._text, self._sets = await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
        engine = self._start(live, runner)
        await in_thread(sandbox.warm)
        await self._prewarm(engine)
        await self._ready(live)

    def _new_live(self) -> LiveModel:
        self._live = LiveModel(self._source, self._options, partial(self._progress, "device"), self._lost)
        return self._live

    def _start(self, live: LiveModel, runner: ModelRunner) -> Engine:
        """The engine, and what inferlets are told of it: another device may hold another number of pages."""
        assert self._text is not None and self._sets is not None  # loaded beside the runner
        limits, text = runner.limits, self._text
        self._card = replace(self._card, context=limits.context)
        eos = tuple(text.spec["eos"])
        facts = ModelFacts(self._card.name, limits.vocab, limits.hidden, self._card.context, eos, limits.pages)
        self._services = Services(facts, text.tokenizer, text.chat)
        return live.start(runner, self._sets)

    async def _ready(self, live: LiveModel) -> None:
        self._source.checkpoint.release()
        await in_thread(memory.give_back)
        assert live.device is not None and live.engine is not None  # it was started
        live.engine.check_alive()
        self._status = Status("ready", Progress("ready"), device=device_facts(live.device.info))

    # --- losses

    async def keep(self) -> None:
        """Rebuild the engine after each loss, until cancelled. To be called once `load` has ended with a status of ready."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._recovery.run()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Nobody hears of a device that is lost while nothing runs on it, so ask it."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._live is not None and not self._runs and self.status.state == "ready":
                await self._live.probe()

    def _lost(self, live: LiveModel, cause: EngineError) -> None:
        """Called by the engine at that moment; a loss before it was ready is told by the load or rebuild itself."""
        if live is self._live and self._status.state == "ready" and self._recovery.outage is None:
            self._status = replace(self._status, progress=Progress("ending what ran"))
            self._recovery.lost(cause.message)

    async def _drop(self) -> None:
        """Free a lost engine with all it held."""
        live = self._live
        if live is None:
            return
        await self._end_runs()
        self._counted = _sum(self._counted, live.counters())
        steps = live.timeline(-1).get("steps")
        self._steps += steps[-1][0] + 1 if steps else 0
        self._live = None
        self._stages.clear()
        self._status = replace(self._status, progress=Progress("waiting to rebuild"))
        await close_and_free(live)

    async def _end_runs(self) -> None:
        """Inferlets were told of the loss by what they awaited. What goes on without the engine is ended, so that it holds no memory; a
        client that does not read is not waited for."""
        for last in (False, True):
            if last:
                assert self._recovery.outage is not None  # that is why
                for process in self._runs:
                    self._runs[process] = self._recovery.outage.cause
                    process.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), TELL_S)
                return

    async def _rebuild(self) -> Mapping[str, Any]:
        """A new device, weights and engine; what the log says of it."""
        before = self._status.device
        live = self._new_live()
        engine = self._start(live, await live.load())
        self._prewarmed = 0
        await self._prewarm(engine, anew=True)
        await self._ready(live)
        after = self._status.device
        facts = {f"device_{key}": value for key, value in (after or {}).items()}
        return facts if after == before else {**facts, **{f"before_{key}": value for key, value in (before or {}).items()}}

    async def _load_text(self) -> Text:
        return self._text if self._text is not None else await in_thread(load_text, self._source.checkpoint)

    async def _prewarm(self, engine: Engine, *, anew: bool = False) -> None:
        """Compute the openings. They are the operator's own words, not those of one tenant, so that all find them computed. `anew`: what
        does not fit on another device is left out."""
        done, total = 0, sum(len(start.ids) for start in self._openings)
        for start in self._openings:
            if start.short:
                short = f"it has {len(start.ids)} tokens; {PAGE_TOKENS} are the least that is kept"
                log("prewarm_too_short", logging.WARNING, file=start.file.name, error=short)
            tokens = 0
            try:
                for part in start.parts(self.pool_tokens):
                    self._progress("prewarm", f"computing {start.file.name} ahead", done + tokens, total)
                    tokens = await engine.prewarm(part, None)
            except EngineError as err:
                message = f"the --prewarm file {start.file}: {self._with_fix(err.type_name, err.message)}"
                if not anew or engine.lost is not None:
                    raise UserError(message) from None
                log("prewarm_failed", logging.WARNING, error=one_sentence(message))
                continue
            finally:
                done += len(start.ids)
            log("prewarmed", file=start.file.name, tokens=tokens)
            self._prewarmed += tokens
        self._progress("prewarm", None)

    async def _load_sandbox(self) -> Sandbox:
        loop = asyncio.get_running_loop()
        self._progress("sandbox", "opening the sandbox")
        self._sandbox = await in_thread(Sandbox, progress=lambda line: loop.call_soon_threadsafe(self._progress, "sandbox", line))
        self._progress("sandbox", None)
        return self._sandbox

    # --- runs

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
        it held. Raises InferletError, of kind EngineLost while a lost engine is rebuilt; UserError before `load`."""
        if self._recovery.outage is not None:
            raise InferletError(EngineLost.type_name, self._recovery.outage.cause)
        engine = self._live.engine if self._live is not None else None
        if engine is None or self._sandbox is None or self._services is None:
            raise UserError("the model is not loaded")
        try:
            process = Process(engine, self._services, name, tenant=tenant, on_log=on_log, receives=False)
        except EngineError as err:
            raise InferletError(err.type_name, err.message) from err
        self._runs[process] = None
        self._idle.clear()
        guest = self._sandbox.open(process.port)
        running = asyncio.create_task(process.run(guest, process.request(source, input)), name=f"inferlet {name}")
        try:
            async for message in process.messages():
                if on_message is not None:
                    await on_message(message)
            return await running
        except InferletFailed as err:
            cause = self._runs[process]
            if err.type == "Cancelled" and cause is not None:
                raise InferletError(EngineLost.type_name, cause) from None
            if err.type == EngineLost.type_name and engine.lost is None and self._live is not None:
                await self._live.probe()  # it, or a name that the author chose
            raise InferletError(err.type, self._with_fix(err.type, err.message), err.file, err.line, err.traceback) from err
        finally:
            try:
                await _end(running)
            finally:  # who leaves in mid-message is first told so by the write, and then cancelled
                process.close()  # a task that is cancelled before its first step never gets to its own clean-up
                guest.close()
                del self._runs[process], running  # a task holds its error, whose frames are this one's too
                if not self._runs:
                    self._idle.set()

    def _with_fix(self, kind: str, message: str) -> str:
        """The message, with the flag that would help: the engine knows of pages, only this server of flags."""
        bound = kind == ContextLengthExceeded.type_name and self._card.context == self.pool_tokens
        if not bound and kind != OutOfPages.type_name:
            return message
        return f"{message}; the KV cache has {self._options.kv_pool_mb} MB, a larger --kv-pool-mb makes room"

    async def close(self) -> None:
        """End running inferlets and free the device. May be called at any time, and twice."""
        live, self._live = self._live, None
        if live is not None:
            await live.close()
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await in_thread(sandbox.close)
        self._source.checkpoint.close()


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its clean-up; its outcome was taken or does not matter any more, also where the wait is broken off."""
    task.cancel()
    task.add_done_callback(_outcome)
    await asyncio.wait([task])


def _outcome(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
