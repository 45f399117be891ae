// Chunk ops that read memory at mapped indices. No index that comes from data reaches memory unchecked. `c` points to the
// instruction's table; the first element of the result is i + imm.
#include "vm.h"

// table: four extents of the result, then four strides of the source in elements (0 repeats), outermost first.
void vm_view(const VmArgs *x) {
  const uint32_t *extent = words(x->c), *stride = extent + 4, *source = words(x->a);
  uint32_t *out = (uint32_t *)(void *)x->d, step = stride[3];
  uint32_t at[4], rest = x->i + x->imm;
  for (int axis = 3; axis > 0; axis--) at[axis] = rest % extent[axis], rest /= extent[axis];
  at[0] = rest;
  for (uint32_t k = 0; k < x->n;) {
    uint32_t run = extent[3] - at[3] < x->n - k ? extent[3] - at[3] : x->n - k;
    const uint32_t *p = source + at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * step;
    if (step == 1) {
      __builtin_memcpy(out + k, p, 4 * run);
    } else {
      for (uint32_t j = 0; j < run; j++) out[k + j] = p[j * step];
    }
    k += run, at[3] = 0;
    for (int axis = 2; axis > 0 && ++at[axis] == extent[axis]; axis--) {
      at[axis] = 0;
      if (axis == 1) at[0]++;
    }
  }
}

// table: rows of a. One index for each element.
void vm_gather(const VmArgs *x) {
  const uint32_t *table = words(x->a), count = word_at(x->c, 0);
  uint32_t *out = (uint32_t *)(void *)x->d, step = x->sb / 16;
  const uint32_t *index = words(x->b);
  for (uint32_t k = 0; k < x->n; k++, index += step) {
    uint32_t at = *index;
    out[k] = at < count ? table[at] : 0;
  }
}

// table: rows of a, elements of a row (over 1). b holds all indices.
void vm_gather_rows(const VmArgs *x) {
  const uint32_t *table = words(x->a), *index = words(x->b), count = word_at(x->c, 0), inner = word_at(x->c, 1);
  uint32_t *out = (uint32_t *)(void *)x->d, i = x->i + x->imm, row = i / inner, col = i % inner;
  for (uint32_t k = 0; k < x->n; row++, col = 0) {
    uint32_t run = inner - col < x->n - k ? inner - col : x->n - k, at = index[row];
    if (at < count) {
      __builtin_memcpy(out + k, table + at * inner + col, 4 * run);
    } else {
      __builtin_memset(out + k, 0, 4 * run);
    }
    k += run;
  }
}

// table: columns of a. Element i of the result is a[i][b[i]].
void vm_gather_row(const VmArgs *x) {
  const uint32_t *table = words(x->a), *index = words(x->b), columns = word_at(x->c, 0);
  uint32_t *out = (uint32_t *)(void *)x->d, i = x->i + x->imm, step = x->sb / 16;
  for (uint32_t k = 0; k < x->n; k++, i++, index += step) {
    uint32_t at = *index;
    out[k] = at < columns ? table[i * columns + at] : 0;
  }
}

// table: columns. a where bit (column % 32) of word column / 32 of b is set, else -inf.
void vm_mask_apply(const VmArgs *x) {
  const uint32_t *packed = words(x->b), columns = word_at(x->c, 0);
  const uint8_t *pa = x->a;
  uint32_t col = (x->i + x->imm) % columns;
  v128_t bits = wasm_i32x4_make(1, 2, 4, 8), zero = wasm_i32x4_splat(0), low = wasm_f32x4_splat(-__builtin_inff());
  for (uint32_t k = 0; k < x->nv; k++, pa += x->sa) {
    uint32_t set = 0;
    if (col + 4 <= columns && (col & 31) <= 28) {
      set = packed[col / 32] >> (col & 31), col += 4;
    } else {
      for (uint32_t j = 0; j < 4; j++) {
        set |= (packed[col / 32] >> (col & 31) & 1) << j;
        if (++col == columns) col = 0;
      }
    }
    if (col == columns) col = 0;
    v128_t keep = wasm_i32x4_ne(wasm_v128_and(wasm_i32x4_splat((int32_t)set), bits), zero);
    wasm_v128_store(x->d + 16 * k, wasm_v128_bitselect(wasm_v128_load(pa), low, keep));
  }
}

// table: columns. Keep mask of a: b holds two words a row, the least key kept and, for that key, the last index kept.
void vm_pivot(const VmArgs *x) {
  const uint32_t *pivots = words(x->b), columns = word_at(x->c, 0);
  const uint8_t *pa = x->a;
  uint32_t i = x->i + x->imm, row = i / columns, col = i % columns;
  for (uint32_t k = 0; k < x->nv;) {
    if (col + 4 > columns) {  // a vector that crosses rows, or ends one
      uint32_t keys[4], out[4] = {0, 0, 0, 0}, inside = x->n - 4 * k < 4 ? x->n - 4 * k : 4;
      wasm_v128_store(keys, f32_keys(wasm_v128_load(pa)));
      for (uint32_t j = 0; j < inside; j++) {
        uint32_t key = pivots[2 * row], last = pivots[2 * row + 1];
        out[j] = keys[j] > key || (keys[j] == key && col <= last) ? 0xffffffffu : 0;
        if (++col == columns) col = 0, row++;
      }
      wasm_v128_store(x->d + 16 * k, wasm_v128_load(out));
      k++, pa += x->sa;
      continue;
    }
    v128_t key = wasm_i32x4_splat((int32_t)pivots[2 * row]), last = wasm_i32x4_splat((int32_t)pivots[2 * row + 1]);
    for (; k < x->nv && col + 4 <= columns; k++, col += 4, pa += x->sa) {
      v128_t own = f32_keys(wasm_v128_load(pa)), at = wasm_i32x4_add(wasm_i32x4_splat((int32_t)col), wasm_i32x4_make(0, 1, 2, 3));
      v128_t tie = wasm_v128_and(wasm_i32x4_eq(own, key), wasm_u32x4_le(at, last));
      wasm_v128_store(x->d + 16 * k, wasm_v128_or(wasm_u32x4_gt(own, key), tie));
    }
    if (col == columns) col = 0, row++;
  }
}
