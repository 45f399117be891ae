"""The pure Python tests of `pie_core` run inside Pyodide too, on Node (pyodide_job.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.pyodide_job import NOT_HERE, ROOT, PyodideJob, files


@pytest.fixture(scope="module")
def pyodide_report(pyodide_job: PyodideJob) -> dict[str, Any]:
    """What became of every test, by id."""
    return pyodide_job.report()


@pytest.mark.timeout(300)  # it waits for the process
def test_the_core_passes_its_own_tests_in_pyodide(pyodide_report: dict[str, Any]) -> None:
    report = pyodide_report
    failed = {name: report["texts"].get(name, "") for name, outcome in report["outcomes"].items() if outcome != "passed"}
    assert failed == {}
    assert report["code"] == 0 and report["platform"] == "emscripten"
    per_file = {name: sum(test.startswith(f"{name}::") for test in report["outcomes"]) for name in files()}
    assert all(per_file.values()), f"files of which nothing ran: {[name for name, count in per_file.items() if not count]}"
    assert len(report["outcomes"]) >= 700
    print(f"{len(report['outcomes'])} tests in {report['seconds']:.1f} s on Python {report['python']} ({report['platform']})")


def test_what_is_left_out_exists() -> None:
    for test in NOT_HERE:
        file, name = test.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text(), test
