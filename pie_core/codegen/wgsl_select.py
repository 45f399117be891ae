"""Selection in WGSL: the k-th greatest key of a row, or where a mass is reached, by radix passes; pivots and top-k on top of it."""

from __future__ import annotations

from pie_core.codegen.wgsl_routines import BINS, Routine, Rows, again, digit_iterations, fill, key_at
from pie_core.codegen.wgsl_writer import region_value, region_word

# (the key where `want` is reached, walking from the greatest down; the count or mass of what is above it), for a row from index `first`
SELECT = """    var key = 0u;
    var mask = 0u;
    var above = 0u;
    for (var turn = 0u; turn < 4u; turn += 1u) {  // bits of the key, eight at a time
      let shift = 24u - 8u * turn;
      clear_bins(lid);
      for (var i = lid; i < $n; i += $wg) {
        let k = $key;
        if ((k & mask) == key) { $add }
      }
      let digit = digit_of(lid, want - above);
      key |= digit.x << shift;
      above += digit.y;
      mask |= 255u << shift;
    }"""

COUNT = "atomicAdd(&bins[(k >> shift) & 255u], 1u);"

PIVOT_RANK = """fn NAME(lid: u32, source: u32, result: u32, k: u32) {  // the key of the k-th greatest element of each row
  let want = min(k, $n);
  for (var row = 0u; row < $rows; row += 1u) {
    let first = source + row * $n;
$select
    if (lid == 0u) {
      scratch[result + 2u * row] = select(max(key, 1u), 0xffffffffu, want == 0u);  // 1: no NaN
      scratch[result + 2u * row + 1u] = 0xffffffffu;
    }
  }
}"""

PIVOT_MASS = """fn NAME(lid: u32, order: u32, source: u32, result: u32, p: f32) {  // where the mass, walked by descending order, reaches p
  let want = mass(p);
  for (var row = 0u; row < $rows; row += 1u) {
    let first = order + row * $n;
    let weights = source + row * $n;
$select
    if (lid == 0u) {
      scratch[result + 2u * row] = select(max(key, 1u), 0xffffffffu, want == 0u);  // 1: no NaN
      scratch[result + 2u * row + 1u] = 0xffffffffu;
    }
    storageBarrier();
    let start = min(lid * $part, $n);
    let end = min(start + $part, $n);
    var held = 0u;  // by elements of this key, of which the lowest indices are kept
    for (var i = start; i < end; i += 1u) { held = min(held + select(0u, $weight, $key == key), 0x40000000u); }
    above += mass_before(lid, held);
    if (key != 0u && above < want && want <= above + held) {
      for (var i = start; i < end && above < want; i += 1u) {
        above += select(0u, $weight, $key == key);
        if (above >= want) { scratch[result + 2u * row + 1u] = i; }
      }
    }
  }
}"""

TOP_K = """fn NAME(lid: u32, source: u32, values: u32, indices: u32, work: u32) {  // the k greatest of each row: select, compact, rank
  let want = $k;
  for (var row = 0u; row < $rows; row += 1u) {
    let first = source + row * $n;
$select
    if (lid == 0u) { atomicStore(&filled, 0u); }
    // the greater ones all, of those equal to the key the first: each thread counts how many the threads before it hold
    let start = min(lid * $part, $n);
    let end = min(start + $part, $n);
    var equal = 0u;
    for (var i = start; i < end; i += 1u) { equal += select(0u, 1u, $key == key); }
    var seen = before(lid, equal);
    for (var i = start; i < end; i += 1u) {
      let k = $key;
      if (k > key || (k == key && seen < want - above)) {
        let slot = atomicAdd(&filled, 1u);
        scratch[work + slot] = i;
        scratch[work + $k + slot] = k;
      }
      seen += select(0u, 1u, k == key);
    }
    storageBarrier();
    // in order: an element's place is the number of those that come before it
    for (var a = lid; a < $k; a += $wg) {
      let at = scratch[work + a];
      let k = scratch[work + $k + a];
      var rank = row * $k;
      for (var b = 0u; b < $k; b += 1u) {
        let other = scratch[work + $k + b];
        rank += select(0u, 1u, other > k || (other == k && scratch[work + b] < at));
      }
      scratch[values + rank] = $word;
      scratch[indices + rank] = at;
    }$again
  }
}"""


def _select(source: Rows, workgroup: int, add: str) -> tuple[str, int]:
    """The text with `add` for what takes element k into its bin, and its loop iterations."""
    region, dtype, _, n = source
    text = fill(SELECT, n=n, wg=workgroup, key=key_at(region, "first + i", dtype), add=add)
    return text, 4 * (1 + -(-BINS // workgroup) + -(-n // workgroup) + digit_iterations(workgroup))


def pivot_rank(source: Rows, workgroup: int) -> Routine:
    """(lid, source, result, k u32): two words a row, the least key kept and the last index kept of those equal to it."""
    select, iterations = _select(source, workgroup, COUNT)
    return Routine(fill(PIVOT_RANK, n=source.n, rows=source.rows, select=select), source.rows * (1 + iterations))


def pivot_mass(order: Rows, weights: str, workgroup: int) -> Routine:
    """(lid, order, source, result, p f32): the same two words a row by the mass of the probabilities in region `weights`."""
    region, _, rows, n = order
    weight = f"mass({region_value(weights, 'weights + i', 'f32')})"
    select, iterations = _select(order, workgroup, f"add_to_bin((k >> shift) & 255u, {weight});")
    part = -(-n // workgroup)
    text = fill(PIVOT_MASS, n=n, rows=rows, part=part, select=select, key=key_at(region, "first + i", "f32"), weight=weight)
    return Routine(text, rows * (1 + iterations + 2 * part + workgroup))


def top_k(source: Rows, k: int, workgroup: int) -> Routine:
    """(lid, source, values, indices, work of 2 k words): the k greatest of each row in order."""
    region, dtype, rows, n = source
    select, iterations = _select(source, workgroup, COUNT)
    part = -(-n // workgroup)
    word = region_word(region, "first + at")
    key = key_at(region, "first + i", dtype)
    text = fill(TOP_K, n=n, k=k, rows=rows, wg=workgroup, part=part, select=select, key=key, word=word, again=again(rows, "storageBarrier"))
    return Routine(text, rows * (1 + iterations + 2 * part + workgroup + -(-k // workgroup) * (1 + k)))
