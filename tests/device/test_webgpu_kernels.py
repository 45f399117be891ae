"""Rendering of WGSL templates: what the loader promises and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import kernels_wgsl
from kernels_wgsl import MAX_ITERATIONS, TemplateError, render, rules
from pie_core.device.protocol import KernelError, TemplateSpec
from pie_core.device.templates import TEMPLATES
from tests.support.lavapipe import lavapipe
from tests.support.tint import compile_wgsl, run_in_dawn

ADAPTERS: tuple[kernels_wgsl.AdapterClass, ...] = ("software", "gpu")
FORMATS = ("f32", "f16", "q4_1", "q8_0")
ATTENTION = {"heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125, "bucket": 4}
ROPE = {"heads": 9, "kv_heads": 3, "head_dim": 64, "style": "half", "bucket": 4}
LINEAR = {"fmt": "q4_1", "m": 41, "k": 64, "add": True, "rows": "tokens", "bucket": 4}
NORM = {"width": 64, "eps": 1e-5, "rows": "tokens", "bucket": 4}
EMBED = {"fmt": "q8_0", "vocab": 100, "width": 64, "bucket": 4}
MOVES = {"width": 192, "bucket": 64}
RECUR = {"width": 68, "stride": 204, "offset": 64, "bucket": 4}
GATE = {"bucket": 64}
EXAMPLES: dict[str, dict[str, Any]] = {
    "attention": ATTENTION, "rope_append": ROPE, "linear": LINEAR, "rms_norm": NORM, "embed": EMBED, "move_slots": MOVES,
    "recur": RECUR, "gate": GATE, "shift": GATE,
}  # fmt: skip


def catalogue() -> dict[str, str]:
    """Every variant of every template, by a name that says which."""
    specs: list[tuple[str, dict[str, Any]]] = []
    for fmt in FORMATS:
        specs.append(("embed", {**EMBED, "fmt": fmt}))
        specs += [("linear", {**LINEAR, "fmt": fmt, "bucket": bucket}) for bucket in (1, 2, 4, 8, 16, 64)]
    specs += [("linear", {**LINEAR, "add": False}), ("linear", {**LINEAR, "rows": "reads"})]
    specs += [("rms_norm", NORM), ("rms_norm", {**NORM, "width": 63, "rows": "reads"})]
    specs += [("rope_append", ROPE), ("rope_append", {**ROPE, "style": "interleaved"})]
    specs += [("attention", {**ATTENTION, "head_dim": size}) for size in (4, 64, 80, 128, 256)]
    specs += [("move_slots", MOVES), ("recur", RECUR), ("gate", GATE), ("shift", GATE), ("grids", {"grids": ((3, 2, 1), (9, 1, 1))})]
    specs += [("repack", {"fmt": fmt, "blocks": 100}) for fmt in ("q4_1", "q8_0")]
    return {f"{adapter} {name} {params}": render(name, params, adapter).source for adapter in ADAPTERS for name, params in specs}


def test_tint_compiles_every_kernel() -> None:
    assert compile_wgsl(catalogue()) == {}


def test_tint_helper_reports_an_error_by_name() -> None:
    errors = compile_wgsl({"broken": "fn main( {", "fine": "@compute @workgroup_size(1) fn main() {}"}, pipelines=True)
    assert set(errors) == {"broken"} and "expected" in errors["broken"]


def test_kernels_run_right_under_tint_on_swiftshader() -> None:
    printed = run_in_dawn(["selftest"])
    assert "passed, software=True" in printed and "passed, software=False" in printed


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_bindings_are_those_of_the_catalogue(name: str, adapter: kernels_wgsl.AdapterClass) -> None:
    kernel = render(name, EXAMPLES[name], adapter)
    assert kernel.bindings == TEMPLATES[name].bindings
    assert set(EXAMPLES[name]) == set(TEMPLATES[name].params)
    assert len(kernel.bindings) <= 8
    assert kernel.workgroup <= 256 and f"@workgroup_size({kernel.workgroup})" in kernel.source


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_attention_holds_8192_positions_within_the_iteration_bound(adapter: kernels_wgsl.AdapterClass) -> None:
    made = rules.rule("attention", {**ATTENTION, "head_dim": 256}, adapter)
    positions = made.values["positions"]
    assert isinstance(positions, int) and positions >= 8192
    assert made.iterations <= MAX_ITERATIONS


def test_no_subgroups_and_next_to_no_barriers_on_software_adapters() -> None:
    for name, source in catalogue().items():
        assert "subgroup" not in source and "enable f16" not in source
        if name.startswith("software"):
            assert source.count("workgroupBarrier()") == (1 if "attention" in name else 0), name


REFUSED = [
    ("linear", {"k": 33}, "k 33 is not a multiple of 32"),
    ("linear", {"fmt": "q5_k"}, "fmt must be one of f32, f16, q4_1, q8_0; got 'q5_k'"),
    ("linear", {"m": 0}, "m must be a whole number >= 1, got 0"),
    ("linear", {"m": 5_000_000}, "over 65535 workgroups"),
    ("linear", {"add": "yes"}, "add must be true or false"),
    ("linear", {"rows": "words"}, "rows must be one of tokens, reads"),
    ("linear", {"k": 32 * 70_000}, "over the bound of 60000"),
    ("rms_norm", {"width": 1_000_001}, "loop iterations, over the bound"),
    ("rms_norm", {"eps": float("nan")}, "eps must be a finite number"),
    ("embed", {"width": 33}, "width 33 is not a multiple of 32"),
    ("rope_append", {"head_dim": 7}, "head_dim 7 is odd"),
    ("move_slots", {"width": 6}, "width 6 is not a multiple of 4"),
    ("move_slots", {"bucket": 70_000}, "over the bound of 60000"),
    ("attention", {"head_dim": 66}, "head_dim 66 must be a multiple of 4"),
    ("attention", {"head_dim": 512}, "at most 256"),
    ("attention", {"kv_heads": 2}, "9 heads cannot share 2 KV heads"),
    ("attention", {"scale": "big"}, "scale must be a finite number"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_refused(name: str, change: dict[str, Any], message: str) -> None:
    params = {**EXAMPLES[name], **change}
    with pytest.raises(TemplateError, match=message):
        render(name, params, "software")
    with pytest.raises(KernelError, match=message):
        lavapipe().compile(TemplateSpec(name, tuple(sorted(params.items()))))


def test_unknown_and_incomplete() -> None:
    with pytest.raises(TemplateError, match="unknown WGSL template 'conv'"):
        render("conv", {}, "gpu")
    with pytest.raises(TemplateError, match="parameter vocab is missing"):
        render("embed", {"fmt": "f32", "width": 4}, "gpu")
    with pytest.raises(KernelError, match="unknown kernel template"):
        lavapipe().compile(TemplateSpec("conv"))


def test_buckets_that_share_a_text_share_a_pipeline() -> None:
    device = lavapipe()
    few, many = (device.compile(TemplateSpec("linear", tuple(sorted({**LINEAR, "bucket": bucket}.items())))) for bucket in (8, 32))
    assert few.pipeline is many.pipeline and few.grid != many.grid
    assert device.compile(few.spec) is few
