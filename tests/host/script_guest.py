"""A guest without a sandbox: a coroutine that calls the port and awaits future ids, with the ABI's start and resume."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from pie_core.host.port import GuestPort


class HostError(Exception):
    """A refusal, or a future that failed."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.error = error
        self.type = error["type"]


class Future:
    """A host future; await it once."""

    def __init__(self, fid: int) -> None:
        self.id = fid

    def __await__(self) -> Generator[int, Any, Any]:
        ok, value = yield self.id
        if not ok:
            raise HostError(value)
        return value


class Api:
    """What a script uses: `call` for any op, and ids."""

    def __init__(self, port: GuestPort) -> None:
        self._port = port
        self.new_id = itertools.count(1).__next__

    def call(self, op: str, **fields: Any) -> Any:
        answer = self._port.call(op, json.dumps(fields))
        if not answer:
            return None
        value = json.loads(answer)
        if isinstance(value, dict) and "error" in value:
            raise HostError(value["error"])
        return value

    def new(self, what: str, **fields: Any) -> int:
        """A handle: "ws", "pipe" or "ch"."""
        key = self.new_id()
        self.call(f"{what}.new", **{what: key}, **fields)
        return key

    def future(self, op: str, **fields: Any) -> Future:
        key = self.new_id()
        self.call(op, f=key, **fields)
        return Future(key)

    def program(self, text: str) -> int:
        key = self.new_id()
        self.call("program", prog=key, text=text)
        return key

    def submit(self, pipe: int, ws: int | list[int], tokens: Any, prog: int | None = None, outs: int = 1, **more: Any) -> list[Future]:
        futures = [self.new_id() for _ in range(outs if prog is not None else 0)]
        sets = ws if isinstance(ws, list) else [ws]
        geo = more.pop("geo", {"mode": "folding", "window": 0, "sinks": 0})
        self.call("submit", pipe=pipe, tokens=tokens, ws=sets, geo=geo, prog=prog, outs=futures, **more)
        return [Future(f) for f in futures]


Script = Callable[[Api, Any], Coroutine[Any, Any, Any]]


class ScriptGuest:
    """Runs `script(api, input)`; the code of a step runs in another thread when `threaded`, as in a sandbox."""

    def __init__(self, port: GuestPort, script: Script, *, threaded: bool = False) -> None:
        self._api = Api(port)
        self._script = script
        self._threaded = threaded
        self._main: Coroutine[Any, Any, Any] | None = None
        self._waiting: int | None = None
        self._early: dict[int, tuple[bool, Any]] = {}
        self.closed = False
        self.steps = 0

    async def start(self, request: str) -> str:
        self._main = self._script(self._api, json.loads(request)["input"])
        return await self._run(lambda: self._advance(None))

    async def resume(self, events: str) -> str:
        for fid, ok, value in json.loads(events):
            self._early[fid] = (ok, value)
        return await self._run(lambda: self._advance(self._early.pop(self._waiting or 0)))

    def close(self) -> Awaitable[None] | None:
        self.closed = True
        if self._main is not None:
            self._main.close()
        return None

    async def _run(self, step: Callable[[], str]) -> str:
        self.steps += 1
        return await asyncio.to_thread(step) if self._threaded else step()

    def _advance(self, value: Any) -> str:
        assert self._main is not None
        try:
            while True:
                self._waiting = self._main.send(value)
                if self._waiting not in self._early:
                    return json.dumps({"s": "pending", "w": [] if self._waiting is None else [self._waiting]})
                value = self._early.pop(self._waiting)
        except StopIteration as stop:
            return json.dumps({"s": "done", "r": stop.value})
        except Exception as error:  # as the real guest: whatever the script raises is its failure
            kind = error.type if isinstance(error, HostError) else type(error).__name__
            return json.dumps({"s": "failed", "e": {"type": kind, "message": str(error), "file": "script.py", "line": 7, "traceback": "…"}})
