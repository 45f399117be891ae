"""Texts made to hurt: each is refused with a ProgramError before any work that grows with its claims; 20,000 mutated ones do no harm."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pie_core.eta import FUNCTIONS, Model, Program, ProgramError, intrinsics, trace_epilogue, trace_stage
from tests.eta.test_eta_program import CHAN, OUT, TAKE, doc
from tests.eta.test_eta_stages import SHAPES, everything
from tests.eta.test_eta_trace import Chan

F = FUNCTIONS
ROWS = ["outputs", [], {"name": "logits"}, "f32", [2, 8]]
PUT = ["put", [0], {"chan": 0}, "f32", []]
INDEX = ["iota", [], {}, "u32", [8]]
BASE = doc()


def program(*ops: Any, **more: Any) -> str:
    return doc(ops=list(ops), outs=more.pop("outs", [len(ops) - 1]), **more)


HOSTILE: list[tuple[str, str, str]] = [
    ("a cycle", program(["neg", [1], {}, "f32", [8]], ["neg", [0], {}, "f32", [8]]), "operand of op 0"),
    ("itself", program(OUT, ["neg", [1], {}, "f32", [8]]), "operand of op 1"),
    ("a forward id", program(OUT, ["add", [0, 2], {}, "f32", [8]], OUT), "operand of op 1"),
    ("a forged id", program(OUT, ["add", [0, 10**18], {}, "f32", [8]]), "operand of op 1"),
    ("a huge id", program(OUT, ["add", [0, 10**400], {}, "f32", [8]]), "a huge integer"),
    ("a huge shape", program(OUT, ["reshape", [0], {}, "f32", [1 << 60]]), "extent of op 1"),
    ("a broadcast bomb", program(["param", [], {"slot": 0}, "f32", []], ["broadcast", [0], {}, "f32", [4096] * 4], params=["f32"]),
     "281474976710656 elements, the cap is"),
    ("a rank bomb", program(OUT, INDEX, ["gather", [0, 1], {}, "f32", [8] * 5]), "cap is 4"),
    ("a rank bomb by gather", program(
        ["outputs", [], {"name": "logits"}, "f32", [8, 8]], ["reshape", [0], {}, "f32", [2, 2, 4, 4]], INDEX,
        ["reshape", [2], {}, "u32", [4, 2]], ["gather", [1, 3], {}, "f32", [4, 2, 2, 4]]),
     r"op 4 \(gather\) would make f32\[4, 2, 2, 4, 4\]"),
    ("k over n", program(OUT, ["top_k", [0], {"k": 9}, "f32", [9]]), "takes k from 1 to 8"),
    ("k of 0", program(OUT, ["top_k", [0], {"k": 0}, "f32", [1]]), "takes k from 1 to 8"),
    ("k as a word", program(OUT, ["top_k", [0], {"k": "1"}, "f32", [1]]), "attribute k of op 1"),
    ("a huge k", program(OUT, ["top_k", [0], {"k": 1 << 30}, "f32", [8]]), "attribute k of op 1"),
    ("pick of a sum", program(OUT, ["cumsum", [0], {}, "f32", [8]], ["pick", [1], {"i": 1}, "u32", [8]]),
     r"op 2 \(pick\) takes result 1 of op 1 \(cumsum\), which has one"),
    ("pick of a pick", program(
        OUT, ["sort_desc", [0], {}, "f32", [8]], ["pick", [1], {"i": 1}, "u32", [8]], ["pick", [2], {"i": 1}, "u32", [8]]),
     r"result 1 of op 2 \(pick\), which has one"),
    ("pick 0", program(OUT, ["sort_desc", [0], {}, "f32", [8]], ["pick", [1], {"i": 0}, "f32", [8]]), "takes i = 1, got 0"),
    ("pick 2", program(OUT, ["sort_desc", [0], {}, "f32", [8]], ["pick", [1], {"i": 2}, "u32", [8]]), "attribute i of op 2"),
    ("pick as values", program(OUT, ["sort_desc", [0], {}, "f32", [8]], ["pick", [1], {"i": 1}, "f32", [8]]), "declares f32"),
    ("put as a value", program(TAKE, PUT, ["neg", [1], {}, "f32", []], chans=[CHAN]), "a put, which has no value"),
    ("put as an output", program(TAKE, PUT, chans=[CHAN]), "output 1 is a put"),
    ("two takes", program(TAKE, TAKE, chans=[CHAN]), "finds channel 0 empty"),
    ("a put after a read", program(["read", [], {"chan": 0}, "f32", []], PUT, outs=[0], chans=[CHAN]), "only read"),
    ("rows of two counts", program(["outputs", [], {"name": "logits"}, "f32", [2, 8]], ["outputs", [], {"name": "hidden"}, "f32", [3, 8]]),
     "reads 3 rows, another one 2"),
    ("a row behind the rows", program(ROWS, ["output", [], {"index": 2, "name": "logits"}, "f32", [8]]),
     "reads row 2 of the 2 that outputs declares"),
    ("rows of two widths", program(OUT, ["outputs", [], {"name": "logits"}, "f32", [2, 9]]), "rows of two widths"),
    ("a matrix bomb", program(["outputs", [], {"name": "logits"}, "f32", [4096, 1]], ["transpose", [0], {}, "f32", [1, 4096]],
                              ["matmul", [0, 1], {}, "f32", [4096, 1024]]), r"would make f32\[4096, 4096\]"),
    ("a scatter of other rows", program(OUT, INDEX, ["scatter_add", [0, 1, 1], {}, "f32", [8]]),
     r"takes the values f32\[8\], got u32\[8\]"),
    ("a mask of other bits", program(OUT, INDEX, ["mask_apply", [0, 1], {}, "f32", [8]]), r"u32\[1\], got u32\[8\]"),
    ("ops on memory in a chain", program(OUT, *[["cumsum", [i], {}, "f32", [8]] for i in range(100)]),
     "chain of more than 64 ops on memory"),
    ("a NaN", BASE.replace('"index": 0', '"index": NaN'), "it holds NaN, which is not JSON"),
    ("an infinity", BASE.replace('"index": 0', '"index": 1e999'), "too large for a number"),
    ("minus zero", BASE.replace('"index": 0', '"index": -0.0'), "attribute index of op 0"),
    ("a payload beyond 32 bits", program(["const", [], {"bits": 0x1FFC00001}, "f32", []]), "attribute bits"),
    ("a negative payload", program(["const", [], {"bits": -1}, "f32", []]), "attribute bits"),
    ("a key twice", BASE.replace('"v": 1', '"v": 1, "v": 1'), "an object names a key twice"),
    ("an attribute twice", BASE.replace('"index": 0', '"index": 0, "index": 1'), "an object names a key twice"),
    ("long names of attributes", program(["iota", [], {"k" * 200_000: 1}, "u32", [8]]), r"takes the attributes \[\], got 'kkk"),
    ("many attributes", program(["iota", [], {str(i): 1 for i in range(15_000)}, "u32", [8]]), "takes the attributes"),
    ("a million ops", json.dumps([0] * 1_000_000), "at most 262144 characters"),
    ("many ops", program(*[["iota", [], {}, "u32", [8]]] * 5000), "ops has 5000 entries, the cap is 1024"),
    ("many numbers", "[" + "1," * 130_000 + "1]", "exactly the keys"),
    ("many lists", "[" + "[]," * 80_000 + "[]]", "exactly the keys"),
    ("many objects", "[" + '{"a":1},' * 30_000 + "1]", "exactly the keys"),
    ("lists in lists", "[" * 262_000, "nested deeper than 200"),
    ("objects in objects", '{"a":' * 40_000, "nested deeper than 200"),
    ("lists in the operands", program(["neg", json.loads("[" * 190 + "]" * 190), {}, "f32", [8]]), "operand of op 0"),
    ("a lone surrogate", BASE.replace("logits", "\\ud800"), "lone surrogate"),
    ("digits", "1" * 260_000, "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_texts_are_refused_with_a_short_reason(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        Program.parse(text)
    assert len(str(caught.value)) < 300, "a hostile text does not come back in full"


def test_payload_bits_travel_as_they_are() -> None:
    """Signalling NaNs, payloads and -0 are 32-bit words: the text keeps them, and they tell programs apart."""
    words = (0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0)
    programs = [Program.parse(program(["const", [], {"bits": w}, "f32", []])) for w in words]
    assert [p.ops[0].attrs["bits"] for p in programs] == list(words) and len({p.hash for p in programs}) == len(words)


def test_a_chain_through_a_register_counts_on() -> None:
    rows: list[Any] = [TAKE]
    for _ in range(70):
        last = len(rows) - 1
        rows += [["broadcast", [last], {}, "f32", [4]], ["reduce_sum", [last + 1], {}, "f32", []]]
        rows += [["put", [last + 2], {"chan": 0}, "f32", []], ["take", [], {"chan": 0}, "f32", []]]
    with pytest.raises(ProgramError, match="chain of more than 64 ops on memory"):
        Program.parse(program(*rows, chans=[CHAN]))


def sampler() -> Any:
    rng, history = Chan("u32", (2,), is_counter=True), Chan("i32", (6,))
    counts = F["token_counts"](history.take(), 40)
    logits = F["repetition_penalty"](intrinsics.output(0), counts, 1.2)
    token = F["sample"](logits, rng.take(), 0.7, top_k=5, top_p=0.9)
    history.put(F["scatter_set"](F["broadcast"](token, 6), F["iota"](3), token))
    return token, F["typical"](logits, 0.9), F["tail_free"](logits, 0.9)


def matrices() -> Any:
    x = intrinsics.outputs()
    values, order = F["sort_desc"](x)
    return F["gather_row"](x, F["gather"](order[0], F["iota"](3))), values @ F["transpose"](x), F["top_k"](x, 3)[1], x[1], F["cumprod"](x)


def packed() -> Any:
    mask, mu, rng = Chan("u32", (2,)), Chan("f32"), Chan("u32", (2,), is_counter=True)
    token, after = F["mirostat"](F["mask_apply"](intrinsics.output(1), mask.take()), mu.take(), rng.take())
    mu.put(after)
    return token, F["xtc"](intrinsics.output(0), 0.1, 0.5, rng.take()), F["sink_mask"](F["iota"](4), F["iota"](5), 2, 1)


def _texts() -> list[str]:
    model = Model(40, 8)
    traced = [trace_epilogue(sampler, model), trace_epilogue(matrices, model, rows=3), trace_epilogue(packed, model)]
    traced += [trace_stage(stage, everything(stage), shapes) for stage, shapes in SHAPES.items()]
    texts = [t.program.text for t in traced]
    texts.append(doc(ops=[["input", [], {"index": 0}, "f32", [8]], ["exp", [0], {}, "f32", [8]]], outs=[1], stage="map"))
    return texts


ATOMS: list[Any] = [
    0,
    1,
    2,
    3,
    7,
    8,
    40,
    -1,
    2**31,
    2**40,
    1.5,
    True,
    None,
    "",
    "f32",
    "u32",
    "bool",
    "add",
    "gather",
    "pick",
    "put",
    "map",
    [],
    {},
    [1],
]


def mutate(tree: Any, pick: random.Random) -> None:
    """One change at a random place: another value, another's value, an entry dropped, doubled or moved."""
    path = [tree]
    while isinstance(path[-1], (list, dict)) and path[-1] and (len(path) < 2 or pick.random() < 0.8):
        node = path[-1]
        path.append(node[pick.choice(list(node) if isinstance(node, dict) else range(len(node)))])
    node = path[-2] if len(path) > 1 else tree
    key = pick.choice(list(node) if isinstance(node, dict) else range(len(node)))
    action = pick.random()
    if isinstance(node, dict) or action < 0.6:
        node[key] = pick.choice(ATOMS) if action < 0.5 else pick.choice(list(node.values()) if isinstance(node, dict) else node)
    elif action < 0.75:
        del node[key]
    elif action < 0.9:
        node.insert(key, node[pick.randrange(len(node))])
    else:
        other = pick.randrange(len(node))
        node[key], node[other] = node[other], node[key]


