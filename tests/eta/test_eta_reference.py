"""docs/eta-ops.md says what the tables say."""

from __future__ import annotations

from pie_core.eta import FUNCTIONS, OPS, STAGES
from pie_server.build.eta_reference import COMMAND, KINDS, OPERATORS, PATH, reference


def test_the_reference_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), f"run {COMMAND}"


def test_the_reference_names_everything() -> None:
    text = reference()
    assert set(KINDS) == {op.kind for op in OPS.values()} and set(OPERATORS) <= set(OPS)
    for name in OPS:
        assert f"| `{name}`" in text, name
    for name in FUNCTIONS:
        assert f"`{name}(" in text or f"`{name}`, below" in text, name
    for name in STAGES:
        assert f"| `{name}` |" in text


def test_no_function_is_without_its_line() -> None:
    for name, fn in FUNCTIONS.items():
        assert fn.__doc__ and fn.__doc__.rstrip().endswith("."), name
