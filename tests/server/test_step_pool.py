"""The threads of guests' steps: results, errors, cancellation and closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from pie_server.step_pool import StepPool


@pytest.fixture
def pool() -> Iterator[StepPool]:
    pool = StepPool(2, "test")
    yield pool
    pool.close()


async def test_results_and_errors_come_back(pool: StepPool) -> None:
    def broken() -> None:
        raise KeyError("x")

    assert await pool.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(KeyError, match="x"):
        await pool.run(broken)
    assert await pool.run(lambda: threading.current_thread().name.startswith("test-"))


async def test_many_jobs_share_the_threads(pool: StepPool) -> None:
    names = await asyncio.gather(*(pool.run(lambda: threading.current_thread().name) for _ in range(50)))
    assert set(names) <= {"test-0", "test-1"}


async def test_a_cancelled_wait_does_not_stop_the_job(pool: StepPool) -> None:
    go, ran = threading.Event(), threading.Event()

    def job() -> None:
        go.wait(5)
        ran.set()

    waiting = pool.run(job)
    waiting.cancel()
    go.set()
    assert await pool.run(ran.wait, 5)


async def test_idle_threads_keep_nothing_alive(pool: StepPool) -> None:
    class Big:
        pass

    big = Big()
    seen = weakref.ref(big)
    await pool.run(lambda b: b, big)
    del big
    await pool.run(int)
    await pool.run(int)
    gc.collect()
    assert seen() is None


def test_a_loop_that_is_gone_is_no_error() -> None:
    pool = StepPool(1, "test")
    go = threading.Event()

    async def leave() -> None:
        pool.run(go.wait, 5)

    asyncio.run(leave())
    go.set()
    pool.close()
