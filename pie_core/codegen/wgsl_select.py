"""Selection in WGSL: the k-th greatest key of a row, or where a mass is reached, by radix passes; pivots and top-k on top of it."""

from __future__ import annotations

from pie_core.codegen.wgsl_routines import BINS, Routine, Rows, digit_iterations, fill, key_at
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

PIVOT_MASS = """fn NAME(lid: u32, source: u32, result: u32, p: f32) {  // where the mass of the greatest elements of each row reaches p
  let want = mass(p);
  for (var row = 0u; row < $rows; row += 1u) {
    let first = source + row * $n;
$select
    let each = mass(f_unkey(key));
    var most = 0xffffffffu;  // elements of this key that are kept, the lowest indices first
    if (each != 0u) { most = (want - above + each - 1u) / each; }
    if (lid == 0u) {
      scratch[result + 2u * row] = select(max(key, 1u), 0xffffffffu, want == 0u);
      scratch[result + 2u * row + 1u] = 0xffffffffu;
    }
    storageBarrier();
    let start = min(lid * $part, $n);
    let end = min(start + $part, $n);
    var equal = 0u;
    for (var i = start; i < end; i += 1u) { equal += select(0u, 1u, $key == key); }
    var seen = before(lid, equal);
    if (seen < most && most <= seen + equal) {
      for (var i = start; i < end; i += 1u) {
        if ($key == key) {
          seen += 1u;
          if (seen == most) { scratch[result + 2u * row + 1u] = i; }
        }
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
    }
    storageBarrier();
  }
}"""


def _select(source: Rows, workgroup: int, by_mass: bool) -> tuple[str, int]:
    region, dtype, _, n = source
    amount = f"mass({region_value(region, 'first + i', 'f32')})"
    add = f"add_to_bin((k >> shift) & 255u, {amount});" if by_mass else "atomicAdd(&bins[(k >> shift) & 255u], 1u);"
    text = fill(SELECT, n=n, wg=workgroup, key=key_at(region, "first + i", dtype), add=add)
    return text, 4 * (1 + -(-BINS // workgroup) + -(-n // workgroup) + digit_iterations(workgroup))


def pivot(by_mass: bool, source: Rows, workgroup: int) -> Routine:
    """(lid, source, result, k u32 or p f32): two words a row, the least key kept and the last index kept of those equal to it."""
    region, _, rows, n = source
    select, iterations = _select(source, workgroup, by_mass)
    part = -(-n // workgroup)
    text = PIVOT_MASS if by_mass else PIVOT_RANK
    values = {"part": part, "key": key_at(region, "first + i", "f32")} if by_mass else {}
    if by_mass:
        iterations += 2 * part + workgroup
    return Routine(fill(text, n=n, rows=rows, select=select, **values), rows * (1 + iterations))


def top_k(source: Rows, k: int, workgroup: int) -> Routine:
    """(lid, source, values, indices, work of 2 k words): the k greatest of each row in order."""
    region, dtype, rows, n = source
    select, iterations = _select(source, workgroup, False)
    part = -(-n // workgroup)
    word = region_word(region, "first + at")
    key = key_at(region, "first + i", dtype)
    text = fill(TOP_K, n=n, k=k, rows=rows, wg=workgroup, part=part, select=select, key=key, word=word)
    return Routine(text, rows * (1 + iterations + 2 * part + workgroup + -(-k // workgroup) * (1 + k)))
