"""The page's own unit tests, run by Node (web/scripts/test.mjs), with answers of Python to compare with and the real language component."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pie_core.text.chat import load_chat
from pie_core.text.tokenizer import tokenizer_spec
from pie_core.weights import open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from pie_server.build.web import WEB, page_tools, web_assets
from tests.support.paths import default_model, goldens
from tests.web.text_fixtures import dumps, fixtures


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", ["api", "engine", "hello", "inferlet", "model", "page"])
def test_unit_tests_of_the_page(folder: str, text_file: Path) -> None:
    assets, node = web_assets(), page_tools()
    environment = {**os.environ, "PIE_TEXT_FIXTURES": str(text_file), "PIE_WEB_ASSETS": str(assets)}
    command = [node.path, WEB / "scripts" / "test.mjs", f"{folder}/"]
    done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, timeout=240, check=False)
    output = done.stdout + done.stderr
    failed = re.findall(r"^not ok .*?^  \.\.\.$", output, re.MULTILINE | re.DOTALL)
    assert done.returncode == 0, "\n".join(failed) or output[-4000:]
    counts = {name: int(count) for name, count in re.findall(r"^# (tests|pass|skipped) (\d+)$", output, re.MULTILINE)}
    assert counts["tests"] >= 5 and counts["skipped"] == 0, output[-2000:]
