"""Stages that do not execute yet: traced, verified and identified; what each may use."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pie_core.eta import FUNCTIONS, OPS, STAGES, Model, Program, ProgramError, TraceError, intrinsics, trace_epilogue, trace_stage
from pie_core.eta.ops import INTRINSIC_NAMES
from tests.eta.test_eta_program import doc
from tests.eta.test_eta_trace import Chan

F = FUNCTIONS
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "prologue": {"tokens": (5,), "positions": (5,)},
    "on_attn_proj": {"query": (5, 16), "key": (5, 8), "value": (5, 8), "positions": (5,), "layer": ()},
    "on_attn": {"query": (5, 16), "attention": (5, 16), "positions": (5,), "layer": ()},
}


def everything(stage: str) -> Callable[[], None]:
    """A function that uses each intrinsic of the stage, and hands all on."""

    def fn() -> None:
        for name, shape in SHAPES[stage].items():
            value = getattr(intrinsics, name)()
            assert value.shape == shape
            Chan(value.dtype, shape).put(value + 1)

    return fn


@pytest.mark.parametrize("stage", SHAPES)
def test_a_stage_has_its_intrinsics(stage: str) -> None:
    traced = trace_stage(stage, everything(stage), SHAPES[stage])
    program = Program.parse(traced.program.text)
    assert program == traced.program and program.stage == stage and program.outs == ()
    used = [n for n in program.ops if n.name == "intrinsic"]
    assert {str(n.attrs["name"]) for n in used} == set(STAGES[stage].intrinsics) == set(SHAPES[stage])
    assert {n.dtype for n in used if n.attrs["name"] in ("tokens", "positions", "layer")} == {"u32"}
    assert len(traced.params) == len(used), "constants are lifted as in an epilogue"


def test_scores_of_the_keys_as_h2o_sums_them() -> None:
    """A layer's stage that is of use: attention norms a token, added to a running sum in a channel."""
    total = Chan("f32", (5,))

    def fn() -> None:
        total.put(total.take() + F["reduce_sum"](F["absolute"](intrinsics.attention())))

    program = trace_stage("on_attn", fn, SHAPES["on_attn"]).program
    assert program.effects[0].takes == program.effects[0].puts == 1 and program.verify() == program


def test_a_prologue_returns_values_and_a_layer_none() -> None:
    traced = trace_stage("prologue", lambda: F["reduce_max"](intrinsics.positions()), SHAPES["prologue"])
    assert traced.single and traced.program.out_types == (("u32", ()),)
    with pytest.raises(TraceError, match="a function of the on_attn stage returns nothing: put values into channels"):
        trace_stage("on_attn", intrinsics.layer, SHAPES["on_attn"])


def test_only_epilogue_and_map_run() -> None:
    assert [name for name, stage in STAGES.items() if stage.runs] == ["epilogue", "map"]
    assert {name for stage in STAGES.values() for name in stage.intrinsics} == set(INTRINSIC_NAMES)


MISTAKES: list[tuple[str, Callable[[], Any], str]] = [
    ("prologue", intrinsics.query, "intrinsics.query is there in the stages on_attn_proj, on_attn, not in 'prologue'"),
    ("on_attn", intrinsics.key, "intrinsics.key is there in the stage on_attn_proj, not in 'on_attn'"),
    ("prologue", lambda: intrinsics.output(0), "intrinsics.output is only there inside a function given to .epilogue"),
    ("prologue", intrinsics.outputs, "intrinsics.outputs is only there"),
    ("prologue", lambda: 3, "a function of the prologue stage returns Tensors, got int"),
    ("on_attn", lambda: intrinsics.attention() @ intrinsics.query(), r"matmul takes \[m, k\]"),
]


