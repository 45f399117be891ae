"""What the tests of the page share: the run of the core's tests in Pyodide goes on beside the browser's, which leaves it a core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.pyodide_job import PyodideJob


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that look at that run come last of the session: nobody waits for it any earlier."""
    items.sort(key=lambda item: "pyodide_report" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session", autouse=True)
def pyodide_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PyodideJob]:
    """The run, started at the first test of this folder if any test of the session asks for its report."""
    job = PyodideJob(tmp_path_factory.mktemp("pyodide"))
    if any("pyodide_report" in getattr(item, "fixturenames", ()) for item in request.session.items):
        job.start()
    yield job
    job.stop()
