"""The run of `pie_core`'s pure Python tests inside Pyodide, on Node. What does not run there is listed here with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
    "tests/eta/test_eta_dtypes.py": "NumPy",
    "tests/eta/test_eta_library.py": "NumPy",
    "tests/eta/test_eta_not_finite.py": "NumPy",
    "tests/eta/test_eta_numpy.py": "NumPy",
    "tests/eta/test_eta_ops.py": "NumPy",
    "tests/eta/test_eta_reference.py": "pie_server, which writes the reference",
    "tests/eta/test_eta_rng.py": "NumPy",
    "tests/poem/test_poem_recurrence.py": "writes checkpoints with NumPy",
    "tests/text/test_chat.py": "the tokenizers package; the page's tokenizer is JavaScript",
    "tests/text/test_tokenizer.py": "the tokenizers package; the page's tokenizer is JavaScript",
    "tests/weights/test_gguf.py": "NumPy and the gguf package",
}
EXAMPLES = 30  # of a stateful machine, where Python is five times slower; CPython runs the others of the same derandomised series
FILES = "the store of files writes in a thread; the page keeps saved sets in memory"
# Tests with a parameter `threaded` that is true are left out by pyodide_runner.py: Pyodide has no threads.
NOT_HERE = {  # beginnings of tests' ids: without brackets, all their parameters
    "tests/engine/test_saved_sets.py::test_a_set_goes_on_in_another_engine[files": FILES,
    "tests/engine/test_saved_sets.py::test_buffer_tree_and_fork_points_come_along[files": FILES,
    "tests/engine/test_saved_sets.py::test_later_writes_and_saves_change_nothing_of_an_earlier_one[files": FILES,
    "tests/engine/test_saved_sets.py::test_names_belong_to_a_tenant_and_are_plain[files": FILES,
    "tests/engine/test_saved_sets.py::test_an_empty_set_and_one_of_unknown_ids[files": FILES,
    "tests/engine/test_saved_sets.py::test_a_paused_set_is_saved_and_a_set_without_room_is_computed_again[files": FILES,
    "tests/engine/test_saved_sets.py::test_no_room_is_told_with_numbers[files": FILES,
    "tests/engine/test_saved_sets.py::test_a_failed_set_is_not_saved[files": FILES,
    "tests/engine/test_saved_sets.py::test_ending_in_the_middle[files": FILES,
    "tests/engine/test_saved_sets.py::test_too_many_at_once_are_refused[files": FILES,
    "tests/engine/test_saved_sets.py::test_opened_pages_are_not_offered_to_others[files": FILES,
    "tests/engine/test_saved_sets.py::test_of_two_saves_of_one_name_the_one_asked_for_last_is_kept[files": FILES,
    "tests/engine/test_saved_sets.py::test_where_the_last_save_of_a_name_fails_the_one_before_it_is_kept[files": FILES,
    "tests/engine/test_saved_sets.py::test_files_are_whole_checked_and_private": FILES,
    "tests/engine/test_saved_sets.py::test_files_let_the_longest_unused_go": FILES,
    "tests/engine/test_saved_sets.py::test_a_folder_that_cannot_be_written_or_read_is_told": FILES,
    "tests/engine/test_scheduling.py::test_idle_sleeps": "Pyodide has no time.thread_time",
    "tests/eta/test_eta_canonical.py::test_processes_agree": "Pyodide has no processes",
    "tests/eta/test_eta_hostile.py::test_20_000_mutated_programs_do_no_harm": "takes six seconds; test_eta_program.py mutates texts",
    "tests/eta/test_eta_program.py::test_the_largest_texts_are_judged_quickly": "Pyodide has no time.thread_time",
    "tests/host/test_port.py::test_posts_cross_threads_in_order": "Pyodide has no threads",
    "tests/poem/test_ops.py::test_sizes_that_no_model_has_are_refused_by_key_and_value": "writes a checkpoint with NumPy for each case",
    "tests/text/test_stream.py::test_the_module_needs_the_standard_library_only": "Pyodide has no processes",
    "tests/text/test_template.py::test_a_template_that_runs_on_is_stopped": "deep templates; the page renders them in JavaScript",
    "tests/text/test_template.py::test_the_default_time_limit_ends_nested_ranges": "Pyodide has no time.thread_time",
    "tests/text/test_template.py::test_a_template_cannot_make_something_huge": "Pyodide has no time.thread_time",
    "tests/text/test_template.py::test_threads_render_at_once": "Pyodide has no threads",
}


def files() -> list[str]:
    """Every test file of the rooms that is not listed as needing more; test_*_on_devices.py open the server's devices, and
    tests/web/test_conformance.py the page's."""
    found = [
        str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "tests" / room).glob("test_*.py") if "on_devices" not in path.name
    ]
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


class PyodideJob:
    """The run, in a process of its own below `folder`: `start` once, then `report` as often as you like."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._report: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin; harmless when it runs already."""
        if self._process is not None:
            return
        left_out = [option for test in NOT_HERE for option in ("--deselect", test)]
        job = json.dumps([files(), version("hypothesis"), left_out, EXAMPLES])
        (self._folder / "packages").mkdir()
        folders = [PYODIDE, ROOT, packages(self._folder / "packages")]
        command = [page_tools().path, HERE / "pyodide_tests.mjs", *folders, job, self._folder / "report.json"]
        with (self._folder / "stderr").open("wb") as sink:
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink)

    def report(self) -> dict[str, Any]:
        """What became of every test, by id."""
        self.start()
        assert self._process is not None
        code = self._process.wait(240)
        assert code == 0, (self._folder / "stderr").read_text()[-4000:]
        if self._report is None:
            self._report = json.loads((self._folder / "report.json").read_text())
        return self._report

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