def damage(text: str, pick: random.Random) -> str:
    """Characters lost, doubled or replaced."""
    at, n = pick.randrange(len(text)), pick.randrange(1, 6)
    return text[:at] + pick.choice(("", text[at : at + n] * 2, '"', "[", "}", "\\", "9" * n, "é")) + text[at + n :]


def test_20_000_mutated_programs_do_no_harm() -> None:
    """Nothing but ProgramError comes out, and what parses has a stable canonical text."""
    pick = random.Random(4)
    texts = _texts()
    parsed = 0
    for round_ in range(20_000):
        text = pick.choice(texts)
        if round_ % 4:
            tree = json.loads(text)
            for _ in range(pick.randrange(1, 4)):
                if isinstance(tree, (dict, list)) and tree:
                    mutate(tree, pick)
            text = json.dumps(tree)
        else:
            text = damage(text, pick)
        try:
            found = Program.parse(text)
        except ProgramError:
            continue
        parsed += 1
        assert Program.parse(found.text).text == found.text
        assert found.reads >= 0 and len(found.effects) == len(found.chans) and found.listing().count("\n") == max(len(found.ops) - 1, 0)
    assert 500 < parsed < 19_000, "some are still programs, most are not"


def test_what_the_tracer_makes_comes_back_exactly() -> None:
    for text in _texts()[:-1]:
        assert Program.parse(text).text == text
