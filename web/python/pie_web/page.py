"""Page: the loaded engine, as the engine worker calls it. One Process a run."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import Any, NoReturn

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.errors import ContextLengthExceeded, EngineError, OutOfPages
from pie_core.engine.loop import Engine
from pie_core.eta.json_text import loads
from pie_core.host.process import InferletFailed, Process
from pie_core.host.services import ModelFacts, Services
from pie_core.text.stream import TextError
from pie_core.text.tokenizer import TokenizerSpec
from pie_web.adapter import OpenDevice
from pie_web.link import PageGuest

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_logger = logging.getLogger(__name__)


class _Beside:
    """Tokenizer and chat template work beside the inferlet, in its worker; only the prefix of a sequence is known here."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._prefix = [spec["bos"]] if spec["add_bos"] and spec["bos"] is not None else []
        self.vocab_size = len(spec["tokenizer"]["model"]["vocab"])

    def prefix(self) -> list[int]:
        """Ids that every sequence starts with."""
        return list(self._prefix)

    def _absent(self, *_: object, **__: object) -> NoReturn:
        raise TextError("in the page, text is encoded and decoded beside the inferlet")

    encode = decode = token_bytes = text = role = cue = seal = _absent


def _heard(running: asyncio.Task[Any]) -> None:
    """Pyodide's loop reports a failure as unhandled when nothing awaits it yet; `_drive` does once it has passed on the last message."""
    if not running.cancelled():
        running.exception()


class _Run:
    """A running inferlet. `ending`: what its cancellation is called. `sent` values came for its receives, of which it made `receives`."""

    __slots__ = ("ending", "process", "receives", "sent", "task")

    def __init__(self, process: Process) -> None:
        self.process = process
        self.sent = self.receives = 0
        self.ending: tuple[str, str] | None = None
        self.task: asyncio.Task[None] | None = None


class Page:
    """Everything runs on the worker's event loop. Methods are called from JavaScript (engine/page.ts) and return at once, but `close`."""

    def __init__(self, host: Any, opened: OpenDevice, engine: Engine, spec: TokenizerSpec, text: str) -> None:
        self._host, self._opened, self._engine, self._text = host, opened, engine, text
        limits = engine.limits
        beside: Any = _Beside(spec)
        facts = ModelFacts(str(host.modelName), limits.vocab, limits.hidden, limits.context, tuple(spec["eos"]), limits.pages)
        self._services = Services(facts, beside, beside)
        self._runs: dict[int, _Run] = {}

    def facts(self) -> str:
        """JSON text of device and model."""
        info, model = self._opened.device.info, self._services.model
        device = {"kind": info.kind, "name": info.name, "description": info.description, "software": info.software, "why": self._opened.why}
        return _dumps(
            {
                "device": device,
                "model": {
                    "name": model.name, "vocab": model.vocab, "hidden": model.hidden, "context": model.context, "eos": list(model.eos),
                },
            }
        )  # fmt: skip

    def text(self) -> str:
        """The TextSpec; kept no longer than it is needed."""
        text, self._text = self._text, ""
        return text

    def stats(self) -> str:
        """JSON text of the counters."""
        return _dumps({"engine": self._engine.status(), "deviceBytes": self._opened.bytes, "deviceMs": self._opened.busy_ms})

    def run(self, run: int, port: Any, source: str, name: str, input: str) -> None:
        """Start an inferlet whose guest is at the other end of `port`."""
        try:
            value = loads(input)
        except ValueError as error:
            port.close()
            self._failed(run, InferletFailed("InputNotJson", f"the program's input must be a JSON value: {error}"))
            return
        try:
            log = partial(self._host.log, run)
            process = Process(self._engine, self._services, name, on_log=log, receives=bool(port.receives))
        except EngineError as error:
            port.close()
            self._failed(run, InferletFailed(error.type_name, error.message))
            return
        self._runs[run] = entry = _Run(process)
        try:
            guest = PageGuest(port, process.port, self._engine.limits, partial(self.end, run), partial(self._receives, run))
            entry.task = asyncio.ensure_future(self._drive(run, entry, guest, process.request(source, value, name)))
        except BaseException:
            del self._runs[run]
            process.close()
            raise

    def end(self, run: int, type: str, message: str) -> None:
        """End a run as failed with this error; harmless when it has ended."""
        entry = self._runs.get(run)
        if entry is not None and entry.ending is None:
            entry.ending = (type, message)
            entry.process.cancel(message)

    def deliver(self, run: int, value: str) -> None:
        """JSON text for the inferlet's `receive`; a value too many, which the main thread refuses, ends the run."""
        entry = self._runs.get(run)
        if entry is None:
            return
        try:
            entry.process.deliver(loads(value))
        except ValueError as error:
            self.end(run, "HostError", f"a value for receive() must be a JSON value: {error}")
        except InferletFailed as error:
            self.end(run, error.type, error.message)
        else:
            entry.sent += 1
            if entry.receives >= entry.sent:
                self._host.received(run)

    def _receives(self, run: int) -> None:
        entry = self._runs.get(run)
        if entry is not None:
            entry.receives += 1
            if entry.sent >= entry.receives:
                self._host.received(run)

    async def close(self) -> None:
        """End every run and free the device. Twice is harmless."""
        for run in list(self._runs):
            self.end(run, "Cancelled", "the engine was disposed of")
        tasks = [entry.task for entry in self._runs.values() if entry.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        await self._engine.stop()
        self._opened.device.close()

    async def _drive(self, run: int, entry: _Run, guest: PageGuest, request: dict[str, Any]) -> None:
        process, post = entry.process, self._host.message
        running = asyncio.ensure_future(process.run(guest, request))
        running.add_done_callback(_heard)
        try:
            async for message in process.messages():
                post(run, _dumps(message))
            self._host.result(run, _dumps(await running))
        except InferletFailed as error:
            if entry.ending is not None and error.type == "Cancelled":
                error = InferletFailed(*entry.ending)
            self._failed(run, error)
        except Exception as error:  # the run's boundary: whatever it was, the main thread must hear of an end
            _logger.exception("run %d failed", run)
            self._failed(run, InferletFailed("HostError", f"{type(error).__name__}: {error}"))
        finally:
            del self._runs[run]
            guest.close()

    def _with_fix(self, kind: str, message: str) -> str:
        """The message, with the option that would help: the engine knows of pages, only this page of options."""
        limits = self._engine.limits
        if kind != OutOfPages.type_name and not (kind == ContextLengthExceeded.type_name and limits.context == limits.pages * PAGE_TOKENS):
            return message
        return f"{message}; the KV cache has {int(self._host.kvPoolBytes):,} bytes, a larger kvPoolBytes of Pie.load makes room"

    def _failed(self, run: int, error: InferletFailed) -> None:
        fields = {"type": error.type, "file": error.file, "line": error.line, "traceback": error.traceback}
        self._host.error(run, self._with_fix(error.type, error.message), _dumps(fields))
