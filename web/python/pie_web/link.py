"""PageGuest: an inferlet in a worker of its own, as the engine sees it. Its ops come over a port and go to `GuestPort.call`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from pyodide.ffi import create_proxy

from pie_core.host.ops import OPS
from pie_core.host.port import GuestPort
from pie_core.host.process import InferletFailed

_BESIDE = {name for name, op in OPS.items() if op.kind == "sync"} - {"log"}


class PageGuest:
    """A `host.process.Guest` over `port` (a RunPort of engine/link.ts). A refused op ends the inferlet: the guest went on in the belief
    that it had been taken, since the worker beside it checks the same rules first. `on_fault(type, message)` ends a run that waits for
    something else than its guest."""

    def __init__(self, port: Any, ops: GuestPort, on_fault: Callable[[str, str], None]) -> None:
        self._port = port
        self._on_fault = on_fault
        self._ops = ops
        ops.answers = False
        self._call = ops.call
        self._answer: asyncio.Future[str] | None = None
        self._fault: InferletFailed | None = None
        self._closed = False
        self._send = port.send
        self._loop = asyncio.get_running_loop()
        self._proxies = create_proxy(self._received), create_proxy(self._stepped)
        port.open(*self._proxies)

    async def start(self, request: str) -> str:
        """The first step."""
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
            raise self._fault
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
                error = json.loads(refusal)["error"]
                self._fail(str(error["type"]), str(error["message"]))
        elif kind == "answer":
            if self._answer is None or self._answer.done():
                self._fail("GuestFault", "the guest answered a step that was not asked for")
            else:
                self._answer.set_result(body)
        elif kind == "fault":
            self._fail(*_fault(body))
        else:
            self._fail("GuestFault", f"a message of unknown kind {kind!r:.40}")

    def _fail(self, kind: str, message: str) -> None:
        self._fault = InferletFailed(kind, message)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._fault)
        else:
            self._on_fault(kind, message)


def _fault(body: str) -> tuple[str, str]:
    """What the inferlet worker says of a guest that cannot say anything itself."""
    try:
        fields = json.loads(body)
        return str(fields["type"]), str(fields["message"])
    except (ValueError, TypeError, KeyError):
        return "GuestFault", "the guest ended without a reason"
