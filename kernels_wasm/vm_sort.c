// Sorting, greatest first, ties by lower index: a stable radix sort by ordered keys, short rows by key and index in one u64.
#include "vm.h"

enum { SHORT_ROW = 256, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

NOINLINE void sort_u64_desc(uint64_t *v, uint32_t n) {
  static const uint32_t gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
  for (uint32_t g = 0; g < sizeof gaps / sizeof *gaps; g++) {
    uint32_t gap = gaps[g];
    for (uint32_t i = gap; i < n; i++) {
      uint64_t moved = v[i];
      uint32_t j = i;
      for (; j >= gap && v[j - gap] < moved; j -= gap) v[j] = v[j - gap];
      v[j] = moved;
    }
  }
}

// Writes the keys of n elements, upside down so that ascending order is descending order of the elements.
static NOINLINE void write_keys(uint32_t *out, const uint32_t *x, uint32_t n, KeyKind kind) {
  uint32_t i = 0;
  for (; i + 4 <= n; i += 4) wasm_v128_store(out + i, wasm_v128_not(ordered_keys(wasm_v128_load(x + i), kind)));
  for (; i < n; i++) out[i] = ~(uint32_t)wasm_i32x4_extract_lane(ordered_keys(wasm_v128_load32_splat(x + i), kind), 0);
}

// Index order of a row in descending order; the result lies in `work` (4 n words and DIGITS).
static const uint32_t *radix_order(uint32_t *work, const uint32_t *x, uint32_t n, KeyKind kind) {
  uint32_t *counts = work, *keys = work + DIGITS, *order = keys + n, *next_keys = order + n, *next_order = next_keys + n;
  write_keys(keys, x, n, kind);
  for (uint32_t i = 0; i < n; i++) order[i] = i;
  for (uint32_t shift = 0; shift < 32; shift += DIGIT_BITS) {
    __builtin_memset(counts, 0, 4 * DIGITS);
    for (uint32_t i = 0; i < n; i++) counts[keys[i] >> shift & (DIGITS - 1)]++;
    if (counts[keys[0] >> shift & (DIGITS - 1)] == n) continue;  // one digit for all
    for (uint32_t digit = 0, before = 0; digit < DIGITS; digit++) {
      uint32_t count = counts[digit];
      counts[digit] = before, before += count;
    }
    for (uint32_t i = 0; i < n; i++) {
      uint32_t to = counts[keys[i] >> shift & (DIGITS - 1)]++;
      next_keys[to] = keys[i], next_order[to] = order[i];
    }
    uint32_t *swap = keys;
    keys = next_keys, next_keys = swap;
    swap = order, order = next_order, next_order = swap;
  }
  return order;
}

// The first k of a row in descending order: `values` and `indices`, k each. `work`: 4 n words and DIGITS.
static void sort_row(const uint32_t *x, uint32_t n, uint32_t k, KeyKind kind, uint32_t *values, uint32_t *indices, uint32_t *work) {
  if (n > SHORT_ROW) {
    const uint32_t *order = radix_order(work, x, n, kind);
    for (uint32_t i = 0; i < k; i++) indices[i] = order[i], values[i] = x[order[i]];
    return;
  }
  uint32_t keys[SHORT_ROW];
  uint64_t *both = (uint64_t *)(void *)work;
  write_keys(keys, x, n, kind);
  for (uint32_t i = 0; i < n; i++) both[i] = key_and_index(~keys[i], i);
  sort_u64_desc(both, n);
  for (uint32_t i = 0; i < k; i++) {
    uint32_t at = ~(uint32_t)both[i];
    indices[i] = at, values[i] = x[at];
  }
}

// d: values; table: rows, n, k, key kind (3 words), indices and work as words from d.
void vm_sort_desc(const VmArgs *x) {
  const uint32_t *t = words(x->c), rows = t[0], n = t[1], k = t[2];
  uint32_t *values = (uint32_t *)(void *)x->d;
  for (uint32_t r = 0; r < rows; r++)
    sort_row(words(x->a) + r * n, n, k, key_kind(t + 3), values + r * k, values + (int32_t)t[6] + r * k, values + (int32_t)t[7]);
}
