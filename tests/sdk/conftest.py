"""The guest SDK in this process, over a scripted host instead of the component's import."""

from __future__ import annotations

import asyncio
import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import inferlet_sdk
from tests.sdk.scripted_host import ScriptedHost

SDK = Path(inferlet_sdk.__file__).parent / "python"


class Local:
    """The SDK as a guest: `start` and `resume` of a freshly imported package."""

    def __init__(self, host: ScriptedHost) -> None:
        from inferlet import _loop, _run

        self.host = host
        self._run = _run
        self.loop = _loop.loop

    async def start(self, request: str) -> str:
        return self._step(self._run.start, request)

    async def resume(self, events: str) -> str:
        return self._step(self._run.resume, events)

    def _step(self, step: object, text: str) -> str:
        outer, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self.loop._close_asyncgen)
        streams = sys.stdin, sys.stdout, sys.stderr
        try:
            return step(text)  # type: ignore[operator, no-any-return]
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(outer)


def _forget() -> None:
    for name in [n for n in sys.modules if n == "inferlet" or n.startswith(("inferlet.", "wit_world")) or n == "inferlet_main"]:
        del sys.modules[name]


@pytest.fixture(scope="package", autouse=True)
def _garbage_of_these_tests_only() -> None:
    """`guest` collects after each test: let it look at what that test made, not at what the rooms before left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
def guest(host: ScriptedHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    _forget()
    wit = types.ModuleType("wit_world")
    imports = types.ModuleType("wit_world.imports")
    imports.host = types.SimpleNamespace(call=host.call)  # type: ignore[attr-defined]
    wit.imports = imports  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wit_world", wit)
    monkeypatch.setitem(sys.modules, "wit_world.imports", imports)
    monkeypatch.syspath_prepend(str(SDK))
    hooks = sys.get_asyncgen_hooks()
    local = Local(host)
    yield local
    sys.set_asyncgen_hooks(*hooks)
    local.loop.awaited.clear()
    del local
    gc.collect()
    _forget()
