// Attention over a paged KV cache: grouped heads, softmax in two passes over scores in scratch.
//
// A token is handled alone, so its bits do not depend on the batch. The heads that share a KV head are taken up to four at
// a time, so that a row of K or V is loaded once for them. Visible keys become a list of row addresses first: windows, sinks,
// masks and page tables are resolved in one place, and the loops below do not know them. So a token of a tree has the bits
// that its path alone would have.
#include "device.h"
#include "simd_math.h"

#define HEADS 4     // heads of one group per pass
#define MIX_ROWS 64  // rows of V mixed at a time: with 64 columns they fill half of a small first-level cache

// The token's mask block: key p < first follows window and sinks, key p >= first is seen when bit p - first is set.
typedef struct {
  const uint32_t *bits;
  uint32_t first, count;
} Mask;

// False when the block, its bits or the page table of its keys leave the step buffer, or it names more keys than the cache has slots.
static int read_mask(const uint32_t *token, RowRange range, uint32_t step_words, uint32_t slots, Mask *mask) {
  uint64_t at = token[TOKEN_MASK], pages = token[TOKEN_PAGES];
  if (at < STEP_HEADER_WORDS || at + MASK_BITS > step_words) return 0;
  const uint32_t *block = range.step + at;
  *mask = (Mask){block + MASK_BITS, block[MASK_FIRST], block[MASK_COUNT]};
  if (mask->first > mask->count || mask->count > slots) return 0;
  uint32_t words = (mask->count - mask->first + 31) / 32;
  return at + MASK_BITS + words <= step_words && pages + (mask->count + PAGE_TOKENS - 1) / PAGE_TOKENS <= step_words;
}

// As visible_rows, for a token with a mask block. False also when it sees no key at all.
static int masked_rows(const uint32_t *token, RowRange range, uint32_t step_words, uint32_t slots, uint32_t row_bytes, uint32_t *offsets,
                       uint32_t *count) {
  Mask mask;
  if (!read_mask(token, range, step_words, slots, &mask)) return 0;
  uint32_t pos = token[TOKEN_POS], window = token[TOKEN_WINDOW], sinks = token[TOKEN_SINKS], n = 0;
  uint32_t from = window && pos >= window ? pos - window + 1 : 0;
  const uint32_t *pages = range.step + token[TOKEN_PAGES];
  // Keys first, slots after: row offsets replace them in place.
  for (uint32_t p = 0; p < mask.first; p++) {
    if (p < sinks || p >= from) offsets[n++] = p;
  }
  for (uint32_t p = mask.first; p < mask.count; p += 32) {
    uint32_t left = mask.count - p, bits = mask.bits[(p - mask.first) / 32];
    if (left < 32) bits &= (1u << left) - 1;
    for (; bits; bits &= bits - 1) offsets[n++] = p + (uint32_t)__builtin_ctz(bits);
  }
  for (uint32_t i = 0; i < n; i++) {
    uint64_t slot = (uint64_t)pages[offsets[i] / PAGE_TOKENS] * PAGE_TOKENS + offsets[i] % PAGE_TOKENS;
    if (slot >= slots) return 0;
    offsets[i] = (uint32_t)slot * row_bytes;
  }
  *count = n;
  return n > 0;
}

