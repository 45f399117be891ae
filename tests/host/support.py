"""A process over the fake runner, with a toy tokenizer and chat template."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pie_core.engine.loop import Engine
from pie_core.engine.metrics import StepRecord
from pie_core.host.budget import Budget
from pie_core.host.process import Process
from pie_core.host.services import ModelFacts, Services
from pie_core.text.stream import MessageError, check_messages
from tests.engine.fake_runner import HIDDEN, VOCAB
from tests.host.script_guest import Script, ScriptGuest


class ToyTokenizer:
    """One token a character, its code modulo the vocabulary."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class ToyChat:
    """Turns are [role length, *content]."""

    def prefix(self) -> list[int]:
        return [1]

    def encode(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> list[int]:
        ids = [t for m in check_messages(messages) for t in self.role(m["role"], str(m["content"]))]
        return [1, *ids, *([2] if cue else [])]

    def text(self, messages: object, *, cue: bool = True, tools: Sequence[Any] | None = None) -> str:
        return json.dumps(messages)

    def role(self, role: str, content: str) -> list[int]:
        if role not in ("system", "user", "assistant"):
            raise MessageError(f"role {role!r} is unknown")
        return [len(role), *ToyTokenizer().encode(content)]

    def cue(self) -> list[int]:
        return [2]

    def seal(self) -> list[int]:
        return [3]


SERVICES = Services(ModelFacts("toy", VOCAB, HIDDEN, 512, (0,)), ToyTokenizer(), ToyChat())


async def run(
    engine: Engine, script: Script, input: Any = None, *, threaded: bool = False, budget: Budget | None = None, **more: Any
) -> Any:
    """Run a script to its result."""
    process = Process(engine, SERVICES, "test", budget=budget, **more)
    guest = ScriptGuest(process.port, script, threaded=threaded)
    try:
        return await process.run(guest, process.request("", input))
    finally:
        assert guest.closed


@contextmanager
def nothing_older() -> Iterator[None]:
    """What there is already is neither collected nor seen by `alive`: counting what a test makes is ten times as fast."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alive(*packages: str) -> Counter[str]:
    """What there is of the types of `packages`, by name, and of what waits on an event loop. The records of the timeline, which keeps a
    thousand steps, are left out."""
    return Counter(
        type(thing).__qualname__
        for thing in gc.get_objects()
        if (str(type(thing).__module__).startswith(packages) and not isinstance(thing, StepRecord)) or isinstance(thing, asyncio.Future)
    )
