"""docs/inferlets.md: every block runs as shown on the cpu device, and its tables name all that the SDK has."""

from __future__ import annotations

import ast
import json
import re

import pytest

from tests.sdk.real_engine import Ended, Job, talk_to
from tests.server.conftest import ROOT
from tests.server.guide_blocks import EXAMPLES, GUIDE, Example, as_shown

SDK = ROOT / "inferlet_sdk" / "python" / "inferlet"
IDS = [f"{k} {example.title}" for k, example in enumerate(EXAMPLES)]


def run(examples: list[Example]) -> list[Ended]:
    """What each block sent and returned."""
    return talk_to("cpu", [Job(e.title, e.source, e.input, e.received) for e in examples])


@pytest.fixture(scope="module")
def on_cpu() -> list[Ended]:
    return run(EXAMPLES)


@pytest.mark.parametrize("k", range(len(EXAMPLES)), ids=IDS)
def test_on_cpu_as_shown(on_cpu: list[Ended], k: int) -> None:
    assert as_shown(on_cpu[k]) == [EXAMPLES[k].sent, json.loads(EXAMPLES[k].result)]


def test_no_block_is_left_out() -> None:
    assert len(EXAMPLES) == GUIDE.count("```python") == GUIDE.count("```text") > 15


def test_what_the_guide_links_to_and_names_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link
    titles = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^##+ (.*)$", GUIDE, flags=re.MULTILINE)}
    for anchor in re.findall(r"\]\(#([^)]+)\)", GUIDE):
        assert anchor in titles, anchor
    for name in re.findall(r"`(?:inferlet_sdk/examples/)?(\w+\.py)`", GUIDE):
        assert (ROOT / "inferlet_sdk" / "examples" / name).exists(), name


def _classes(file: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse((SDK / file).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(
    ("file", "name", "unlisted"),
    [
        ("_state.py", "WorkingSet", set()),
        ("_state.py", "StateGeometry", set()),
        ("_forward.py", "Pipeline", set()),
        ("_forward.py", "ForwardPass", {"payload", "accepted", "prologue", "on_attn_proj", "on_attn"}),  # the SDK's own; do not run yet
        ("_channel.py", "Channel", {"reader", "declare"}),  # the SDK's own
    ],
)
def test_every_call_is_listed(file: str, name: str, unlisted: set[str]) -> None:
    public = {f.name for f in _classes(file)[name].body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) and f.name[0] != "_"}
    assert public >= unlisted
    for method in public - unlisted:
        assert re.search(rf"`[^`\n]*\b{method}\(", GUIDE), f"{name}.{method}"


def test_every_error_is_listed() -> None:
    bases = {"InferletError", "ChannelError", "SavedSetError"}
    table = GUIDE[GUIDE.index("## Errors") :]
    for name in _classes("errors.py").keys() - bases:
        assert f"`{name}`" in table, name


def test_the_limits_are_rows_of_the_page_that_has_all() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!what )(.*? \| .*?) \|$", GUIDE.split("\n## Limits")[1].split("\n## ")[0], flags=re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        assert f"| {row} |" in limits, row


def test_the_figures_are_those_of_the_readme() -> None:
    """A figure of the guide that the README does not show any more is out of date."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("## Numbers")[1]
    costs = GUIDE[GUIDE.index("## What costs what") :]
    shown = re.findall(r"(?<![\d.])(?:\d\.\d+|\d+ (?:µs|ms)|\d\.\d ms)(?![\d.])", costs)
    assert len(shown) > 8
    for figure in shown:
        assert figure in readme, figure