// Byte offset of the K (and V) row of every visible key, ascending. False when a page, slot, position or mask is out of range:
// the row is a fault of the caller and becomes NaN.
static int visible_rows(const uint32_t *token, RowRange range, uint32_t step_words, uint32_t slots, uint32_t row_bytes, uint32_t *offsets,
                        uint32_t *count) {
  if (token[TOKEN_MASK]) return masked_rows(token, range, step_words, slots, row_bytes, offsets, count);
  uint32_t pos = token[TOKEN_POS], window = token[TOKEN_WINDOW], sinks = token[TOKEN_SINKS], n = 0;
  uint64_t pages = token[TOKEN_PAGES];
  uint32_t from = window && pos >= window ? pos - window + 1 : 0;
  if (pos >= slots || pages + pos / PAGE_TOKENS >= step_words) return 0;
  for (uint32_t p = 0; p <= pos; p++) {
    if (p == sinks && p < from) p = from;
    uint64_t slot = (uint64_t)range.step[pages + p / PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS;
    if (slot >= slots) return 0;
    offsets[n++] = (uint32_t)slot * row_bytes;
  }
  *count = n;
  return 1;
}

// Dot products of H heads with P rows of K: one vector of partial sums each, columns ascending.
INLINE void dots(const int H, const int P, const float *q, uint32_t dim, float scale, const uint8_t *k, const uint32_t *offsets, float *out,
                 uint32_t stride) {
  const float *row[2];
  v128_t sum[HEADS][2];
  for (int p = 0; p < P; p++) row[p] = (const float *)(k + offsets[p]);
  for (int h = 0; h < H; h++) {
    for (int p = 0; p < P; p++) sum[h][p] = wasm_f32x4_splat(0.0f);
  }
#pragma clang loop unroll(disable)
  for (uint32_t d = 0; d < dim; d += 4) {
    v128_t key[2];
    for (int p = 0; p < P; p++) key[p] = wasm_v128_load(row[p] + d);
    for (int h = 0; h < H; h++) {
      v128_t query = wasm_v128_load(q + h * dim + d);
      for (int p = 0; p < P; p++) sum[h][p] = wasm_f32x4_add(sum[h][p], wasm_f32x4_mul(key[p], query));
    }
  }
  for (int h = 0; h < H; h++) {
    for (int p = 0; p < P; p++) out[h * stride + p] = scale * hsum(sum[h][p]);
  }
}

// scores[h][i] = scale * q[h] . K[i], padded to a multiple of four with -inf.
INLINE void scores(const int H, const float *q, uint32_t dim, float scale, const uint8_t *k, const uint32_t *offsets, uint32_t n, float *out,
                   uint32_t stride) {
  uint32_t i = 0;
  for (; i + 2 <= n; i += 2) dots(H, 2, q, dim, scale, k, offsets + i, out + i, stride);
  if (i < n) dots(H, 1, q, dim, scale, k, offsets + i, out + i, stride);
  for (int h = 0; h < H; h++) fill_f32(out + h * stride + n, stride - n, -__builtin_inff());
}

// Exponentiates in place and returns 1 / sum. The maximum may miss a NaN score (pmax is one instruction, max takes several),
// but its exponential reaches the sum.
static float softmax(float *s, uint32_t n) {
  v128_t top = wasm_v128_load(s), sum = wasm_f32x4_splat(0.0f);
  for (uint32_t i = 4; i < n; i += 4) top = wasm_f32x4_pmax(top, wasm_v128_load(s + i));
  top = wasm_f32x4_pmax(top, wasm_i32x4_shuffle(top, top, 2, 3, 0, 1));
  top = wasm_f32x4_pmax(top, wasm_i32x4_shuffle(top, top, 1, 0, 3, 2));
  for (uint32_t i = 0; i < n; i += 4) {
    v128_t e = simd_exp(wasm_f32x4_sub(wasm_v128_load(s + i), top));
    wasm_v128_store(s + i, e);
    sum = wasm_f32x4_add(sum, e);
  }
  return 1.0f / hsum(sum);
}

// out[h] += sum_i p[h][i] V[i] for C vectors of four columns, so that the sums stay in registers.
INLINE void mix(const int H, const int C, const float *p, uint32_t stride, const uint8_t *v, const uint32_t *offsets, uint32_t n,
                uint32_t dim, float *out) {
  v128_t sum[HEADS][2];
  for (int h = 0; h < H; h++) {
    for (int c = 0; c < C; c++) sum[h][c] = wasm_v128_load(out + h * dim + 4 * c);
  }
#pragma clang loop unroll(disable)
  for (uint32_t i = 0; i < n; i++) {
    const float *row = (const float *)(v + offsets[i]);
    v128_t value[2];
    for (int c = 0; c < C; c++) value[c] = wasm_v128_load(row + 4 * c);
    for (int h = 0; h < H; h++) {
      v128_t w = wasm_v128_load32_splat(p + h * stride + i);
      for (int c = 0; c < C; c++) sum[h][c] = wasm_f32x4_add(sum[h][c], wasm_f32x4_mul(w, value[c]));
    }
  }
  for (int h = 0; h < H; h++) {
    for (int c = 0; c < C; c++) wasm_v128_store(out + h * dim + 4 * c, sum[h][c]);
  }
}

INLINE void heads_pass(const int H, const float *q, const uint8_t *k, const uint8_t *v, float *out, const uint32_t *offsets, uint32_t n,
                       uint32_t dim, float scale, float *s) {
  uint32_t stride = (n + 3) & ~3u;
  v128_t factor[HEADS];
  scores(H, q, dim, scale, k, offsets, n, s, stride);
  for (int h = 0; h < H; h++) factor[h] = wasm_f32x4_splat(softmax(s + h * stride, stride));
  __builtin_memset(out, 0, H * dim * 4);
  for (uint32_t i = 0; i < n; i += MIX_ROWS) {
    uint32_t rows = n - i < MIX_ROWS ? n - i : MIX_ROWS, d = 0;
    for (; d + 8 <= dim; d += 8) mix(H, 2, s + i, stride, v + 4 * d, offsets + i, rows, dim, out + d);
    if (d < dim) mix(H, 1, s + i, stride, v + 4 * d, offsets + i, rows, dim, out + d);
  }
  for (int h = 0; h < H; h++) {
    for (uint32_t d = h * dim; d < (h + 1) * dim; d += 4) wasm_v128_store(out + d, wasm_f32x4_mul(wasm_v128_load(out + d), factor[h]));
  }
}

// Arguments: q, k_cache, v_cache, out, heads, kv_heads, head_dim, scale, slots. Scratch: (1 + HEADS) * (slots + 4) words.
uint32_t op_attention(const uint32_t *rec, uint8_t *scratch) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, heads = a[4], kv_heads = a[5], dim = a[6], slots = a[8], group = heads / kv_heads;
  const float scale = bits_to_f32(a[7]);
  uint32_t *offsets = (uint32_t *)(void *)scratch, n = 0;
  float *s = (float *)(void *)(scratch + 4 * (size_t)((slots + 3) & ~3u));
  for (uint32_t t = 0; t < range.count; t++) {
    const float *q = (const float *)at(a[0]) + (size_t)t * heads * dim;
    float *out = (float *)at_rw(a[3]) + (size_t)t * heads * dim;
    if (!visible_rows(range.first + t * TOKEN_WORDS, range, rec[REC_STEP_WORDS], slots, kv_heads * dim * 4, offsets, &n)) {
      fill_f32(out, heads * dim, nan_f32());
      continue;
    }
    for (uint32_t g = 0; g < kv_heads; g++) {
      const uint8_t *k = (const uint8_t *)at(a[1]) + (size_t)g * dim * 4, *v = (const uint8_t *)at(a[2]) + (size_t)g * dim * 4;
      for (uint32_t h = g * group; h < (g + 1) * group;) {
        uint32_t H = (g + 1) * group - h, o = h * dim;
        if (H >= 4) {
          heads_pass(4, q + o, k, v, out + o, offsets, n, dim, scale, s), h += 4;
        } else if (H == 3) {
          heads_pass(3, q + o, k, v, out + o, offsets, n, dim, scale, s), h += 3;
        } else if (H == 2) {
          heads_pass(2, q + o, k, v, out + o, offsets, n, dim, scale, s), h += 2;
        } else {
          heads_pass(1, q + o, k, v, out + o, offsets, n, dim, scale, s), h += 1;
        }
      }
    }
  }
  return FAULT_NONE;
}
