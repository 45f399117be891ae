"""The page's own unit tests, run by Node (web/scripts/test.mjs), with answers of Python to compare with and the real language component."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pie_core.text.chat import load_chat
from pie_core.text.tokenizer import tokenizer_spec
from pie_core.weights import open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from pie_server.build.web import WEB, page_tools, web_assets
from tests.support.paths import default_model, goldens
from tests.web.text_fixtures import dumps, fixtures

REPORTER = Path(__file__).with_name("node_report.mjs")
FOLDERS = ("api", "engine", "hello", "inferlet", "model", "page")  # of web/src


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's answers about the default model's tokenizer and templates."""
    with open_gguf(default_model()) as checkpoint:
        spec = tokenizer_spec(checkpoint.metadata)
        tokenizer = HfTokenizer(spec)
        chat = load_chat(checkpoint.metadata, spec, tokenizer)
        file = tmp_path_factory.mktemp("text") / "text.json"
        file.write_text(dumps(fixtures(checkpoint.metadata, spec, tokenizer, chat, goldens())))
    return file


@dataclass(frozen=True)
class Ended:
    """A test of the page that ended; without an error it passed."""

    file: str
    name: str
    left_out: bool
    error: str | None

    @property
    def folder(self) -> str:
        """Of web/src; a file that could not be loaded is called by the path of its bundle, which has the same folders."""
        return Path(self.file).parent.name


@pytest.fixture(scope="module")
def ended(text_file: Path) -> list[Ended]:
    """Every test of the page: one bundle, one run."""
    settings = {"PIE_TEXT_FIXTURES": text_file, "PIE_WEB_ASSETS": web_assets(), "NODE_OPTIONS": f"--test-reporter={REPORTER}"}
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    command = [page_tools().path, WEB / "scripts" / "test.mjs"]
    done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, timeout=280, check=False)
    print(done.stderr)  # for who reads why one failed
    tests = [Ended(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"file":')]
    assert (done.returncode == 0) == all(test.error is None for test in tests), done.stdout[-4000:]
    return tests


@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", FOLDERS)
def test_unit_tests_of_the_page(folder: str, ended: list[Ended]) -> None:
    tests = [test for test in ended if test.folder == folder]
    failed = [f"{test.file}: {test.name}\n{test.error}" for test in tests if test.error is not None]
    assert failed == [], "\n".join(failed)
    assert len(tests) >= 5 and not any(test.left_out for test in tests), tests


def test_every_folder_with_unit_tests_is_looked_at(ended: list[Ended]) -> None:
    assert {test.folder for test in ended} == set(FOLDERS)
