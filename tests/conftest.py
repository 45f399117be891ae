"""What rooms share: the run of the core's tests in Pyodide goes on beside those of the server and of the page, which leave it a core."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.web.pyodide_job import PyodideJob


def pytest_collection_finish() -> None:
    """Leave the collected tests out of every collection of garbage from here on: thousands of items took each of them 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pyodide_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PyodideJob]:
    """The run, to be started; ended with the session."""
    job = PyodideJob(tmp_path_factory.mktemp("pyodide"))
    yield job
    job.stop()


@pytest.fixture(scope="session")
def pyodide_beside(request: pytest.FixtureRequest, pyodide_job: PyodideJob) -> None:
    """The run was started, if any test of the session asks for its report."""
    if any("pyodide_report" in getattr(item, "fixturenames", ()) for item in request.session.items):
        pyodide_job.start()
