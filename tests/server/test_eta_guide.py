"""docs/eta.md: every example runs as shown, on the cpu device and, shortened, on webgpu."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.sdk.real_engine import Job, run_jobs
from tests.server.conftest import ROOT

GUIDE = (ROOT / "docs" / "eta.md").read_text(encoding="utf-8")
SECTIONS = [
    "Greedy", "Temperature", "Top-k", "Nucleus", "Min-p", "Penalties", "Typical", "Several read-outs", "A constrained", "Mirostat",
]  # fmt: skip
HEAD = "from inferlet import chat, model\nfrom inferlet.eta import *\n"
SHORT = 3  # passes on webgpu


class Example(NamedTuple):
    """A block of code with what the guide says of its run."""

    title: str
    source: str
    input: dict[str, Any]
    result: dict[str, Any]


def _examples() -> list[Example]:
    found, loop = [], ""
    for title, body in re.findall(r"^## \d+\. (.*?)$(.*?)(?=^## )", GUIDE, flags=re.MULTILINE | re.DOTALL):
        ((kind, code),) = re.findall(r"^```python (inferlet|epilogue)\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)
        ((data, result),) = re.findall(r"^```text\n(.*)\n(.*)\n```$", body, flags=re.MULTILINE)
        if kind == "epilogue":  # stands in the first example's loop
            code = HEAD + code + loop
        loop = loop or code[code.index("\nasync def main") :]
        found.append(Example(title, code, json.loads(data), json.loads(result)))
    return found


EXAMPLES = _examples()
NAMES = [e.title for e in EXAMPLES]


def test_the_guide_has_its_ten_examples_in_order() -> None:
    assert len(NAMES) == len(SECTIONS)
    assert all(name.startswith(wanted) for name, wanted in zip(NAMES, SECTIONS, strict=True))


def test_what_the_guide_links_to_and_names_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"`((?:bench|inferlet_sdk|docs)/[\w./]+)`", GUIDE):
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return dict(zip(NAMES, run_jobs("cpu", [Job(e.title, e.source, e.input) for e in EXAMPLES]), strict=True))


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_on_cpu_as_shown(on_cpu: dict[str, Any], example: Example) -> None:
    assert on_cpu[example.title] == example.result


@pytest.fixture(scope="module")
def on_webgpu() -> dict[str, Any]:
    jobs = [Job(e.title, e.source, e.input | ({"n": SHORT} if "n" in e.input else {})) for e in EXAMPLES]
    return dict(zip(NAMES, run_jobs("webgpu", jobs), strict=True))


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_on_webgpu_shortened(on_webgpu: dict[str, Any], example: Example) -> None:
    """Its logits differ from the cpu's within a tolerance, far less than between the tokens drawn here."""
    got = on_webgpu[example.title]
    assert isinstance(got, dict), got
    assert got.keys() == example.result.keys()
    for name, value in got.items():
        shown = example.result[name]
        if isinstance(value, str):
            assert value and shown.startswith(value)
        else:
            assert value == (pytest.approx(shown[: len(value)], abs=0.15) if isinstance(value[0], float) else shown)
