"""Inferlets of a script on the core's own host, and its answers: the page's host must answer the same, or leave it to the engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from pie_core.eta import channel
from pie_core.host.process import Process
from tests.engine.fake_runner import HIDDEN, VOCAB, FakeRunner, limits
from tests.engine.support import GREEDY, argmax, running, traced
from tests.host.support import SERVICES

Call = tuple[str, dict[str, Any]]
FOLDING: dict[str, Any] = {"mode": "folding"}
BUFFERED: dict[str, Any] = {"mode": "buffered"}
PIPE, WS, PROG = 1, 2, 3  # what each script begins with


class Cell:
    """A channel as the tracer sees it."""

    is_counter = False

    def __init__(self, dtype: str = "i32", shape: tuple[int, ...] = ()) -> None:
        self.dtype, self.shape, self.capacity = dtype, shape, 1


def program(effects: str, cell: Cell) -> str:
    """The text of a program that takes, reads and puts as `effects` says ("take put"), and returns a token."""

    def epilogue() -> Any:
        token = argmax()
        for effect in effects.split():
            if effect == "put":
                channel.put(cell, token + token == token if cell.dtype == "bool" else token)
            else:
                getattr(channel, effect)(cell)
        return token

    return traced(epilogue).program.text


def submit(out: int | None, tokens: Any = (5, 6, 7), **more: Any) -> Call:
    """A pass of the first working set whose token future `out` brings."""
    given = list(tokens) if isinstance(tokens, tuple) else tokens
    fields = {"pipe": PIPE, "tokens": given, "ws": [WS], "geo": FOLDING, "reads": None, "prog": PROG, "params": [], "chans": []}
    return "submit", {**fields, "outs": [] if out is None else [out], **({"prog": None} if out is None else {}), **more}


def new_channel(ch: int, **more: Any) -> Call:
    return "ch.new", {"ch": ch, "dtype": "i32", "shape": [], "capacity": 1, "seed": None, "host": None, **more}


WRITER, READER, FREE = new_channel(20, host="writer"), new_channel(21, host="reader"), new_channel(22)
TAKES: Call = ("program", {"prog": 30, "text": program("take", Cell())})
PUTS: Call = ("program", {"prog": 31, "text": program("put", Cell())})
STOPS: Call = ("program", {"prog": 32, "text": program("put", Cell("bool"))})

# Scripts whose last call is refused by name; "settle": wait until all that was posted has happened.
FIXED: list[list[Call | str]] = [
    # buffers
    [("ws.commit", {"ws": WS, "n": 1})],
    [("ws.discard", {"ws": WS, "n": 9})],
    [("ws.truncate", {"ws": WS, "n": 99})],
    [submit(40, geo=BUFFERED), ("ws.commit", {"ws": WS, "n": 4})],
    [submit(40, geo=BUFFERED), ("ws.commit", {"ws": WS, "n": [0, 3]})],
    [submit(40, geo=BUFFERED), "settle", ("ws.commit", {"ws": WS, "n": [0, 2]})],
    [submit(40, geo={**BUFFERED, "tree": [-1, -1, 0]}), "settle", ("ws.commit", {"ws": WS, "n": 2})],
    [submit(40, geo={**BUFFERED, "tree": [-1, -1, 0]}), "settle", ("ws.commit", {"ws": WS, "n": [1, 2]})],
    [submit(40), "settle", ("ws.truncate", {"ws": WS, "n": 2})],
    [submit(None), ("ws.length", {"ws": WS, "f": 41}), "settle", ("ws.truncate", {"ws": WS, "n": 4})],
    [submit(40), "settle", ("ws.fork", {"ws": 10, "of": WS, "pipe": None, "buffer": False}), "settle",
     submit(41, ws=[10]), "settle", ("ws.truncate", {"ws": 10, "n": 0})],
    [submit(40), ("ws.save", {"ws": WS, "name": "kept", "f": 41}), "settle", ("ws.open", {"ws": 10, "name": "kept", "f": 42}), "settle",
     submit(43, ws=[10]), "settle", ("ws.truncate", {"ws": 10, "n": 0})],
    [submit(40, geo=BUFFERED), "settle", ("ws.commit", {"ws": WS, "n": 1}), ("ws.discard", {"ws": WS, "n": 3})],
    # geometry
    *([submit(40, geo=geo)] for geo in (
        {**FOLDING, "tree": [-1, -1, -1]}, {**BUFFERED, "tree": []}, {**BUFFERED, "tree": [-2, 0, 1]},
        {**FOLDING, "sinks": 2}, {**FOLDING, "window": -1}, {**FOLDING, "window": True}, {"mode": "sliding"}, {"mode": None},
        {**FOLDING, "shape": "it's"}, {**FOLDING, "mask": []}, {**FOLDING, "mask": [[True], [True, False], [True]]},
        {**FOLDING, "mask": [[True, 1, 0]] * 3}, {**FOLDING, "mask": [[1], [2], [4]], "width": 40}, {**FOLDING, "mask": [[1], [3]]},
        {**FOLDING, "mask": {"rows": [[None, 1.5, "x"]]}},
    )),
    [("ws.new", {"ws": 10, "reuse": True}), submit(40, tokens=[[1, 2], [3, 4]], ws=[WS, 10], geo={**FOLDING, "mask": [[1], [3]]})],
    # tokens and read-outs
    [submit(40, tokens=[1, VOCAB])],
    [submit(40, tokens=[1, "a"])],
    [submit(40, tokens=[[1], [2]])],
    [submit(40, tokens=[])],
    [submit(40, tokens=[[1], 5], ws=[WS, WS])],
    [submit(40, ws=[])],
    [submit(40, tokens=list(range(40)), reads=[list(range(20))])],
    [submit(40, tokens=list(range(40)), reads=[[0, 39]])],
    [submit(40, reads=[[3]])],
    [submit(40, reads=[])],
    [submit(40, reads=[[]])],
    [submit(40, reads=[5])],
    [submit(40, outs=[40, 41])],
    [submit(40, params=[1])],
    [submit(40, outs=[40, 40])],
    [submit(40), submit(40)],
    [submit(40, prog=9)],
    [submit(40, pipe=WS)],
    [("pipe.close", {"pipe": PIPE}), submit(40)],
    # channels
    [WRITER, ("ch.put", {"ch": 20, "words": [5]}), ("ch.put", {"ch": 20, "words": [6]})],
    [WRITER, ("ch.put", {"ch": 20, "words": [5, 6]})],
    [FREE, ("ch.put", {"ch": 22, "words": [5]})],
    [FREE, ("ch.take", {"ch": 22, "f": 40})],
    [READER, ("ws.commit", {"ws": 9, "n": {"ch": 21}})],
    [FREE, ("ws.commit", {"ws": WS, "n": {"ch": 22}})],
    [WRITER, submit(40, tokens={"ch": 20})],
    [WRITER, ("ch.put", {"ch": 20, "words": [5]}), submit(40, tokens={"ch": 20}), submit(41, tokens={"ch": 20})],
    [WRITER, ("ch.put", {"ch": 20, "words": [5]}), submit(40, tokens={"ch": 20}), ("ch.put", {"ch": 20, "words": [6]})],
    [WRITER, ("ch.put", {"ch": 20, "words": [5]}), submit(40, tokens={"ch": 20}), "settle", ("ch.put", {"ch": 20, "words": [6]}),
     ("ch.set", {"ch": 20, "words": [7]}), ("ch.put", {"ch": 20, "words": [8]})],
    [new_channel(20, dtype="f32"), submit(40, tokens={"ch": 20})],
    [new_channel(20, shape=[3]), ("ws.new", {"ws": 10, "reuse": True}), submit(40, tokens={"ch": 20}, ws=[WS, 10])],
    [new_channel(20, shape=[40]), submit(40, tokens={"ch": 20})],
    [new_channel(20, shape=[2, 0])],
    [new_channel(20, shape=[2], seed=[1, 2, 3])],
    [TAKES, READER, submit(40, prog=30, chans=[21])],
    [TAKES, WRITER, submit(40, prog=30, chans=[20])],
    [PUTS, WRITER, submit(40, prog=31, chans=[20])],
    [PUTS, new_channel(20, dtype="u32"), submit(40, prog=31, chans=[20])],
    [("pipe.stop_when", {"pipe": PIPE, "ch": 20}), FREE, ("pipe.stop_when", {"pipe": PIPE, "ch": 22})],
    [STOPS, new_channel(20, dtype="bool"), submit(40, prog=32, chans=[20]), ("pipe.stop_when", {"pipe": PIPE, "ch": 20})],
    [new_channel(20, dtype="bool"), ("pipe.stop_when", {"pipe": PIPE, "ch": 20}), new_channel(21, dtype="bool"),
     ("pipe.stop_when", {"pipe": PIPE, "ch": 21})],
    [("program", {"prog": 30, "text": GREEDY.program.text.replace(str(VOCAB), "7")})],
    # ids
    [("ws.drop", {"ws": WS}), ("ws.length", {"ws": WS, "f": 40})],
    [("ws.fork", {"ws": WS, "of": WS, "pipe": None, "buffer": False})],
    [("ws.fork", {"ws": 10, "of": WS, "pipe": 9, "buffer": False})],
    [("ws.open", {"ws": 10, "name": "kept", "f": 10})],
    [("ws.save", {"ws": WS, "name": "a/b", "f": 10})],
    [("sleep", {"ms": 10**6, "f": 40}), ("receive", {"f": 40})],
    [READER, ("ch.drop", {"ch": 21}), ("ch.take", {"ch": 21, "f": 40})],
    [WRITER, ("ch.put", {"ch": 20, "words": [5]}), submit(40, tokens={"ch": 20}), ("ch.drop", {"ch": 20}),
     "settle", ("ch.drop", {"ch": 20})],
    [("ch.drop", {"ch": WS})],
    [submit(40), ("program.drop", {"prog": PROG}), submit(41)],
    [FREE, ("program.drop", {"prog": 22}), ("ch.drop", {"ch": 22}), ("program.drop", {"prog": 22})],
]  # fmt: skip


class Script:
    """One inferlet, whose calls are answered by the core and written down."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._flying: set[int] = set()
        self.steps: list[dict[str, Any]] = []

    def call(self, op: str, fields: dict[str, Any]) -> str:
        """The answer: "" or JSON text."""
        self._process._executor.drain()  # as if the inferlet were slow: what does not wait for a pass has happened
        answer = self._process.port.call(op, json.dumps(fields))
        if not answer:
            self._flying.update([fields["f"]] if "f" in fields else fields.get("outs", ()))
        self.steps.append({"op": op, "fields": fields, "answer": json.loads(answer) if answer else ""})
        return answer

    async def settle(self) -> None:
        """Wait until everything that was posted has happened, and write down the events."""
        executor = self._process._executor
        events: list[list[Any]] = []
        for _ in range(400):
            executor.drain()
            events += json.loads(executor.take_events())
            self._flying -= {event[0] for event in events}
            if not self._flying and not self._process._flying():
                break
            await asyncio.sleep(0.001)
        self.steps.append({"events": events})


