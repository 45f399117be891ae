"""Blocking work in daemon threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from pie_server.threads import in_thread


async def test_returns_and_raises() -> None:
    assert await in_thread(lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(KeyError, match="x"):
        await in_thread({}.__getitem__, "x")
    assert await in_thread(lambda: threading.current_thread().daemon) is True


async def test_an_error_is_freed_by_its_references() -> None:
    class Fault(Exception):
        pass

    def fail() -> None:
        raise Fault

    gc.disable()
    try:
        try:
            await in_thread(fail)
        except Fault as error:
            told = weakref.ref(error)
        async with asyncio.timeout(10):
            while told() is not None:  # until the thread has ended
                await asyncio.sleep(0.005)
    finally:
        gc.enable()


async def test_the_loop_goes_on_meanwhile_and_cancelling_does_not_wait() -> None:
    gate, over = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(20)
        over.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not over.is_set()
    gate.set()
    assert over.wait(20)


def test_a_closed_loop_does_not_disturb_the_thread() -> None:
    gate = threading.Event()
    threads_before = set(threading.enumerate())

    async def main() -> None:
        task = asyncio.create_task(in_thread(gate.wait, 5))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    (thread,) = set(threading.enumerate()) - threads_before
    gate.set()
    thread.join(5)
    assert not thread.is_alive()
