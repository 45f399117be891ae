"""One fault has one text: what the page's host refuses by itself it says as the core does, and its budgets are the same numbers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pie_core.host
from pie_core.host.budget import Budget, Refusal
from pie_core.host.table import FUTURE, Table
from pie_server.build.web import WEB

SOURCES = WEB / "src" / "inferlet"
HOST = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.ts")) if not path.name.endswith(".test.ts"))


def said_by_the_core() -> dict[str, str]:
    """What is used up -> the advice, of every budget of `pie_core.host`."""
    found: dict[str, str] = {}
    for path in Path(pie_core.host.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "over":
                what, _, _, fix = node.args
                assert isinstance(what, ast.Constant) and isinstance(fix, ast.Constant)
                found[what.value] = fix.value
    return found


def said_by_the_page() -> dict[str, str]:
    """The same of the page's host."""
    return dict(re.findall(r'over\("([^"]+)",.*?"([^"]+)"\)', HOST))


def test_budgets_are_told_in_the_same_words() -> None:
    core, page = said_by_the_core(), said_by_the_page()
    both = core.keys() & page.keys()
    assert both == {
        "characters printed and logged",
        "futures in flight",
        "handles",
        "passes outstanding",
        "programs",
        "words of channel cells",
    }
    assert {what: page[what] for what in both} == {what: core[what] for what in both}


def test_a_taken_id_is_told_in_the_same_words() -> None:
    table = Table(Budget())
    table.add("sleep", 7, FUTURE)
    with pytest.raises(Refusal) as caught:
        table.fresh("sleep", 7)
    assert f"`{caught.value.message}`".replace("sleep", "${op}").replace("7", "${id}").replace("future", "${entry.kind}") in HOST


def test_budgets_are_the_same_numbers() -> None:
    text = (SOURCES / "limits.ts").read_text()
    page = {name: int(a) << int(b or 0) for name, a, b in re.findall(r"^  (\w+): (\d+)(?: << (\d+))?,$", text, re.MULTILINE)}
    core = Budget()
    same = {
        "outstanding": core.outstanding, "futures": core.futures, "handles": core.handles, "programs": core.programs,
        "cellWords": core.cell_words, "logged": core.log_bytes, "sent": core.output_bytes,
    }  # fmt: skip
    assert {name: page[name] for name in same} == same
