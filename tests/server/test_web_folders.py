"""Folders of the page that are in use stay, whoever builds: held by another process, until it ends, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from fake_backend import FakeBackend

from pie_server.app import create_app
from pie_server.build import web, web_folders, wheels
from pie_server.build.web import Part, built_assets, web_assets
from pie_server.build.web_folders import REMOVED, hold, prune_unheld
from pie_server.config import Settings
from pie_server.web import ASSETS, Assets

HOLDER = """
import sys
from pathlib import Path
from pie_server.build.web_folders import hold
held = hold(Path(sys.argv[1]))
print(held is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def builds(tmp_path: Path) -> list[Path]:
    """Four builds, the oldest first."""
    made = [tmp_path / f"web-all-{name}" for name in "abcd"]
    for age, folder in enumerate(made):
        folder.mkdir()
        (folder / "hello.html").write_text("<!doctype html>")
        os.utime(folder, (age + 1, age + 1))
    return made


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder; it is killed at the end, as by a crash."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def names(folder: Path) -> str:
    return "".join(sorted(path.name[-1] for path in folder.iterdir()))


def test_what_another_process_holds_stays_until_that_ends(tmp_path: Path, builds: list[Path]) -> None:
    with holder(builds[0]):
        os.utime(builds[0], (1, 1))  # as if it had been used long ago: the lock alone keeps it
        prune_unheld(tmp_path, "web-all-*", 1)
        assert names(tmp_path) == "ad" and (builds[0] / "hello.html").is_file()
    prune_unheld(tmp_path, "web-all-*", 1)
    assert names(tmp_path) == "d"


def test_to_hold_is_to_use(tmp_path: Path, builds: list[Path]) -> None:
    for folder in builds[:2]:
        held = hold(folder)
        assert held is not None
        held.close()
        held.close()
    prune_unheld(tmp_path, "web-all-*", 2)
    assert names(tmp_path) == "ab"


def test_what_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert hold(tmp_path / "missing") is None and hold(tmp_path / "file") is None


def test_a_folder_that_goes_while_it_is_taken_is_not_held(builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal had its lock first: who waited for it has an open folder without a name."""
    import fcntl

    real = fcntl.flock

    def removed_first(descriptor: int, how: int) -> None:
        builds[0].rename(builds[0].parent / "gone")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    assert hold(builds[0]) is None


def test_a_file_system_without_locks_goes_by_times(tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    held = hold(builds[0])
    assert held is not None
    prune_unheld(tmp_path, "web-all-*", 2)
    assert names(tmp_path) == "ad"
    held.close()


def test_what_a_killed_process_left_of_a_folder_goes(tmp_path: Path) -> None:
    (tmp_path / f"{REMOVED}1-web-all-x").mkdir()
    prune_unheld(tmp_path, "web-all-*", 6)
    assert list(tmp_path.iterdir()) == []


async def test_a_servers_page_outlives_the_builds_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten states of the sources are built beside a server that found its page in the same cache."""
    source = b"0"

    def build(stage: Path, node: object) -> None:
        (stage / "hello.html").write_bytes(source)

    monkeypatch.setattr(web, "_parts", lambda cache: [Part("one", {"source": source}, build)])
    served = web_assets(tmp_path)
    app = create_app(FakeBackend(), Settings())
    app[ASSETS] = Assets(lambda: built_assets(tmp_path))
    async with TestClient(TestServer(app)) as client:
        for number in range(10):
            async with client.get("/hello") as response:
                assert (response.status, await response.read()) == (200, b"0")
            source = str(number + 1).encode()
            os.utime(served, (1, 1))  # all others were used after it
            web_assets(tmp_path)
    assert len(list((tmp_path / "build").glob("web-all-*"))) == 7
    prune_unheld(tmp_path / "build", "web-all-*", 6)
    assert len(list((tmp_path / "build").glob("web-all-*"))) == 6, "a server that has ended holds nothing"


async def test_a_page_that_is_opened_counts_as_used(builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pie_server.web.TOUCH_S", 0.0)
    app = create_app(FakeBackend(), Settings(page=builds[0]))
    async with TestClient(TestServer(app)) as client:
        for _ in range(2):
            os.utime(builds[0], (1, 1))
            async with client.get("/hello") as response:
                assert response.status == 200
            assert builds[0].stat().st_mtime > 1


async def test_a_page_that_goes_while_it_is_looked_for_is_looked_for_again(tmp_path: Path, builds: list[Path]) -> None:
    found = [tmp_path / "web-all-gone", builds[1]]
    app = create_app(FakeBackend(), Settings())
    app[ASSETS] = Assets(lambda: found.pop(0))
    async with TestClient(TestServer(app)) as client, client.get("/hello") as response:
        assert response.status == 200 and found == []


def test_to_look_for_the_page_no_source_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look at every start: the key is of the sources as they are."""

    def strip(source: bytes) -> bytes:
        raise AssertionError("a source was stripped")

    monkeypatch.setattr(wheels, "without_words", strip)
    assert built_assets(tmp_path) is None


def test_what_strips_the_sources_is_part_of_the_key() -> None:
    inputs = next(part.inputs for part in web._parts(None) if part.name == "wheels")
    assert {"wheels.py", "shrink.py", "pie-core/pie_core/__init__.py"} <= inputs.keys()
    assert inputs["pie-core/pie_core/text/tokenizer.py"].count(b"#") > 0  # as it is in the tree


def test_windows_goes_by_times(tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_folders.sys, "platform", "win32")
    held = hold(builds[0])
    assert held is not None and hold(tmp_path / "missing") is None
    prune_unheld(tmp_path, "web-all-*", 1)
    assert names(tmp_path) == "a"
    held.close()
