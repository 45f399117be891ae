"""What the tests of the page share: one Chromium; and they begin with the run of the core's tests in Pyodide beside them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.web.browser import chromium

HERE = Path(__file__).parent


class Shared:
    """A Chromium, opened by the first who asks."""

    def __init__(self) -> None:
        self._browser: Browser | None = None
        self._stack = ExitStack()

    def open(self) -> Browser:
        """The browser that is open."""
        if self._browser is None:
            self._browser = self._stack.enter_context(chromium())
        return self._browser

    def close(self) -> None:
        """Close it, if it is open; the next who asks opens another."""
        self._browser = None
        self._stack.close()


SHARED = pytest.StashKey[Shared]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHARED] = Shared()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that look at that run come last of the session: nobody waits for it any earlier."""
    items.sort(key=lambda item: "pyodide_report" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Behind the last module that uses it, here or before tests of another folder, the browser is closed: where Playwright is open, nobody
    else can run an event loop in this thread."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    items = item.session.items
    following = takewhile(lambda each: HERE in each.path.parents, items[items.index(item) + 1 :])
    if not any("browser" in getattr(each, "fixturenames", ()) for each in following):
        item.config.stash[SHARED].close()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The session may have been broken off."""
    config.stash[SHARED].close()


@pytest.fixture(scope="session", autouse=True)
def _beside(pyodide_beside: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Browser:
    """The Chromium of these tests: open a context, and close it."""
    return pytestconfig.stash[SHARED].open()
