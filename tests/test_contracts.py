"""docs/architecture.md against the code: the statements that other parts, languages and hosts rely on."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from pie_core.codegen.layout import lane_layout
from pie_core.device.protocol import LANE_ALIGN, NONE, PAGE_TOKENS
from pie_core.device.templates import TEMPLATES, template
from pie_core.engine.runner import EpilogueGroup, StepBatch
from pie_core.engine.step_buffer import pack_step
from pie_core.eta import Model, Program, channel, gumbel_max, intrinsics, reduce_argmax, trace_epilogue
from pie_core.host.ops import OPS

DOC = Path(__file__).parent.parent / "docs" / "architecture.md"


def section(number: int) -> str:
    """The text of one numbered section."""
    return DOC.read_text().split(f"\n## {number}. ")[1].split("\n## ")[0]


def test_the_op_table_is_the_documented_one() -> None:
    rows = re.findall(r"^\| ([a-z_.]+) \| (sync|posted|future) \| ([a-z, ]*?) ?\|", section(7), re.M)
    documented = {name: (kind, set(filter(None, fields.split(", ")))) for name, kind, fields in rows}
    assert documented == {name: (op.kind, set(op.fields)) for name, op in OPS.items()}


class Counter:
    dtype, shape, capacity, is_counter = "u32", (2,), 1, True


def test_a_program_is_written_as_documented() -> None:
    model = Model(64, 8)
    traced = trace_epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / 0.7, channel.take(Counter())), model)
    text = traced.program.text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    document = json.loads(text)
    assert set(document) == {"chans", "ops", "outs", "params", "stage", "v"}
    assert document["chans"] == [{"cap": 1, "dtype": "u32", "shape": [2]}]
    assert ["output", [], {"index": 0, "name": "logits"}, "f32", [64]] in document["ops"]
    assert [op[0] for op in document["ops"]].count("put") == 1  # the counter advanced by itself
    assert traced.program.hash == hashlib.sha256(text.encode()).hexdigest()
    assert Program.parse(text) == traced.program
    other = trace_epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / 0.8, channel.take(Counter())), model)
    assert other.program == traced.program and other.params != traced.params  # 0.7 and 0.8 share one kernel


def test_a_lane_has_the_documented_order() -> None:
    traced = trace_epilogue(lambda: gumbel_max(intrinsics.output(0, "logits") / 0.7, channel.take(Counter())), Model(64, 8))
    layout = lane_layout(traced.program)
    lane = layout.pack(3, 9, [(100, 102, NONE)], [10], list(traced.params))
    assert lane[:6] == [3, 9, 100, 102, NONE, 10]
    assert lane[6:] == list(traced.params) and len(lane) == layout.words


def test_the_step_buffer_has_the_documented_words() -> None:
    program = trace_epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")), Model(64, 8)).program
    lane = lane_layout(program).pack(0, 0, [], [1], [])
    batch = StepBatch(rows=[7, NONE, 16, 48, 0, 0, 0, 0], tables=[5, 3], n_seqs=1, reads=[0], epilogues=[EpilogueGroup(program, [lane])])
    packed = pack_step(batch)
    words = memoryview(packed.data).cast("I")
    n_tokens, n_reads, n_seqs, token_off, read_off, page_off, *zeros = words[:16]
    assert (n_tokens, n_reads, n_seqs, zeros) == (1, 1, 1, [0] * 10)
    token = words[token_off : token_off + 8]
    assert list(token) == [7, NONE, 16, 48, page_off, 0, 0, 0]
    assert words[read_off] == 0
    position = token[2]
    assert (
        words[token[4] + position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS == token[3]
    )  # the page table agrees with the slot
    assert packed.groups[0].lane_offset % LANE_ALIGN == 0
    assert list(words[packed.groups[0].lane_offset // 4 :][: len(lane)]) == lane


def test_every_template_names_its_step_first_and_is_checked() -> None:
    for name, info in TEMPLATES.items():
        assert info.bindings[0] == ("step", "rw" if name in ("gate", "shift") else "r"), name  # rows are masked and moved in place
        assert len(info.bindings) <= 8, f"{name}: WebGPU guarantees 8 storage buffers"
        with pytest.raises(Exception, match=f"template {name} takes parameters"):
            template(name, nonsense=1)
