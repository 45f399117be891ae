// Kernels that work row by row: embed, rms_norm, rope_append, move_slots.
#include "device.h"
#include "simd_math.h"

static void dequantise_q4(const uint8_t *w, const float *s, uint32_t lane, uint32_t width, float *out) {
  w += 8 * (lane / 2) + 4 * (lane % 2), s += lane;
  for (uint32_t k = 0; k < width; k += 8, w += Q4_GROUP_BYTES / 4) {
    const float *scale = s + k / BLOCK * Q4_SCALE_FLOATS;
    for (int i = 0; i < 4; i++) {
      out[k + i] = scale[0] * (float)(w[i] & 15) + scale[4];
      out[k + 4 + i] = scale[0] * (float)(w[i] >> 4) + scale[4];
    }
  }
}

static void dequantise_q8(const int8_t *w, const float *s, uint32_t lane, uint32_t width, float *out) {
  w += 16 * (lane / 2) + 4 * (lane % 2), s += lane;
  for (uint32_t k = 0; k < width; k += 8, w += Q8_GROUP_BYTES / 4) {
    float scale = s[k / BLOCK * Q8_SCALE_FLOATS];
    for (int i = 0; i < 4; i++) {
      out[k + i] = scale * (float)w[i];
      out[k + 4 + i] = scale * (float)w[8 + i];
    }
  }
}

static void dequantise_f16(const uint8_t *w, uint32_t width, float *out) {
  uint32_t k = 0;
  for (; k + 4 <= width; k += 4) wasm_v128_store(out + k, f16x4_to_f32x4(wasm_v128_load64_zero(w + 2 * k)));
  for (; k < width; k++) {
    uint16_t half;
    __builtin_memcpy(&half, w + 2 * k, 2);
    out[k] = f16_to_f32(half);
  }
}

// Arguments: arena, quants, scales, out, fmt, vocab, width, arena words.
uint32_t op_embed(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, *arena = at(a[0]), fmt = a[4], vocab = a[5], width = a[6], arena_words = a[7];
  const uint8_t *w = at(a[1]);
  const float *scales = at(a[2]);
  float *out = at_rw(a[3]);
  if (fmt > FMT_Q8_0) return FAULT_FORMAT;
  for (uint32_t t = 0; t < range.count; t++, out += width) {
    const uint32_t *token = range.first + t * TOKEN_WORDS;
    uint32_t src = token[TOKEN_SRC], id = src == NONE ? token[TOKEN_ID] : src < arena_words ? arena[src] : NONE;
    if (id >= vocab) {
      fill_f32(out, width, nan_f32());
      continue;
    }
    uint32_t blocks = width / BLOCK, group = id / GROUP_ROWS, lane = id % GROUP_ROWS;
    switch (fmt) {
      case FMT_F32:
        __builtin_memcpy(out, w + (size_t)id * width * 4, width * 4);
        break;
      case FMT_F16:
        dequantise_f16(w + (size_t)id * width * 2, width, out);
        break;
      case FMT_Q4_1:
        dequantise_q4(w + (size_t)group * blocks * Q4_GROUP_BYTES, scales + (size_t)group * blocks * Q4_SCALE_FLOATS, lane, width, out);
        break;
      default:
        dequantise_q8((const int8_t *)w + (size_t)group * blocks * Q8_GROUP_BYTES, scales + (size_t)group * blocks * Q8_SCALE_FLOATS,
                      lane, width, out);
    }
  }
  return FAULT_NONE;
}

// In four vectors, one order for every row.
static float sum_of_squares(const float *x, uint32_t width) {
  v128_t sum[4];
  for (int i = 0; i < 4; i++) sum[i] = wasm_f32x4_splat(0.0f);
  uint32_t k = 0;
  for (; k + 16 <= width; k += 16) {
    for (int i = 0; i < 4; i++) {
      v128_t v = wasm_v128_load(x + k + 4 * i);
      sum[i] = wasm_f32x4_add(sum[i], wasm_f32x4_mul(v, v));
    }
  }
  float rest = 0.0f;
  for (; k < width; k++) rest += x[k] * x[k];
  return hsum(wasm_f32x4_add(wasm_f32x4_add(sum[0], sum[1]), wasm_f32x4_add(sum[2], sum[3]))) + rest;
}

// Arguments: x, weight, out, width, eps, rows of x.
uint32_t op_rms_norm(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, width = a[3], x_rows = a[5];
  const float *weight = at(a[1]), eps = bits_to_f32(a[4]);
  float *out = at_rw(a[2]);
  for (uint32_t r = 0; r < range.count; r++, out += width) {
    uint32_t row = rec[REC_ROWS] == ROWS_READS ? range.first[r] : r;
    if (row >= x_rows) {
      fill_f32(out, width, nan_f32());
      continue;
    }
    const float *x = (const float *)at(a[0]) + (size_t)row * width;
    v128_t factor = wasm_f32x4_splat(1.0f / __builtin_sqrtf(sum_of_squares(x, width) / (float)width + eps));
    uint32_t k = 0;
    for (; k + 4 <= width; k += 4) {
      v128_t v = wasm_f32x4_mul(wasm_v128_load(x + k), factor);
      wasm_v128_store(out + k, wasm_f32x4_mul(v, wasm_v128_load(weight + k)));
    }
    for (; k < width; k++) out[k] = x[k] * wasm_f32x4_extract_lane(factor, 0) * weight[k];
  }
  return FAULT_NONE;
}

#define MAX_HALF 256  // head_dim <= 512, checked by the host
enum Style { STYLE_INTERLEAVED = 0, STYLE_HALF = 1 };

