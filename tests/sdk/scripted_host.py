"""A host for inferlets without an engine: answers every op as docs/architecture.md section 7 says, outputs from a script."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

MODEL = {"name": "scripted", "vocab": 256, "hidden": 8, "context": 64, "eos": [2, 5]}
Reply = Callable[[dict[str, Any], int], list[Any]]


class Guest(Protocol):
    async def start(self, request: str) -> str: ...
    async def resume(self, events: str) -> str: ...


class Fail(Exception):
    """In a reply: this output is rejected with {"type", "message"}."""

    def __init__(self, kind: str, message: str = "scripted", **fields: Any) -> None:
        self.error = {"type": kind, "message": message, **fields}


def letters(submit: dict[str, Any], n: int) -> list[Any]:
    """The n-th pass answers with the n-th letter."""
    return [65 + n % 26 for _ in submit["outs"]]


class ScriptedHost:
    """`calls` records (op, payload). `reply(submit, n)` gives one value (or Fail, or None to stay silent) for each output."""

    def __init__(self, reply: Reply = letters) -> None:
        self.reply = reply
        self.calls: list[tuple[str, Any]] = []
        self.sent: list[Any] = []
        self.logs: list[tuple[str, str]] = []
        self.inbox: list[Any] = []  # what `receive` gets
        self.cells: dict[int, list[Any]] = {}  # what `ch.take` and `ch.read` get, by channel
        self.open_error: dict[str, Any] | None = None
        self.refuse: dict[str, dict[str, Any]] = {}  # op -> error
        self.awaited: list[list[int]] = []  # "w" of each pending answer
        self._events: list[list[Any]] = []
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._sleeps: list[tuple[float, int]] = []
        self._submits = 0

    def payloads(self, op: str) -> list[Any]:
        """The payloads of all calls of `op`."""
        return [p for name, p in self.calls if name == op]

    def call(self, op: str, payload: str) -> str:
        fields = json.loads(payload)
        self.calls.append((op, fields))
        if op in self.refuse:
            return json.dumps({"error": self.refuse[op]})
        answer = getattr(self, "op_" + op.replace(".", "_"), lambda fields: None)(fields)
        return "" if answer is None else json.dumps(answer)

    def op_encode(self, f: dict[str, Any]) -> Any:
        return list(f["text"].encode())

    def op_decode(self, f: dict[str, Any]) -> Any:
        return bytes(f["ids"]).decode("utf-8", "replace")

    def op_bytes(self, f: dict[str, Any]) -> Any:
        return [bytes([i]).hex() for i in f["ids"]]

    def op_chat_role(self, f: dict[str, Any]) -> Any:
        return [1, *f["content"].encode(), 2]

    def op_chat_cue(self, f: dict[str, Any]) -> Any:
        return [1, 3]

    def op_chat_seal(self, f: dict[str, Any]) -> Any:
        return [2]

    def op_chat_render(self, f: dict[str, Any]) -> Any:
        return [len(f["messages"]), int(f["cue"])]

    def op_chat_text(self, f: dict[str, Any]) -> Any:
        return f"{len(f['messages'])} messages"

    def op_log(self, f: dict[str, Any]) -> None:
        self.logs.append((f["level"], f["text"]))

    def op_send(self, f: dict[str, Any]) -> None:
        self.sent.append(f["value"])

    def op_submit(self, f: dict[str, Any]) -> None:
        values = self.reply(f, self._submits)
        self._submits += 1
        for fid, value in zip(f["outs"], values, strict=True):
            if isinstance(value, Fail):
                self._events.append([fid, False, value.error])
            elif value is not None:
                self._events.append([fid, True, value])

    def op_sleep(self, f: dict[str, Any]) -> None:
        self._sleeps.append((time.monotonic() + f["ms"] / 1000, f["f"]))

    def op_receive(self, f: dict[str, Any]) -> None:
        self._waiting.append(("receive", f))

    def op_ch_take(self, f: dict[str, Any]) -> None:
        self._waiting.append(("take", f))

    def op_ch_read(self, f: dict[str, Any]) -> None:
        self._waiting.append(("read", f))

    def op_ws_length(self, f: dict[str, Any]) -> None:
        self._events.append([f["f"], True, 7])

    op_ws_save = op_ws_cached = op_prewarm = op_ws_length

    def op_ws_open(self, f: dict[str, Any]) -> None:
        self._events.append([f["f"], False, self.open_error] if self.open_error else [f["f"], True, 7])

    def due(self) -> list[list[Any]]:
        """Events that can be delivered now."""
        for entry in list(self._waiting):
            kind, f = entry
            source = self.inbox if kind == "receive" else self.cells.get(f["ch"], [])
            if source:
                value = source[0] if kind == "read" else source.pop(0)
                outcome = [False, value.error] if isinstance(value, Fail) else [True, value]
                self._events.append([f["f"], *outcome])
                self._waiting.remove(entry)
        now = time.monotonic()
        for entry in sorted(self._sleeps):
            if entry[0] <= now:
                self._events.append([entry[1], True, None])
                self._sleeps.remove(entry)
        events, self._events = self._events, []
        return events


def request(source: str, input: Any = None, name: str = "program.py") -> str:
    """A start request."""
    return json.dumps({"source": source, "name": name, "input": {} if input is None else input, "model": MODEL, "chat": {"prefix": [9]}})


async def drive(
    guest: Guest, host: ScriptedHost, source: str, input: Any = None, on_pending: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Run `source` to its end; the final answer. `on_pending` is called before each resume, to change the host's script."""
    answer = json.loads(await guest.start(request(source, input)))
    deadline = time.monotonic() + 20
    while answer["s"] == "pending":
        host.awaited.append(answer["w"])
        assert answer["w"], "pending with nothing awaited"
        if on_pending:
            on_pending()
        events = host.due()
        while not events and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
            events = host.due()
        assert events, f"nothing arrives for {answer['w']}"
        answer = json.loads(await guest.resume(json.dumps(events)))
    return answer


async def result_of(guest: Guest, host: ScriptedHost, source: str, input: Any = None, on_pending: Callable[[], None] | None = None) -> Any:
    """As `drive`, for a program that must succeed: what main returned."""
    answer = await drive(guest, host, source, input, on_pending)
    assert answer["s"] == "done", answer["e"]["traceback"]
    return answer["r"]
