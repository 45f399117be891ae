"""What a guest posts wakes the loop at the end of a brief step, and in the middle of one that goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from pie_core.host.budget import Budget
from pie_core.host.port import GuestPort
from pie_server.sandbox import Sandbox
from tests.engine.fake_runner import HIDDEN, VOCAB, limits
from tests.host.support import SERVICES

SOURCE = """
from inferlet import receive, send
import time

async def main(input):
    while (seconds := await receive()) is not None:
        send(seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
"""
MODEL = {"name": "toy", "vocab": VOCAB, "hidden": HIDDEN, "context": 512, "eos": [0]}
REQUEST = json.dumps({"source": SOURCE, "name": "posts.py", "input": {}, "model": MODEL, "chat": {"prefix": []}})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    made.warm()
    yield made
    made.close()


def posted(port: GuestPort) -> list[str]:
    """Names of what was posted since."""
    posts = port.take_posts()
    names = [name for name, _ in posts]
    posts.clear()
    return names


async def test_brief_steps_wake_nobody_and_long_ones_do(sandbox: Sandbox) -> None:
    woken = threading.Event()
    port = GuestPort(SERVICES, limits(), Budget(), woken.set)
    guest = sandbox.open(port)

    async def step(seconds: float, awaited: str) -> str:
        woken.clear()
        answer: str = await guest.resume(f"[[{json.loads(awaited)['w'][0]},true,{seconds}]]")
        return answer

    answer = await guest.start(REQUEST)  # longer than brief: the source is compiled
    posted(port)
    for _ in range(8):  # a busy machine may charge a step for more than its own
        answer = await step(0, answer)
        assert posted(port) == ["send", "receive"]
        if guest._brief:
            break
    assert guest._brief
    answer = await step(0, answer)
    assert not woken.is_set() and posted(port) == ["send", "receive"], "the step's own end tells of them"
    answer = await step(0.2, answer)
    assert woken.is_set(), "whoever waits for the pass does not wait for the author's arithmetic"
    assert posted(port) == ["send", "receive"] and not guest._brief
    await step(0, answer)
    assert woken.is_set(), "after a long step, nothing is held"
    guest.close()