// cos and sin of pos * freqs[j]; the product is exact (f64), as its error would grow with the position.
static void angles(uint32_t pos, const float *freqs, uint32_t half, float *cosine, float *sine) {
  for (uint32_t j = 0; j < half; j += 4) {
    float part[4] = {0, 0, 0, 0};
    __builtin_memcpy(part, freqs + j, (half - j < 4 ? half - j : 4) * 4);
    v128_t f = wasm_v128_load(part), p = wasm_f64x2_splat((double)pos), s, c;
    v128_t high = wasm_f64x2_promote_low_f32x4(wasm_i32x4_shuffle(f, f, 2, 3, 2, 3));
    simd_sincos_f64(wasm_f64x2_mul(p, wasm_f64x2_promote_low_f32x4(f)), wasm_f64x2_mul(p, high), &s, &c);
    wasm_v128_store(sine + j, s);
    wasm_v128_store(cosine + j, c);
  }
}

INLINE void rotate_pair(const float *x, uint32_t first, uint32_t second, float c, float s, float *out) {
  float a = x[first], b = x[second];
  out[first] = a * c - b * s;
  out[second] = a * s + b * c;
}

INLINE void rotate_interleaved(const float *x, const float *cosine, const float *sine, uint32_t half, float *out) {
  uint32_t j = 0;
  for (; j + 4 <= half; j += 4) {
    v128_t a = wasm_v128_load(x + 2 * j), b = wasm_v128_load(x + 2 * j + 4), c = wasm_v128_load(cosine + j), s = wasm_v128_load(sine + j);
    v128_t even = wasm_i32x4_shuffle(a, b, 0, 2, 4, 6), odd = wasm_i32x4_shuffle(a, b, 1, 3, 5, 7);
    v128_t e = wasm_f32x4_sub(wasm_f32x4_mul(even, c), wasm_f32x4_mul(odd, s));
    v128_t o = wasm_f32x4_add(wasm_f32x4_mul(even, s), wasm_f32x4_mul(odd, c));
    wasm_v128_store(out + 2 * j, wasm_i32x4_shuffle(e, o, 0, 4, 1, 5));
    wasm_v128_store(out + 2 * j + 4, wasm_i32x4_shuffle(e, o, 2, 6, 3, 7));
  }
  for (; j < half; j++) rotate_pair(x, 2 * j, 2 * j + 1, cosine[j], sine[j], out);
}

INLINE void rotate_half(const float *x, const float *cosine, const float *sine, uint32_t half, float *out) {
  uint32_t j = 0;
  for (; j + 4 <= half; j += 4) {
    v128_t a = wasm_v128_load(x + j), b = wasm_v128_load(x + half + j), c = wasm_v128_load(cosine + j), s = wasm_v128_load(sine + j);
    wasm_v128_store(out + j, wasm_f32x4_sub(wasm_f32x4_mul(a, c), wasm_f32x4_mul(b, s)));
    wasm_v128_store(out + half + j, wasm_f32x4_add(wasm_f32x4_mul(a, s), wasm_f32x4_mul(b, c)));
  }
  for (; j < half; j++) rotate_pair(x, j, half + j, cosine[j], sine[j], out);
}

static void rotate(uint32_t style, const float *x, const float *cosine, const float *sine, uint32_t heads, uint32_t half, float *out) {
  for (uint32_t h = 0; h < heads; h++, x += 2 * half, out += 2 * half) {
    if (style == STYLE_INTERLEAVED) {
      rotate_interleaved(x, cosine, sine, half, out);
    } else {
      rotate_half(x, cosine, sine, half, out);
    }
  }
}

// Arguments: qkv, freqs, q, k_cache, v_cache, heads, kv_heads, head_dim, style, slots. A slot outside the cache stores nothing;
// attention then meets the same slot and makes the row NaN.
uint32_t op_rope_append(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, heads = a[5], kv_heads = a[6], dim = a[7], style = a[8], slots = a[9];
  const uint32_t half = dim / 2, q_width = heads * dim, kv_width = kv_heads * dim;
  const float *qkv = at(a[0]), *freqs = at(a[1]);
  float *q = at_rw(a[2]), *k_cache = at_rw(a[3]), *v_cache = at_rw(a[4]), cosine[MAX_HALF], sine[MAX_HALF];
  for (uint32_t t = 0; t < range.count; t++, qkv += q_width + 2 * kv_width, q += q_width) {
    const uint32_t *token = range.first + t * TOKEN_WORDS, slot = token[TOKEN_SLOT];
    angles(token[TOKEN_POS], freqs, half, cosine, sine);
    rotate(style, qkv, cosine, sine, heads, half, q);
    if (slot >= slots) continue;
    rotate(style, qkv + q_width, cosine, sine, kv_heads, half, k_cache + (size_t)slot * kv_width);
    __builtin_memcpy(v_cache + (size_t)slot * kv_width, qkv + q_width + kv_width, kv_width * 4);
  }
  return FAULT_NONE;
}

// Arguments: k_cache, v_cache, bytes of a row, slots. For every token row in order: row `slot` becomes row `id` as it is by then.
uint32_t op_move_slots(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, bytes = a[2], slots = a[3];
  uint8_t *k = at_rw(a[0]), *v = at_rw(a[1]);
  for (uint32_t t = 0; t < range.count; t++) {
    const uint32_t *token = range.first + t * TOKEN_WORDS, source = token[TOKEN_ID], slot = token[TOKEN_SLOT];
    if (source >= slots || slot >= slots || source == slot) continue;
    __builtin_memcpy(k + (size_t)slot * bytes, k + (size_t)source * bytes, bytes);
    __builtin_memcpy(v + (size_t)slot * bytes, v + (size_t)source * bytes, bytes);
  }
  return FAULT_NONE;
}
