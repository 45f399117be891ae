"""The verifier: every rule a text from outside can break, and texts made to hurt."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_core.eta import FUNCTIONS, Model, Program, ProgramError, intrinsics, trace_epilogue
from tests.eta.test_eta_trace import Chan

OUT = ["output", [], {"index": 0, "name": "logits"}, "f32", [8]]
MAX = ["reduce_max", [0], {}, "f32", []]
TAKE = ["take", [], {"chan": 0}, "f32", []]
CHAN = {"cap": 1, "dtype": "f32", "shape": []}


def doc(ops: Any = (OUT, MAX), outs: Any = (1,), chans: Any = (), params: Any = (), **more: Any) -> str:
    base = {"chans": list(chans), "ops": list(ops), "outs": list(outs), "params": list(params), "stage": "epilogue", "v": 1}
    return json.dumps({**base, **more})


def test_the_base_document_is_fine() -> None:
    assert Program.parse(doc()).out_types == (("f32", ()),)
    assert Program.parse(doc(ops=[], outs=[])).ops == ()


BROKEN = [
    ("", "not JSON"),
    ("nul", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("{}", "exactly the keys"),
    ("[]", "exactly the keys"),
    ("1" * 5000, "not JSON|exactly the keys"),
    (doc(v=2), "version 2 is not 1"),
    (doc(v=True), "version True"),
    (doc(stage="later"), "stage must be one of epilogue, map, prologue, on_attn_proj, on_attn, got 'later'"),
    (doc(stage=["map"]), "stage must be one of"),
    (doc(extra=1), "exactly the keys"),
    (doc(ops={"a": 1}), "op 0 must be"),
    (doc(ops=[OUT[:4]]), r"op 0 must be \[name"),
    (doc(ops=[["system", [], {}, "f32", []]]), "unknown op 'system'"),
    (doc(ops=[[["x"], [], {}, "f32", []]]), "unknown op list"),
    (doc(ops=[OUT, ["reduce_max", [1], {}, "f32", []]]), r"operand of op 1 \(reduce_max\) must be the number of an op before it, got 1"),
    (doc(ops=[OUT, ["reduce_max", [-1], {}, "f32", []]]), "operand of op 1"),
    (doc(ops=[OUT, ["reduce_max", [0.0], {}, "f32", []]]), "operand of op 1"),
    (doc(ops=[OUT, ["reduce_max", [True], {}, "f32", []]]), "operand of op 1"),
    (doc(ops=[OUT, ["reduce_max", [], {}, "f32", []]]), "takes 1 operands, got 0"),
    (doc(ops=[OUT, ["reduce_max", [0] * 9, {}, "f32", []]]), "cap is 3"),
    (doc(ops=[OUT, ["reduce_max", [0], {"k": 1}, "f32", []]]), r"takes the attributes \[\], got 'k'"),
    (doc(ops=[OUT, ["reduce_max", [0], [], "f32", []]]), "takes the attributes"),
    (doc(ops=[OUT, ["reduce_max", [0], {}, "f64", []]]), "dtype of op 1"),
    (doc(ops=[OUT, ["reduce_max", [0], {}, "f32", [1]]]), r"gives f32\[\], the text declares f32\[1\]"),
    (doc(ops=[OUT, ["reduce_max", [0], {}, "i32", []]]), "declares i32"),
    (doc(ops=[OUT, ["add", [0, 0], {}, "f32", [9]]]), "the text declares"),
    (doc(ops=[["output", [], {"index": 0, "name": "weights"}, "f32", [8]], MAX]), "attribute name .* must be one of logits, hidden"),
    (doc(ops=[["output", [], {"index": 1 << 20, "name": "logits"}, "f32", [8]], MAX]), "attribute index"),
    (doc(ops=[["output", [], {"index": "0", "name": "logits"}, "f32", [8]], MAX]), "attribute index"),
    (doc(ops=[["output", [], {"index": 0, "name": "logits"}, "i32", [8]]]), "vector of f32"),
    (doc(ops=[["output", [], {"index": 0, "name": "logits"}, "f32", [2, 4]]]), "vector of f32"),
    (doc(ops=[OUT, ["output", [], {"index": 1, "name": "logits"}, "f32", [9]]]), "rows of two widths"),
    (doc(ops=[["iota", [], {}, "u32", [1 << 23]]], outs=[0]), "extent of op 0"),
    (doc(ops=[["iota", [], {}, "u32", [0]]], outs=[0]), "extent of op 0"),
    (doc(ops=[["iota", [], {}, "u32", [4096, 4096]]], outs=[0]), "elements, the cap is"),
    (doc(ops=[["iota", [], {}, "u32", [10**400]]], outs=[0]), "huge integer"),
    (doc(ops=[["iota", [], {}, "u32", [1, 1, 1, 1, 8]]], outs=[0]), "cap is 4"),
    (doc(ops=[["input", [], {"index": 0}, "f32", [8]]], outs=[0]), "not allowed in the epilogue stage"),
    (doc(outs=[2]), "an output id must be an integer from 0 to 1, got 2"),
    (doc(outs=[0] * 65), "cap is 64"),
    (doc(ops=[], outs=[0]), "has ops"),
    (doc(ops=[OUT] * 1025), "cap is 1024"),
    (doc(params=["f32"]), "1 params declared, 0 used"),
    (doc(ops=[["param", [], {"slot": 0}, "f32", []]], outs=[0]), "must be slot 0"),
    (doc(ops=[["param", [], {"slot": 0}, "i32", []]], outs=[0], params=["f32"]), "must be slot 0"),
    (doc(ops=[["param", [], {"slot": 1}, "f32", []]], outs=[0], params=["f32", "f32"]), "must be slot 0"),
    (doc(ops=[["param", [], {"slot": 0}, "f32", []]] * 2, outs=[0], params=["f32"]), "must be slot 1"),
    (doc(ops=[["param", [], {"slot": 0}, "f32", [2]]], outs=[0], params=["f32"]), "is a scalar"),
    (doc(ops=[["const", [], {"bits": 1 << 32}, "f32", []]], outs=[0]), "attribute bits"),
    (doc(ops=[["const", [], {"bits": 7}, "bool", []]], outs=[0]), "bool of 0 or 1"),
    (doc(chans=[CHAN]), "1 channels declared, 0 used"),
    (doc(ops=[TAKE], outs=[0]), "touches channel 0; .* 0 declared"),
    (doc(ops=[["take", [], {"chan": 1}, "f32", []], TAKE], outs=[0], chans=[CHAN, CHAN]), "numbered by first touch"),
    (doc(ops=[["take", [], {"chan": 0}, "i32", []]], outs=[0], chans=[CHAN]), r"moves i32\[\], channel 0 holds f32\[\]"),
    (doc(ops=[TAKE, TAKE], outs=[0], chans=[CHAN]), "finds channel 0 empty"),
    (doc(ops=[["read", [], {"chan": 0}, "f32", []], ["put", [0], {"chan": 0}, "f32", []]], outs=[0], chans=[CHAN]), "only read"),
    (
        doc(ops=[TAKE, ["put", [0], {"chan": 0}, "f32", []], ["neg", [1], {}, "f32", []]], outs=[2], chans=[CHAN]),
        "a put, which has no value",
    ),
    (doc(ops=[TAKE, ["put", [0], {"chan": 0}, "f32", []]], outs=[1], chans=[CHAN]), "output 1 is a put"),
    (doc(ops=[TAKE], outs=[0], chans=[{**CHAN, "cap": 0}]), "capacity of channel 0"),
    (doc(ops=[TAKE], outs=[0], chans=[{**CHAN, "seed": 1}]), "exactly the keys cap, dtype, shape"),
    (doc(ops=[TAKE], outs=[0], chans=[{**CHAN, "shape": [1 << 21]}]), "the cap is"),
    (doc(ops=[TAKE], outs=[0], chans=[CHAN] * 33), "cap is 32"),
    (doc(ops=[OUT], outs=[0], stage="map"), "not allowed in the map stage"),
    (doc(ops=[["input", [], {"index": 1}, "f32", [8]]], outs=[0], stage="map"), r"numbers its inputs 0, 1, …; got \[1\]"),
    (doc(ops=[["input", [], {"index": 0}, "f32", [8]]], outs=[], stage="map"), "exactly one output"),
    (doc(ops=[["input", [], {"index": 0}, "f32", [8]], MAX], outs=[1], stage="map"), "not allowed in the map stage"),
    (doc(ops=[["input", [], {"index": i}, "f32", [8 + i]] for i in range(2)], outs=[0], stage="map"), "vectors of one length"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_texts_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        Program.parse(text)
    assert len(str(caught.value)) < 300, "a hostile text does not come back in full"


def test_not_a_string_and_too_long() -> None:
    with pytest.raises(ProgramError, match="at most 262144 characters, got None"):
        Program.parse(None)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="got 262145"):
        Program.parse(" " * 262145)


def chain(n: int) -> str:
    ops: list[Any] = [OUT]
    for i in range(n):
        ops.append(["reduce_max", [0 if i == 0 else len(ops) - 1], {}, "f32", []])
        ops.append(["sub", [0, len(ops) - 1], {}, "f32", [8]])
    return doc(ops=ops, outs=[len(ops) - 1])


def test_ops_on_memory_that_depend_on_each_other_are_capped() -> None:
    assert Program.parse(chain(64))
    with pytest.raises(ProgramError, match="more than 64 ops on memory that depend on each other"):
        Program.parse(chain(65))


def test_the_largest_texts_are_judged_quickly() -> None:
    big = doc(ops=[["iota", [], {}, "u32", [8]]] + [["add", [i, i], {}, "u32", [8]] for i in range(1023)], outs=[1023])
    start = time.thread_time()
    Program.parse(big)
    for text in ("[" * 262_000, '{"a":' * 40_000, '"' + "\\u0000" * 40_000, "[" + "1," * 130_000 + "1]"):
        with pytest.raises(ProgramError):
            Program.parse(text)
    assert time.thread_time() - start < 1.0


def _texts() -> list[str]:
    model, rng, cell = Model(40, 8), Chan("u32", (2,), is_counter=True), Chan("f32", (40,))

    def penalty() -> Any:
        seen = cell.take()
        logits = intrinsics.output(0) - seen * 0.5
        cell.put(seen + 1.0)
        return FUNCTIONS["gumbel_max"](logits, rng.take()), FUNCTIONS["entropy"](logits)

    return [
        trace_epilogue(penalty, model).program.text,
        trace_epilogue(lambda: FUNCTIONS["min_p"](intrinsics.output(0), 0.1), model).program.text,
    ]


TEXTS = _texts()


@given(st.sampled_from(TEXTS), st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_texts_parse_or_are_refused(text: str, data: st.DataObject) -> None:
    """No mutation raises anything but ProgramError, and what parses has a stable canonical text."""
    tree = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = tree
        while isinstance(node, (list, dict)) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(node[key], (list, dict)) or data.draw(st.integers(0, 3)) == 0:
                node[key] = data.draw(st.sampled_from([0, 1, -1, 2**40, 1.5, "add", "f32", "bool", None, [], {}, [1], True]))
                break
            node = node[key]
    try:
        program = Program.parse(json.dumps(tree))
    except ProgramError:
        return
    again = Program.parse(program.text)
    assert again.text == program.text and again.hash == program.hash


def test_round_trip_of_what_the_tracer_makes() -> None:
    for text in TEXTS:
        assert Program.parse(text).text == text
        assert Program.parse(text).verify().text == text
