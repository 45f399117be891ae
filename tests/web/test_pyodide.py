"""The pure Python tests of `pie_core` run inside Pyodide too, on Node. What does not run there is listed here with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pie_server.build.web import WEB, page_tools
from tests.support.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYODIDE = WEB / "node_modules" / "pyodide"
ROOMS = ("eta", "engine", "host", "text", "weights", "poem")
PACKAGES = ("_pytest", "pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "_hypothesis_globals.py",
    "sortedcontainers", "jinja2", "markupsafe")  # fmt: skip
TINY = [{}, {"layers": 2}, {"layers": 3}]  # arguments of write_tiny_gguf in tests/poem

NEED_MORE = {  # files
    "tests/engine/test_on_devices.py": "opens the server's devices; tests/web/test_conformance.py runs the page's",
    "tests/eta/test_eta_dtypes.py": "NumPy",
    "tests/eta/test_eta_library.py": "NumPy",
    "tests/eta/test_eta_rng.py": "NumPy",
    "tests/text/test_chat.py": "the tokenizers package; the page's tokenizer is JavaScript",
    "tests/text/test_tokenizer.py": "the tokenizers package; the page's tokenizer is JavaScript",
    "tests/weights/test_gguf.py": "NumPy and the gguf package",
}
NOT_HERE = {  # tests; all their parameters
    "tests/engine/test_scheduling.py::test_idle_sleeps": "Pyodide has no time.thread_time",
    "tests/eta/test_eta_program.py::test_the_largest_texts_are_judged_quickly": "Pyodide has no time.thread_time",
    "tests/host/test_port.py::test_posts_cross_threads_in_order": "Pyodide has no threads",
    "tests/host/test_process.py::test_the_seed_loop[True]": "Pyodide has no threads",
    "tests/poem/test_ops.py::test_sizes_that_no_model_has_are_refused_by_key_and_value": "writes a checkpoint with NumPy for each case",
    "tests/text/test_stream.py::test_the_module_needs_the_standard_library_only": "Pyodide has no processes",
    "tests/text/test_template.py::test_a_template_that_runs_on_is_stopped": "deep templates; the page renders them in JavaScript",
    "tests/text/test_template.py::test_the_default_time_limit_ends_nested_ranges_within_a_second": "Pyodide has no time.thread_time",
    "tests/text/test_template.py::test_a_template_cannot_make_something_huge": "Pyodide has no time.thread_time",
    "tests/text/test_template.py::test_threads_render_at_once": "Pyodide has no threads",
}


def files() -> list[str]:
    """Every test file of the rooms that is not listed as needing more."""
    found = [str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "tests" / room).glob("test_*.py")]
    assert set(NEED_MORE) <= set(found), "a file listed here is gone"
    return sorted(set(found) - set(NEED_MORE))


def packages(folder: Path) -> Path:
    """The pure Python packages that pytest needs, copied from this environment; checkpoints for tests that write some."""
    installed = Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        source = installed / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, folder / name)
    (folder / "tiny").mkdir()
    for options in TINY:
        write_tiny_gguf(folder / "tiny" / f"{json.dumps(options, sort_keys=True)}.gguf", **options)  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of every test, by id."""
    node = page_tools().path
    target = tmp_path_factory.mktemp("pyodide") / "report.json"
    left_out = [option for test in NOT_HERE for option in ("--deselect", test)]
    job = json.dumps([files(), version("hypothesis"), left_out])
    command = [node, HERE / "pyodide_tests.mjs", PYODIDE, ROOT, packages(tmp_path_factory.mktemp("packages")), job, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_the_core_passes_its_own_tests_in_pyodide(report: dict[str, Any]) -> None:
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