async def _record(scripts: Sequence[Any]) -> list[list[dict[str, Any]]]:
    recorded = []
    async with running(FakeRunner()) as engine:
        for script in scripts:
            process = Process(engine, SERVICES, "script")
            made = Script(process)
            for call in (
                ("pipe.new", {"pipe": PIPE}),
                ("ws.new", {"ws": WS, "reuse": True}),
                ("program", {"prog": PROG, "text": GREEDY.program.text}),
            ):
                made.call(*call)
            if isinstance(script, int):
                await _wander(made, random.Random(script))
            else:
                for call in script:
                    await made.settle() if isinstance(call, str) else made.call(*call)
            recorded.append(made.steps)
            process.close()
            await asyncio.sleep(0.002)
    return recorded


async def _wander(made: Script, chance: random.Random) -> None:
    """Edits of sets at random, right and wrong ones, some of them before the passes in front of them have ended."""
    sets, next_id = [WS], 100
    for _ in range(60):
        next_id += 1
        ws, n = chance.choice(sets), chance.randrange(8)
        buffered = chance.random() < 0.6
        geo = BUFFERED if buffered else FOLDING
        tokens = [chance.randrange(VOCAB) for _ in range(1 + n % 4)]
        if buffered and chance.random() < 0.4:
            geo = {**BUFFERED, "tree": [chance.randrange(-1, k + 1) if k else -1 for k in range(len(tokens))]}
        kind = chance.randrange(10)
        if kind < 4:
            made.call(*submit(next_id, tokens=tokens, ws=[ws], geo=geo))
        elif kind == 4:
            if not made.call("ws.fork", {"ws": next_id, "of": ws, "pipe": None, "buffer": chance.random() < 0.5}):
                sets.append(next_id)
        elif kind == 5:
            made.call("ws.commit", {"ws": ws, "n": n})
        elif kind == 6:
            made.call("ws.commit", {"ws": ws, "n": sorted(chance.sample(range(8), n % 4))})
        elif kind == 7:
            made.call("ws.discard", {"ws": ws, "n": None if n == 0 else n})
        elif kind == 8:
            made.call("ws.truncate", {"ws": ws, "n": chance.choice((0, n, 3 * n))})
        else:
            made.call("ws.length", {"ws": ws, "f": next_id})
        if chance.random() < 0.8:
            await made.settle()


def refusals() -> dict[str, Any]:
    """Scripts of calls with the core's answers, and the limits of the model that they run on."""
    size = limits()
    model = {"vocab": VOCAB, "hidden": HIDDEN, "max_tokens": size.max_tokens, "max_reads": size.max_reads}
    recorded = asyncio.run(_record([*FIXED, *range(40)]))
    return {"model": model, "fixed": recorded[: len(FIXED)], "random": recorded[len(FIXED) :]}
