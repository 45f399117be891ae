// Scans along rows, matrix products and scatters, each in one fixed order: a row alone and in a batch have the same bits.
#include "vm.h"

// table: rows, n. Left to right in WIDE, which for floats leaves one rounding an element.
#define VM_SCAN(name, T, WIDE, OP)                                        \
  void name(const VmArgs *x) {                                            \
    const uint32_t *t = words(x->c);                                      \
    const T *a = (const T *)(const void *)x->a;                           \
    T *out = (T *)(void *)x->d;                                           \
    for (uint32_t r = 0; r < t[0]; r++, a += t[1], out += t[1]) {         \
      WIDE all = a[0];                                                    \
      out[0] = a[0];                                                      \
      for (uint32_t i = 1; i < t[1]; i++) out[i] = (T)(all = all OP a[i]);\
    }                                                                     \
  }
VM_SCAN(vm_cumsum_f32, float, double, +)
VM_SCAN(vm_cumsum_u32, uint32_t, uint32_t, +)
VM_SCAN(vm_cumprod_f32, float, double, *)
VM_SCAN(vm_cumprod_u32, uint32_t, uint32_t, *)

enum { DEPTH = 128 };  // products summed on their own before they join the sum of an element: short chains of roundings

static inline v128_t dot_columns(const float *a, const float *b, uint32_t depth, uint32_t n) {
  v128_t sum = wasm_f32x4_splat(0.0f);
  for (uint32_t d = 0; d < depth; d++) sum = wasm_f32x4_add(sum, wasm_f32x4_mul(wasm_v128_load32_splat(a + d), wasm_v128_load(b + d * n)));
  return sum;
}

// One row of a against a block of `depth` rows of b, added to a row of the result.
static void row_times_block(const float *a, const float *b, uint32_t depth, uint32_t n, float *out) {
  uint32_t j = 0;
  for (; j + 16 <= n; j += 16) {
    v128_t s[4] = {wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f)};
    for (uint32_t d = 0; d < depth; d++) {
      v128_t scale = wasm_v128_load32_splat(a + d);
      for (uint32_t v = 0; v < 4; v++) s[v] = wasm_f32x4_add(s[v], wasm_f32x4_mul(scale, wasm_v128_load(b + d * n + j + 4 * v)));
    }
    for (uint32_t v = 0; v < 4; v++) wasm_v128_store(out + j + 4 * v, wasm_f32x4_add(wasm_v128_load(out + j + 4 * v), s[v]));
  }
  for (; j + 4 <= n; j += 4) wasm_v128_store(out + j, wasm_f32x4_add(wasm_v128_load(out + j), dot_columns(a, b + j, depth, n)));
  for (; j < n; j++) {
    float sum = 0.0f;
    for (uint32_t d = 0; d < depth; d++) sum += a[d] * b[d * n + j];
    out[j] += sum;
  }
}

static float dot(const float *a, const float *b, uint32_t k) {
  v128_t s[4] = {wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f), wasm_f32x4_splat(0.0f)};
  uint32_t i = 0;
  for (; i + 16 <= k; i += 16)
    for (uint32_t v = 0; v < 4; v++) s[v] = wasm_f32x4_add(s[v], wasm_f32x4_mul(wasm_v128_load(a + i + 4 * v), wasm_v128_load(b + i + 4 * v)));
  v128_t all = wasm_f32x4_add(wasm_f32x4_add(s[0], s[1]), wasm_f32x4_add(s[2], s[3]));
  all = wasm_f32x4_add(all, wasm_i32x4_shuffle(all, all, 2, 3, 0, 1));
  float sum = wasm_f32x4_extract_lane(all, 0) + wasm_f32x4_extract_lane(all, 1);
  for (; i < k; i++) sum += a[i] * b[i];
  return sum;
}

// table: m, k, n. d [m, n] = a [m, k] times b [k, n].
void vm_matmul(const VmArgs *x) {
  const uint32_t *t = words(x->c), m = t[0], k = t[1], n = t[2];
  const float *a = (const float *)(const void *)x->a, *b = (const float *)(const void *)x->b;
  float *out = (float *)(void *)x->d;
  if (n == 1) {
    for (uint32_t i = 0; i < m; i++) out[i] = dot(a + i * k, b, k);
    return;
  }
  __builtin_memset(out, 0, 4 * m * n);
  for (uint32_t from = 0; from < k; from += DEPTH)
    for (uint32_t i = 0; i < m; i++) row_times_block(a + i * k + from, b + from * n, k - from < DEPTH ? k - from : DEPTH, n, out + i * n);
}

// imm words of a.
void vm_copy_words(const VmArgs *x) { __builtin_memmove(x->d, x->a, 4 * x->imm); }

// d: the result, which holds the base already; a: indices; b: values; table: rows of d, elements of a row, indices. In index order.
#define VM_SCATTER(name, T, PUT)                                                                     \
  void name(const VmArgs *x) {                                                                       \
    const uint32_t *t = words(x->c), *index = words(x->a), inner = t[1];                             \
    const T *values = (const T *)(const void *)x->b;                                                 \
    for (uint32_t i = 0; i < t[2]; i++, values += inner) {                                           \
      if (index[i] >= t[0]) continue;                                                                \
      T *out = (T *)(void *)x->d + index[i] * inner;                                                 \
      for (uint32_t j = 0; j < inner; j++) out[j] PUT values[j];                                     \
    }                                                                                                \
  }
VM_SCATTER(vm_scatter_set, uint32_t, =)
VM_SCATTER(vm_scatter_add_f32, float, +=)
VM_SCATTER(vm_scatter_add_u32, uint32_t, +=)
