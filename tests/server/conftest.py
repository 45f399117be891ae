"""Real servers for the tests of this room: one process a model, shared by the session."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))  # tiny_gguf
TINY_CONTEXT = 512


@dataclass(frozen=True)
class LiveServer:
    """A `pie serve` process that is ready."""

    url: str
    model: str
    client: openai.OpenAI


@contextmanager
def pie_serve(*flags: str, seconds: float = 90) -> Iterator[LiveServer]:
    """`pie serve` on a free port, until it says that it is ready; ended with SIGTERM, which must end it well."""
    command = [sys.executable, "-m", "pie_server.cli", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=lambda out: [*map(lines.put, out), lines.put(None)], args=(process.stdout,), daemon=True).start()
        try:
            line = lines.get(timeout=seconds)
            assert line is not None, f"pie serve ended with {process.wait()}"
            words = line.split()
            assert words[:2] == ["Pie", "serves"], line
            with openai.OpenAI(base_url=f"{words[-1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
                yield LiveServer(words[-1], words[2], client)
        finally:
            process.terminate()
            code = process.wait(20)
    assert code == 0


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """The default model on the cpu device."""
    with pie_serve("--device", "cpu", "--kv-pool-mb", "256") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer checkpoint with a context of TINY_CONTEXT tokens."""
    from tiny_gguf import write_tiny_gguf

    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_gguf(path, context=TINY_CONTEXT)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[LiveServer]:
    """The tiny model on the cpu device."""
    with pie_serve("--device", "cpu", "--model", str(tiny_model), "--kv-pool-mb", "16", "--max-concurrent", "12") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _beside(pyodide_beside: None) -> None:
    """The core's tests in Pyodide run from here on (tests/conftest.py): the server's often wait."""


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """What a shell starts in the background ignores SIGINT, and so would the servers of these tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
