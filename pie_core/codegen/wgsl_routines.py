"""WGSL functions that a workgroup runs together, from memory to memory: what they share, and prefix sums over threads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template
from typing import NamedTuple

from pie_core.codegen.wgsl_folds import ONE_STEP
from pie_core.codegen.wgsl_writer import region_value, region_word, value_of, word_of

BINS = 256  # of a radix pass


@dataclass(frozen=True)
class Routine:
    """A function `NAME(lid, …)`: its text, with NAME for its name, and the loop iterations of one call by one thread."""

    text: str
    iterations: int


class Rows(NamedTuple):
    """What a routine reads: `rows` rows of `n` elements of `dtype` in a bound region."""

    region: str
    dtype: str
    rows: int
    n: int


# Functions of the workgroup, by name. Each has the barriers that its own arrays need; scratch written before is seen
# behind a storageBarrier, at which all threads arrive.
COMMON: dict[str, str] = {
    "kept": """fn kept(x: f32, least: u32, last: u32, at: u32) -> bool {  // of a pivot: by key, equal keys by index
  let key = f_key(x);
  return key > least || (key == least && at <= last);
}""",
    "mass": """fn mass(p: f32) -> u32 {  // in units of 2^-30; 0 for NaN and below 0
  return select(u32(min(p, 1.0) * 1073741824.0), 0u, bitcast<u32>(p) > 0x7f800000u);
}""",
    "bin_of": """fn bin_of(b: u32) -> u32 {  // what a bin holds, at most 2^30: thresholds are not greater
  return select(min(atomicLoad(&bins[b]), 0x40000000u), 0x40000000u, atomicLoad(&wrapped) == b + 1u);
}""",
    "add_to_bin": """fn add_to_bin(b: u32, amount: u32) {
  let held = atomicAdd(&bins[b], amount);
  if (held + amount < held) { atomicMax(&wrapped, b + 1u); }  // the greatest one: no walk goes below it
}""",
    "clear_bins": f"""fn clear_bins(lid: u32) {{
  for (var b = lid; b < {BINS}u; b += $wg) {{ atomicStore(&bins[b], 0u); }}
  if (lid == 0u) {{ atomicStore(&wrapped, 0u); }}
  workgroupBarrier();
}}""",
    "digit_of": """fn digit_of(lid: u32, want: u32) -> vec2<u32> {  // the greatest bin that reaches `want`, and the sum above it
  workgroupBarrier();
  var above = 0u;
$walk
  workgroupBarrier();
  return vec2<u32>(b, above);
}""",
    "mass_before": """fn mass_before(lid: u32, held: u32) -> u32 {  // the sum of `held` over the threads before this one, at most 2^30
$mass_scan
}""",
    "before": """fn before(lid: u32, count: u32) -> u32 {  // the sum of `count` over the threads before this one
$scan
}""",
}
COMMON_BARRIERS = {"clear_bins": 1, "digit_of": 3, "mass_before": 1, "before": 1}  # of the text behind each name
# The walk over bins of digit_of: bin by bin in a small workgroup (a barrier costs more), else over blocks of 16 first.
WALK_BINS = """  var b = 255u;
  for (var j = 0u; j < 255u; j += 1u) {
    let held = bin_of(b);
    if (held >= want - above) { break; }
    above += held;
    b -= 1u;
  }"""
WALK_BLOCKS = """  if (lid < 16u) {
    var sum = 0u;
    for (var j = 0u; j < 16u; j += 1u) { sum = min(sum + bin_of(lid * 16u + j), 0x40000000u); }
    blocks[lid] = sum;
  }
  workgroupBarrier();
  var block = 15u;
  for (var j = 0u; j < 15u; j += 1u) {
    if (blocks[block] >= want - above) { break; }
    above += blocks[block];
    block -= 1u;
  }
  var b = block * 16u + 15u;
  for (var j = 0u; j < 15u; j += 1u) {
    let held = bin_of(b);
    if (held >= want - above) { break; }
    above += held;
    b -= 1u;
  }"""
SHARED = {
    "bins": "var<workgroup> bins: array<atomic<u32>, 256>;",
    "wrapped": "var<workgroup> wrapped: atomic<u32>;",
    "filled": "var<workgroup> filled: atomic<u32>;",
    "parts": "var<workgroup> parts: array<u32, $wg>;",
    "blocks": "var<workgroup> blocks: array<u32, 16>;",
}


def digit_iterations(workgroup: int) -> int:
    """Loop iterations of digit_of."""
    return BINS - 1 if workgroup <= ONE_STEP else 16 + 15 + 15


def fill(text: str, **values: object) -> str:
    """`text` with each $name replaced; numbers as u32 literals."""
    return Template(text).substitute({k: f"{v}u" if isinstance(v, int) else str(v) for k, v in values.items()})


def again(rows: int, barrier: str = "workgroupBarrier") -> str:
    """The end of a loop over rows: a barrier, since the next row writes what this one read; nothing where there is no next row."""
    return f"\n    {barrier}();" if rows > 1 else ""


def scan(value: str, dtype: str, join: str, identity: str) -> str:
    """Statements of a function that returns `value` joined over the threads before this one, in order: at most one iteration a thread.
    `join` is an expression over {0}, the sum, and {1}. Some barrier has to stand before the next call."""
    return f"""  parts[lid] = {word_of(value, dtype)};
  workgroupBarrier();
  var sum = {identity};
  for (var j = 0u; j < lid; j += 1u) {{ sum = {join.format("sum", value_of("parts[j]", dtype))}; }}
  return sum;"""


def key_at(region: str, at: str, dtype: str) -> str:
    """WGSL: the ordered key of the element at index `at` of a region."""
    if dtype == "f32":
        return f"f_key({region_value(region, at, dtype)})"
    return f"({region_word(region, at)} ^ 0x80000000u)" if dtype == "i32" else region_word(region, at)


_CALL = re.compile(r"\b([a-z]\w*)\(")
_SHARED = re.compile(r"&?\b([a-z]\w*)\b(?=\[|\)|,)")


def common(code: str, workgroup: int) -> tuple[list[str], list[str]]:
    """(functions, shared variables) that `code` uses, directly or through others."""
    scanned, masses = scan("count", "u32", "{0} + {1}", "0u"), scan("held", "u32", "min({0} + {1}, 0x40000000u)", "0u")
    walk = WALK_BINS if workgroup <= ONE_STEP else WALK_BLOCKS
    needed: dict[str, str] = {}
    todo = [code]
    while todo:
        for name in set(_CALL.findall(todo.pop())):
            if name in COMMON and name not in needed:
                needed[name] = fill(COMMON[name], wg=workgroup, scan=scanned, mass_scan=masses, walk=walk)
                todo.append(needed[name])
    functions = [needed[name] for name in COMMON if name in needed]
    names = set(_SHARED.findall("\n".join([code, *functions])))
    return functions, [fill(text, wg=str(workgroup)) for name, text in SHARED.items() if name in names]
