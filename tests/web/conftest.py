"""What the tests of the page share: they begin with the run of the core's tests in Pyodide beside them, and end with its report."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that look at that run come last of the session: nobody waits for it any earlier."""
    items.sort(key=lambda item: "pyodide_report" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session", autouse=True)
def _beside(pyodide_beside: None) -> None:
    """See tests/conftest.py."""
