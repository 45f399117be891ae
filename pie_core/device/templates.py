"""The catalogue of kernel templates: bindings and parameters of each, read by both devices and by their tests.

All activations are f32, row-major, [rows, width]. `rows` is "tokens" or "reads": which count of the step header bounds
the rows; `bucket` is the most rows of one launch (the grid on webgpu; the cpu device reads the true count).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie_core.device.protocol import KernelError, ParamValue, TemplateSpec


@dataclass(frozen=True)
class TemplateInfo:
    """`bindings`: (name, "r" | "rw") in binding order; `params`: parameter names; `doc`: what it computes."""

    bindings: tuple[tuple[str, str], ...]
    params: tuple[str, ...]
    doc: str


TEMPLATES: dict[str, TemplateInfo] = {
    "embed": TemplateInfo(
        (("step", "r"), ("arena", "r"), ("quants", "r"), ("scales", "r"), ("out", "rw")),
        ("fmt", "vocab", "width", "bucket"),
        "out[t] = dequantised row id(t) of [vocab, width]; id = arena[src] when src is set. "
        "An id >= vocab writes a NaN row, a fault that the epilogue's status word reports.",
    ),
    "rms_norm": TemplateInfo(
        (("step", "r"), ("x", "r"), ("weight", "r"), ("out", "rw")),
        ("width", "eps", "rows", "bucket"),
        'out[t] = x[t] * rsqrt(mean(x[t]^2) + eps) * weight. rows="reads": row r reads x[step.read[r]] (the read-out gather).',
    ),
    "linear": TemplateInfo(
        (("step", "r"), ("x", "r"), ("quants", "r"), ("scales", "r"), ("out", "rw")),
        ("fmt", "m", "k", "add", "rows", "bucket"),
        "out[t, m] = sum_k W[m, k] x[t, k]  (+ out[t, m] when add). fmt: f32 f16 q4_1 q8_0; for f32 and f16 bind quants as "
        "scales too. k % 32 == 0.",
    ),
    "rope_append": TemplateInfo(
        (("step", "r"), ("qkv", "r"), ("freqs", "r"), ("q", "rw"), ("k_cache", "rw"), ("v_cache", "rw")),
        ("heads", "kv_heads", "head_dim", "style", "bucket"),
        "qkv[t] = [q | k | v]. Rotates q into `q` [T, heads*head_dim] and k into k_cache[slot], copies v into v_cache[slot]. "
        "freqs[j] = inverse frequency of pair j (f32 [head_dim/2]). style: interleaved (pairs 2j, 2j+1) or half "
        "(j, j + head_dim/2). Angle = pos * freqs[j]. head_dim is a multiple of 4, at most 256.",
    ),
    "attention": TemplateInfo(
        (("step", "r"), ("q", "r"), ("k_cache", "r"), ("v_cache", "r"), ("out", "rw")),
        ("heads", "kv_heads", "head_dim", "scale", "bucket"),
        "out[t] = softmax(scale * q . K) V over the keys that the token sees, through its page table; grouped heads. Without a mask block "
        "they are positions p <= pos with window == 0, p > pos - window or p < sinks. With one, [first, count, bits...], they are stored "
        "tokens 0 .. count - 1: p < first with window == 0, p > pos - window or p < sinks (behind pos or not: pos only turns and "
        "measures the window), p >= first by its bit. Keys are summed by rank, so a token of a tree has the bits of its path alone. "
        "A NaN row: no key is visible; first > count; count, pos or a visible page outside the cache; a block, its bits or a page "
        "table outside the step buffer; a block in the header. webgpu: also more keys than its loops may take (131,072 on software "
        "adapters, 49,152 on GPUs), visible or, with a mask, from first on.",
    ),
    "recur": TemplateInfo(
        (("step", "r"), ("arena", "r"), ("x", "r"), ("decay", "r"), ("gain", "r"), ("state", "rw"), ("out", "rw")),
        ("width", "stride", "offset", "bucket"),
        "The recurrence h = decay * h + gain * x of every run of the step's recurrence table: out[t] = h behind row t. A run starts from "
        "the state in its `start` slot (none: zeros). Its first `limit` rows may be folded: all of them, or as many as arena[cell] (i32, "
        "clamped to 0 .. limit) says; the state behind the folded ones goes to slot `write` (none: nowhere), and the rows behind `limit` "
        "go on from there. state is [slots, stride], this one `width` floats of a slot from `offset` on; all multiples of 4. A NaN row: "
        "no run covers it, or its run leaves the step, the slots or the arena. No two runs of a step may name one `write` slot, nor one "
        "the `start` of another.",
    ),
    "gate": TemplateInfo(
        (("step", "rw"), ("arena", "rw")),
        ("bucket",),
        "Masks passes out of the step that were scheduled behind a stop. For every gate of the step's gate table, [word, cell, places, "
        "count]: arena[word] becomes 1 when arena[cell] is not 0 (cell NONE: nothing to look at); when arena[word] is not 0 the gate is "
        "shut, and NONE is stored at the `count` offsets in the step buffer that stand from `places` on. When every gate is shut and "
        "step[10], the rows without one, is 0, n_tokens and n_reads become 0. Gates of one step have words and places of their own.",
    ),
    "shift": TemplateInfo(
        (("step", "rw"), ("arena", "rw")),
        ("bucket",),
        "Moves rows back to where a count on the device lets them be. For every shift of the step's shift table, [total, fresh, cell, "
        "limit, known, first, early, rows]: arena[total], or 0 when `fresh`, is what was left over so far; unless `cell` is NONE it grows "
        "by limit - clamp(i32 arena[cell], 0, limit). Then pos of the `rows` rows from `first` on becomes less by it, less `known`; "
        "that of the first `early` of them by what it was before. A slot that is not NONE becomes that of the new pos. Runs in front "
        "of `gate`. Shifts of one step have totals and rows of their own, and no cell is the total of another.",
    ),
    "move_slots": TemplateInfo(
        (("step", "r"), ("k_cache", "rw"), ("v_cache", "rw")),
        ("width", "bucket"),
        "For every token row in order: row `slot` of both caches becomes row `id` as it is by then. A row that names a slot outside the "
        "caches is skipped. width: floats of a cache row, a multiple of 4. Its step buffer is a list of its own (device/move_slots.py).",
    ),
}


def template(name: str, **params: ParamValue) -> TemplateSpec:
    """A checked spec. Raises KernelError for an unknown template, and for a missing or unknown parameter."""
    info = TEMPLATES.get(name)
    if info is None:
        raise KernelError(f"unknown kernel template {name!r}; known: {', '.join(sorted(TEMPLATES))}")
    if set(params) != set(info.params):
        raise KernelError(f"template {name} takes parameters {sorted(info.params)}, got {sorted(params)}")
    return TemplateSpec(name, tuple(sorted(params.items())))
