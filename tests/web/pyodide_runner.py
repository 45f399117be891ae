"""Runs inside Pyodide: the real pytest over test files of this repository; `run(...)` gives a JSON report."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import sys
import time
from asyncio import base_events, events
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path("/repo")
NO_PARAMETERS = SimpleNamespace(params={})


class PlainLoop(base_events.BaseEventLoop):
    """An event loop without sockets or threads: Pyodide's own cannot run until a coroutine completes without stack switching."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for the next timer; there is no input or output to wait for."""
        if timeout is None:
            raise RuntimeError("the test waits for something that nothing here will bring")
        time.sleep(max(0.0, timeout))
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What `coroutine` returns, run to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=PlainLoop) as runner:
        return runner.run(coroutine)


class Plugin:
    """Runs coroutine tests and collects what became of every test. `examples`: most of a stateful machine."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.outcomes: dict[str, str] = {}
        self.texts: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from hypothesis import settings  # behind what `run` installs for it

        items[:] = [item for item in items if not getattr(item, "callspec", NO_PARAMETERS).params.get("threaded")]  # no threads here
        for item in items:
            machine = getattr(item, "cls", None)
            if isinstance(getattr(machine, "settings", None), settings) and machine.settings.max_examples > self.examples:
                machine.settings = settings(machine.settings, max_examples=self.examples)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        run_coroutine(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
            if report.outcome != "passed":
                self.texts[report.nodeid] = report.longreprtext[-3000:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.texts[report.nodeid] = report.longreprtext[-3000:]


def write_tiny_gguf(path: str | Path, **options: Any) -> Path:
    """What tests/support/tiny_gguf.py would write with NumPy: a copy of the file that test_pyodide.py wrote with it."""
    made = Path("/packages/tiny") / f"{json.dumps(options, sort_keys=True)}.gguf"
    return Path(shutil.copy(made, path))


def run(files: list[str], hypothesis_version: str, arguments: list[str], examples: int) -> str:
    """Run `files` (relative to the repository). `examples`: see Plugin."""
    sys.path.insert(0, str(ROOT))
    sys.modules["tests.support.tiny_gguf"] = sys.modules[__name__]
    import hypothesis_native  # beside this file

    hypothesis_native.install(hypothesis_version)
    plugin = Plugin(examples)
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:terminal", "--noconftest"]
    options += ["--import-mode=importlib", "-c", "/dev/null"]
    start = time.perf_counter()
    asyncio.new_event_loop, asyncio.run = PlainLoop, run_coroutine  # what tests call that are no coroutines
    outer = events._get_running_loop()
    events._set_running_loop(None)  # Pyodide's own always counts as running
    code = pytest.main([*options, f"--rootdir={ROOT}", *arguments, *[str(ROOT / f) for f in files]], plugins=[plugin])
    events._set_running_loop(outer)
    report = {"code": int(code), "python": sys.version.split()[0], "platform": sys.platform, "seconds": time.perf_counter() - start}
    return json.dumps({**report, "outcomes": plugin.outcomes, "texts": plugin.texts})