@pytest.mark.parametrize(("stage", "fn", "message"), MISTAKES)
def test_mistakes(stage: str, fn: Callable[[], Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_stage(stage, fn, SHAPES[stage])


def test_mistakes_about_the_stage_itself() -> None:
    with pytest.raises(TraceError, match="trace_stage knows the stages prologue, on_attn_proj, on_attn, not 'epilogue'"):
        trace_stage("epilogue", lambda: None, {})
    with pytest.raises(TraceError, match="prologue takes a function, got int"):
        trace_stage("prologue", 3, {})  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"'tokens' is u32\[T\] in the prologue stage, not u32\[\]"):
        trace_stage("prologue", intrinsics.tokens, {})
    with pytest.raises(TraceError, match=r"intrinsics\.tokens is there in the stage prologue, not in 'epilogue'"):
        trace_epilogue(intrinsics.tokens, Model(8, 8))


TOKENS = ["intrinsic", [], {"name": "tokens"}, "u32", [5]]
QUERY = ["intrinsic", [], {"name": "query"}, "f32", [5, 16]]
BROKEN: list[tuple[str, list[Any], list[int], str]] = [
    ("epilogue", [TOKENS], [0], r"op 0 \(intrinsic\) is not allowed in the epilogue stage"),
    ("on_attn", [TOKENS], [], "op 0 .intrinsic. 'tokens' is not there in the on_attn stage; it has query, attention, positions, layer"),
    ("prologue", [["intrinsic", [], {"name": "tokens"}, "f32", [5]]], [0], r"'tokens' is u32\[T\] in the prologue stage, not f32\[5\]"),
    ("prologue", [["intrinsic", [], {"name": "logits"}, "u32", [5]]], [0], "attribute name .* must be one of tokens"),
    ("prologue", [TOKENS, ["intrinsic", [], {"name": "tokens"}, "u32", [6]]], [0], "gives 'tokens' two shapes"),
    ("prologue", [TOKENS, ["intrinsic", [], {"name": "positions"}, "u32", [6]]], [0], "has 6 token rows, another one 5"),
    ("on_attn", [QUERY, ["intrinsic", [], {"name": "attention"}, "f32", [4, 16]]], [], "has 4 token rows, another one 5"),
    ("on_attn", [["intrinsic", [], {"name": "layer"}, "u32", [1]]], [], r"'layer' is u32\[\] in the on_attn stage, not u32\[1\]"),
    ("on_attn", [QUERY], [0], "outs of the on_attn stage has 1 entries, the cap is 0"),
    ("prologue", [["output", [], {"index": 0, "name": "logits"}, "f32", [8]]], [0], "not allowed in the prologue stage"),
    ("prologue", [["outputs", [], {"name": "logits"}, "f32", [2, 8]]], [0], "not allowed in the prologue stage"),
    ("map", [["input", [], {"index": 0}, "f32", [8]], ["sort_desc", [0], {}, "f32", [8]]], [1], "not allowed in the map stage"),
    ("map", [["input", [], {"index": 0}, "f32", [8]], ["cumsum", [0], {}, "f32", [8]]], [1], "not allowed in the map stage"),
    ("map", [["input", [], {"index": 0}, "f32", [8]], ["gather", [0, 0], {}, "f32", [8]]], [1], "not allowed in the map stage"),
    ("map", [["input", [], {"index": 0}, "f32", [8]], ["reshape", [0], {}, "f32", [2, 4]]], [0], "vectors of one length"),
]


@pytest.mark.parametrize(("stage", "ops", "outs", "message"), BROKEN)
def test_texts_that_break_the_rules_of_a_stage(stage: str, ops: list[Any], outs: list[int], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.parse(doc(ops=ops, outs=outs, stage=stage))


def test_every_op_has_a_stage() -> None:
    allowed = {name for stage in STAGES.values() for name, row in OPS.items() if stage.allows(name, row.kind)}
    assert allowed == set(OPS)


def test_the_stage_is_part_of_the_identity() -> None:
    prologue = trace_stage("prologue", lambda: None, {}).program
    assert json.loads(prologue.text)["stage"] == "prologue"
    epilogue = Program.parse(prologue.text.replace('"prologue"', '"epilogue"'))
    assert len({trace_stage(s, lambda: None, {}).program.hash for s in SHAPES} | {epilogue.hash}) == 4
