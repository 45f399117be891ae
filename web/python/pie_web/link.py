"""PageGuest: an inferlet in a worker of its own, as the engine sees it. Its ops come over a port and go to `GuestPort.call`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from pyodide.ffi import create_proxy

from pie_core.engine.runner import RunnerLimits
from pie_core.eta.json_text import loads
from pie_core.host.answer import MAX_LISTS, MAX_VALUES
from pie_core.host.ops import MAX_OUTS, OPS, SMALL
from pie_core.host.port import GuestPort
from pie_core.host.process import InferletFailed

_BESIDE = {name for name, op in OPS.items() if op.kind == "sync"} - {"log"}


class PageGuest:
    """A `host.process.Guest` over `port` (a RunPort of engine/link.ts), whose worker knows `limits` and refuses most of what is wrong at
    the call. What only the engine can refuse it hears behind the step, before anything else; a step that was the last then fails with it.
    `on_fault(type, message)` ends a run that waits for something else than its guest. `on_receive` hears of each `receive`."""

    def __init__(
        self, port: Any, ops: GuestPort, limits: RunnerLimits, on_fault: Callable[[str, str], None], on_receive: Callable[[], None]
    ) -> None:
        self._port = port
        self._limits = limits
        self._on_receive = on_receive
        self._refused: list[str] = []  # JSON texts, of the step that runs
        self._on_fault = on_fault
        self._ops = ops
        ops.answers = False
        self._call = ops.call
        self._answer: asyncio.Future[str] | None = None
        self._fault: tuple[str, str] | None = None  # type and message: an error that is kept would collect frames, which hold the guest
        self._closed = False
        self._send = port.send
        self._loop = asyncio.get_running_loop()
        self._proxies = create_proxy(self._received), create_proxy(self._stepped)
        port.open(*self._proxies)

    async def start(self, request: str) -> str:
        """The first step."""
        self._send("limits", f'{{"max_tokens":{self._limits.max_tokens},"max_reads":{self._limits.max_reads}}}')
        return await self._step("start", request)

    async def resume(self, events: str) -> str:
        """A step after something settled."""
        return await self._step("resume", events)

    def close(self) -> None:
        """Close the port. The main thread ends the worker."""
        if not self._closed:
            self._closed = True
            self._port.close()
            for proxy in self._proxies:
                proxy.destroy()

    async def _step(self, kind: str, text: str) -> str:
        if self._fault is not None:
            raise InferletFailed(*self._fault)
        self._answer = self._loop.create_future()
        self._send(kind, text)
        try:
            return await self._answer
        finally:
            self._answer = None

    def _stepped(self, name: str, payload: str, answer: str) -> None:
        """A step of one op, which is most of them: one call instead of two."""
        self._ops.held = True  # the answer has them taken
        self._received("op", name, payload)
        self._ops.held = False
        self._received("answer", "", answer)

    def _received(self, kind: str, name: str, body: str) -> None:
        if self._closed or self._fault is not None:
            return
        if kind == "op":
            if name in _BESIDE:
                self._fail("GuestFault", f"the op {name} belongs beside the guest, not to the engine")
                return
            refusal = self._call(name, body)
            if refusal:
                self._refused.append(_refused(name, body, refusal))
            elif name == "receive":
                self._on_receive()
        elif kind == "answer":
            if self._answer is None or self._answer.done():
                self._fail("GuestFault", "the guest answered a step that was not asked for")
            elif self._refused:
                self._tell_refused(body)
            else:
                self._answer.set_result(body)
        elif kind == "fault":
            self._fail(*_fault(body))
        else:
            self._fail("GuestFault", f"a message of unknown kind {kind!r:.40}")

    def _tell_refused(self, answer: str) -> None:
        """Ops of the step that ended with `answer` were refused: the inferlet hears of it in a step of its own, if it goes on."""
        refused, self._refused = self._refused, []
        assert self._answer is not None  # `_received`
        state = _state(answer)
        if state == "pending":
            self._send("refused", f"[{','.join(refused)}]")
            return
        lost = [fields for fields in map(json.loads, refused) if not fields["futures"]]  # what has a future, nobody waits for any more
        if state == "done" and lost:
            error = lost[0]["error"]
            self._fail(error["type"], error["message"])
        else:
            self._answer.set_result(answer)

    def _fail(self, kind: str, message: str) -> None:
        self._fault = kind, message
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(InferletFailed(kind, message))
        else:
            self._on_fault(kind, message)


def _state(answer: str) -> object:
    """What the answer of a step says of the guest; None for what the process will refuse."""
    try:
        return loads(answer, values=MAX_VALUES, lists=MAX_LISTS).get("s")
    except (ValueError, AttributeError):
        return None


def _refused(name: str, body: str, refusal: str) -> str:
    """JSON text of a refused op: the futures that it was to settle, and the error, which names the op."""
    size = OPS[name].size if name in OPS else SMALL
    try:
        fields = loads(body, values=size.values, lists=size.lists) if len(body) <= size.chars else {}
        futures = [fields["f"]] if "f" in fields else list(fields.get("outs", ()))[:MAX_OUTS]
    except (ValueError, TypeError, AttributeError):  # what was refused may be anything
        futures = []
    error = json.loads(refusal)["error"]
    if not error["message"].startswith(name):
        error["message"] = f"{name}: {error['message']}"
    return json.dumps({"futures": [f for f in futures if type(f) is int], "error": error})


def _fault(body: str) -> tuple[str, str]:
    """What the inferlet worker says of a guest that cannot say anything itself."""
    try:
        fields = loads(body, values=SMALL.values)
        return str(fields["type"]), str(fields["message"])
    except (ValueError, TypeError, KeyError):
        return "GuestFault", "the guest ended without a reason"
