"""What each kernel template needs beside its text: bindings, workgroup, grid and the most loop iterations of one invocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from kernels_wgsl import shapes

AdapterClass = Literal["software", "gpu"]
MAX_ITERATIONS = 60_000  # lavapipe cuts an invocation at 65,535 loop iterations, all loops together, without an error
MAX_GROUPS = 65_535  # workgroups a dispatch dimension, WebGPU's default limit
QUANT_FORMATS = ("q4_1", "q8_0")
FORMATS = ("f32", "f16", *QUANT_FORMATS)
BLOCK = 32  # weights of one quantised block; also the k-step of the linear kernels

_STEP = ("step", "r", "array<u32>")
_QUANTS_VEC = {"f32": "array<vec4<f32>>", "f16": "array<vec4<u32>>", "q4_1": "array<vec4<u32>>", "q8_0": "array<vec4<u32>>"}
_QUANTS_SCALAR = {"f32": "array<f32>", "f16": "array<u32>", "q4_1": "array<u32>", "q8_0": "array<u32>"}
_SCALES = {"f32": "array<f32>", "f16": "array<u32>", "q4_1": "array<u32>", "q8_0": "array<f32>"}


class TemplateError(ValueError):
    """A template is unknown, or its parameters ask for a kernel that cannot be right."""


@dataclass(frozen=True)
class WgslKernel:
    """Rendered WGSL. `bindings` are (name, "r" | "rw") in binding order; `grid` counts workgroups; `iterations` is a
    proven bound on the loop iterations of one invocation."""

    source: str
    workgroup: int
    grid: tuple[int, int, int]
    bindings: tuple[tuple[str, str], ...]
    iterations: int


@dataclass(frozen=True)
class Rule:
    """How to render one kernel: its file, (name, access, WGSL type) of each binding, and the values the text reads."""

    file: str
    bindings: tuple[tuple[str, str, str], ...]
    workgroup: int
    grid: tuple[int, int, int]
    iterations: int
    values: Mapping[str, object] = field(default_factory=dict)


class Params:
    """Typed access to template parameters; a wrong one is a TemplateError that names it."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        self.name, self.values = name, values

    def size(self, key: str) -> int:
        """A whole number >= 1."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TemplateError(f"{self.name}: {key} must be a whole number >= 1, got {value!r}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise TemplateError(f"{self.name}: {key} must be a finite number, got {value!r}")
        return float(value)

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """One of `allowed`."""
        value = self.get(key)
        if value not in allowed:
            raise TemplateError(f"{self.name}: {key} must be one of {', '.join(allowed)}; got {value!r}")
        return str(value)

    def get(self, key: str) -> object:
        """The raw value."""
        if key not in self.values:
            raise TemplateError(f"{self.name}: parameter {key} is missing")
        return self.values[key]


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def float_literal(value: float) -> str:
    """A WGSL f32 literal."""
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _embed(p: Params, adapter: AdapterClass) -> Rule:
    fmt, width = p.choice("fmt", FORMATS), p.size("width")
    if fmt in QUANT_FORMATS and width % BLOCK:
        raise TemplateError(f"embed: width {width} is not a multiple of {BLOCK}, as format {fmt} needs")
    table = (("quants", "r", _QUANTS_SCALAR[fmt]), ("scales", "r", _SCALES[fmt]))
    bindings = (_STEP, ("arena", "r", "array<u32>"), *table, ("out", "rw", "array<f32>"))
    values = {"fmt": fmt, "width": width, "vocab": p.size("vocab"), "blocks": width // BLOCK}
    return Rule("embed.wgsl", bindings, 64, (ceil_div(width, 64), p.size("bucket"), 1), 1, values)


def _rms_norm(p: Params, adapter: AdapterClass) -> Rule:
    width, rows = p.size("width"), p.choice("rows", ("tokens", "reads"))
    workgroup = 16 if adapter == "software" else 128
    vec = 4 if width % 4 == 0 else 1
    element = "array<vec4<f32>>" if vec == 4 else "array<f32>"
    bindings = (_STEP, ("x", "r", element), ("weight", "r", element), ("out", "rw", element))
    n = width // vec
    values = {"n": n, "vec": vec, "width": width, "eps": float_literal(p.number("eps")), "rows": rows, "workgroup": workgroup}
    if adapter == "software":
        return Rule("rms_norm_serial.wgsl", bindings, workgroup, (p.size("bucket"), 1, 1), n + ceil_div(n, workgroup), values)
    return Rule("rms_norm_tree.wgsl", bindings, workgroup, (p.size("bucket"), 1, 1), 2 * ceil_div(n, workgroup) + 8, values)


def _linear(p: Params, adapter: AdapterClass) -> Rule:
    fmt, m, k, bucket = p.choice("fmt", FORMATS), p.size("m"), p.size("k"), p.size("bucket")
    if k % BLOCK:
        raise TemplateError(f"linear: k {k} is not a multiple of {BLOCK}")
    blocks = k // BLOCK
    rows = p.choice("rows", ("tokens", "reads"))
    add = p.get("add")
    if not isinstance(add, int):
        raise TemplateError(f"linear: add must be true or false, got {add!r}")
    bindings = (
        _STEP,
        ("x", "r", "array<vec4<f32>>"),
        ("quants", "r", _QUANTS_VEC[fmt]),
        ("scales", "r", _SCALES[fmt]),
        ("out", "rw", "array<f32>"),
    )
    values = {"fmt": fmt, "m": m, "k": k, "blocks": blocks, "add": bool(add), "rows": rows}
    shape = shapes.linear(adapter, fmt, m, bucket)
    values |= {"tile_m": shape.tile_m, "tile_t": shape.tile_t, "workgroup": shape.workgroup, "lanes": shape.lanes}
    grid = (ceil_div(m, shape.rows_per_group), ceil_div(bucket, shape.tokens_per_group), 1)
    return Rule(f"linear_{shape.style}.wgsl", bindings, shape.workgroup, grid, shape.iterations(blocks), values)


def _rope_append(p: Params, adapter: AdapterClass) -> Rule:
    heads, kv_heads, head_dim = p.size("heads"), p.size("kv_heads"), p.size("head_dim")
    style = p.choice("style", ("interleaved", "half"))
    if head_dim % 2:
        raise TemplateError(f"rope_append: head_dim {head_dim} is odd; rotation works on pairs")
    f32 = "array<f32>"
    bindings = (_STEP, ("qkv", "r", f32), ("freqs", "r", f32), ("q", "rw", f32), ("k_cache", "rw", f32), ("v_cache", "rw", f32))
    pairs = (heads + 2 * kv_heads) * (head_dim // 2)
    values = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "style": style}
    return Rule("rope_append.wgsl", bindings, 64, (ceil_div(pairs, 64), p.size("bucket"), 1), 1, values)


def _attention(p: Params, adapter: AdapterClass) -> Rule:
    heads, kv_heads, head_dim = p.size("heads"), p.size("kv_heads"), p.size("head_dim")
    if head_dim % 4 or head_dim > 256:
        raise TemplateError(f"attention: head_dim {head_dim} must be a multiple of 4 and at most 256")
    if heads % kv_heads:
        raise TemplateError(f"attention: {heads} heads cannot share {kv_heads} KV heads; heads must be a multiple of kv_heads")
    vec = "array<vec4<f32>>"
    bindings = (_STEP, ("q", "r", vec), ("k_cache", "r", vec), ("v_cache", "r", vec), ("out", "rw", vec))
    shape = shapes.attention(adapter, heads, kv_heads, head_dim)
    values = {
        "heads": heads,
        "kv_heads": kv_heads,
        "vecs": head_dim // 4,
        "scale": float_literal(p.number("scale")),
        "lanes": shape.lanes,
        "positions": shape.positions,
        "heads_together": shape.heads_together,
        "slices": shape.slices,
        "ahead": shape.ahead,
    }
    grid = (heads // shape.heads_together, p.size("bucket"), 1)
    return Rule(f"attention_{shape.style}.wgsl", bindings, shape.lanes, grid, shape.iterations(head_dim // 4), values)


def _move_slots(p: Params, adapter: AdapterClass) -> Rule:
    width, bucket = p.size("width"), p.size("bucket")
    if width % 4:
        raise TemplateError(f"move_slots: width {width} is not a multiple of 4")
    vec = "array<vec4<f32>>"
    bindings = (_STEP, ("k_cache", "rw", vec), ("v_cache", "rw", vec))
    return Rule("move_slots.wgsl", bindings, 64, (ceil_div(width // 2, 64), 1, 1), bucket, {"vecs": width // 4, "bucket": bucket})


def _recur(p: Params, adapter: AdapterClass) -> Rule:
    width, stride, bucket = p.size("width"), p.size("stride"), p.size("bucket")
    offset = p.get("offset")
    if width % 4 or stride % 4:
        raise TemplateError(f"recur: width {width} and stride {stride} must be multiples of 4")
    if not isinstance(offset, int) or isinstance(offset, bool) or offset % 4 or not 0 <= offset <= stride - width:
        raise TemplateError(f"recur: offset must be a multiple of 4 in 0 .. {stride - width} (stride - width), got {offset!r}")
    f32 = "array<f32>"
    bindings = (_STEP, ("arena", "r", "array<u32>"), ("x", "r", f32), ("decay", "r", f32), ("gain", "r", f32), ("state", "rw", f32))
    values = {"width": width, "stride": stride, "offset": offset, "bucket": bucket}
    # one row of invocations more than runs: for token rows that no run covers
    return Rule("recur.wgsl", (*bindings, ("out", "rw", f32)), 64, (ceil_div(width, 64), bucket + 1, 1), bucket, values)


def _gate(p: Params, adapter: AdapterClass) -> Rule:
    bucket = p.size("bucket")
    places = 2 * bucket + 1  # of one pass: its rows, their runs, its lane
    workgroup = 1 if adapter == "software" else 64
    words = "array<u32>"
    values = {"bucket": bucket, "places": places, "workgroup": workgroup}
    iterations = ceil_div(bucket, workgroup) * (places + 1)
    return Rule("gate.wgsl", (("step", "rw", words), ("arena", "rw", words)), workgroup, (1, 1, 1), iterations, values)


def _shift(p: Params, adapter: AdapterClass) -> Rule:
    bucket = p.size("bucket")
    workgroup = 1 if adapter == "software" else 64
    words = "array<u32>"
    iterations = ceil_div(bucket, workgroup) * (bucket + 1)
    return Rule(
        "shift.wgsl",
        (("step", "rw", words), ("arena", "rw", words)),
        workgroup,
        (1, 1, 1),
        iterations,
        {"bucket": bucket, "workgroup": workgroup},
    )


def _grids(p: Params, adapter: AdapterClass) -> Rule:
    grids = p.get("grids")
    if not isinstance(grids, tuple) or not grids or any(not isinstance(n, int) or not 0 < n <= MAX_GROUPS for grid in grids for n in grid):
        raise TemplateError(f"grids: a tuple of grids of 1 to {MAX_GROUPS} workgroups a dimension is needed, got {grids!r}")
    words = [n for grid in grids for n in grid]
    return Rule("grids.wgsl", (_STEP, ("grids", "rw", "array<u32>")), 1, (1, 1, 1), 1, {"words": words})


def _repack(p: Params, adapter: AdapterClass) -> Rule:
    fmt = p.choice("fmt", QUANT_FORMATS)
    bindings = (("job", "r", "array<u32>"), ("raw", "r", "array<u32>"), ("quants", "rw", "array<u32>"), ("scales", "rw", _SCALES[fmt]))
    groups, wide = ceil_div(p.size("blocks"), 64), 1024  # a fixed row length: one pipeline serves every size
    return Rule(f"repack_{fmt}.wgsl", bindings, 64, (min(groups, wide), ceil_div(groups, wide), 1), 8, {"row": wide * 64})


RULES: dict[str, Callable[[Params, AdapterClass], Rule]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "rope_append": _rope_append,
    "attention": _attention,
    "move_slots": _move_slots,
    "recur": _recur,
    "gate": _gate,
    "shift": _shift,
    "grids": _grids,
    "repack": _repack,
}


def rule(name: str, params: Mapping[str, object], adapter: AdapterClass) -> Rule:
    """The checked rule of kernel `name`. Raises TemplateError for an unknown name, a bad parameter, or a kernel over a bound."""
    make = RULES.get(name)
    if make is None:
        raise TemplateError(f"unknown WGSL template {name!r}; known: {', '.join(sorted(RULES))}")
    made = make(Params(name, params), adapter)
    if made.iterations > MAX_ITERATIONS:
        raise TemplateError(
            f"{name}: one invocation would run {made.iterations} loop iterations, over the bound of {MAX_ITERATIONS} "
            f"that every adapter honours; parameters {dict(params)}"
        )
    if max(made.grid) > MAX_GROUPS:
        raise TemplateError(f"{name}: grid {made.grid} is over {MAX_GROUPS} workgroups in one dimension; parameters {dict(params)}")
    return made
