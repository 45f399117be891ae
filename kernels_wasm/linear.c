// Matrix products: out[t, m] (+)= sum_k W[m, k] x[t, k] for f32, f16, Q4_1 and Q8_0 weights and f32 activations.
//
// Quantised weights meet int16 activations: each row of x is cut into blocks of 32, a block becomes int16 with one f32
// scale, and products are summed exactly in i32 within the block. |x| <= 2^15 and |w| <= 2^7, so 32 products stay below
// 2^27. Across blocks the f32 sum runs in ascending k.
//
// Device layout of weights: groups of four rows; a group holds its blocks in k order. Within a block rows are taken in
// two pairs and k in quads, so that one 16-byte vector of int16 is [4 k of the first row | the same 4 k of the second]
// and i32x4_dot_i16x8 leaves two partial sums a row. A block is four steps of eight k, k = 8c .. 8c + 7:
//   Q8_0  32 bytes a step: first pair k 0..3, first pair k 4..7, second pair k 0..3, second pair k 4..7, eight bytes each
//   Q4_1  16 bytes a step: eight a pair, k 0..3 in the low nibbles and k 4..7 in the high ones
// Scales of a group and block: four d (Q8_0), or four d and four m (Q4_1). Rows that pad the last group are zero.
//
// One tile function serves every row count (T is a compile-time constant), so that a row's bits cannot depend on the batch.
#include "device.h"

// Rows of x are packed for tiles of T <= 4 rows, one stream a tile. For each block: four steps of eight k, each holding for
// every row two vectors [q q q q | q q q q] (four values twice); then for every row the scale four times, and
// scale * sum of the values four times (it multiplies m of Q4_1).
#define TILE 4
#define X_STEP_BYTES(T) (32 * (T))
#define X_BLOCK_BYTES(T) (160 * (T))
#define X_ROWS 32  // rows of x packed at a time: with k = 1536 they fill 240 kB of the second-level cache

static void quantise_row(const float *x, uint32_t k, uint32_t T, uint32_t row, uint8_t *tile) {
  for (uint32_t b = 0; b < k; b += BLOCK, tile += X_BLOCK_BYTES(T)) {
    // The largest magnitude by its bits: ordered as integers, and NaN is above all; it reaches every output through the scale.
    v128_t v[8], largest = wasm_i32x4_splat(0);
    for (int i = 0; i < 8; i++) {
      v[i] = wasm_v128_load(x + b + 4 * i);
      largest = wasm_i32x4_max(largest, wasm_f32x4_abs(v[i]));
    }
    largest = wasm_i32x4_max(largest, wasm_i32x4_shuffle(largest, largest, 2, 3, 0, 1));
    largest = wasm_i32x4_max(largest, wasm_i32x4_shuffle(largest, largest, 1, 0, 3, 2));
    v128_t full = wasm_f32x4_splat(32767.0f), scale = wasm_f32x4_div(largest, full);
    v128_t inverse = wasm_v128_and(wasm_f32x4_div(full, largest), wasm_f32x4_ne(largest, wasm_f32x4_splat(0.0f)));
    v128_t sum = wasm_i32x4_splat(0);
    for (int i = 0; i < 8; i++) {
      v128_t q = wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(wasm_f32x4_mul(v[i], inverse)));
      v128_t twice = wasm_i16x8_narrow_i32x4(q, q);
      sum = wasm_i32x4_add(sum, wasm_i32x4_extend_low_i16x8(twice));
      wasm_v128_store(tile + (i / 2) * X_STEP_BYTES(T) + row * 32 + (i % 2) * 16, twice);
    }
    sum = wasm_i32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 2, 3, 0, 1));
    sum = wasm_i32x4_add(sum, wasm_i32x4_shuffle(sum, sum, 1, 0, 3, 2));
    uint8_t *scales = tile + 4 * X_STEP_BYTES(T) + row * 32;
    wasm_v128_store(scales, scale);
    wasm_v128_store(scales + 16, wasm_f32x4_mul(scale, wasm_f32x4_convert_i32x4(sum)));
  }
}

// [row0 row0' row1 row1'] and [row2 row2' row3 row3'] -> one sum a row.
INLINE v128_t join_pairs(v128_t a, v128_t b) {
  return wasm_i32x4_add(wasm_i32x4_shuffle(a, b, 0, 2, 4, 6), wasm_i32x4_shuffle(a, b, 1, 3, 5, 7));
}

INLINE v128_t dot2(v128_t acc, v128_t w0, v128_t x0, v128_t w1, v128_t x1) {
  return wasm_i32x4_add(acc, wasm_i32x4_add(wasm_i32x4_dot_i16x8(w0, x0), wasm_i32x4_dot_i16x8(w1, x1)));
}

INLINE void store_rows(float *out, v128_t y, uint32_t rows, int add) {
  if (rows == GROUP_ROWS) {
    wasm_v128_store(out, add ? wasm_f32x4_add(wasm_v128_load(out), y) : y);
    return;
  }
  float lane[4];
  wasm_v128_store(lane, y);
  for (uint32_t i = 0; i < rows; i++) out[i] = add ? out[i] + lane[i] : lane[i];
}

// Eight k of four weight rows times T rows of x, added to the sums of the two row pairs.
INLINE void step(const int q4, const int T, const uint8_t *w, const uint8_t *x, v128_t *first, v128_t *second) {
  v128_t a0, a1, b0, b1;
  if (q4) {
    v128_t a = wasm_u16x8_load8x8(w), b = wasm_u16x8_load8x8(w + 8), nibble = wasm_i16x8_splat(15);
    a0 = wasm_v128_and(a, nibble), a1 = wasm_u16x8_shr(a, 4), b0 = wasm_v128_and(b, nibble), b1 = wasm_u16x8_shr(b, 4);
  } else {
    a0 = wasm_i16x8_load8x8(w), a1 = wasm_i16x8_load8x8(w + 8), b0 = wasm_i16x8_load8x8(w + 16), b1 = wasm_i16x8_load8x8(w + 24);
  }
  for (int j = 0; j < T; j++) {
    v128_t x0 = wasm_v128_load(x + 32 * j), x1 = wasm_v128_load(x + 32 * j + 16);
    first[j] = dot2(first[j], a0, x0, a1, x1);
    second[j] = dot2(second[j], b0, x0, b1, x1);
  }
}

// Four weight rows times T rows of x over all of k. The steps of a block stay a loop: in one long basic block
// the code generators keep every load alive at once and spill. Two steps a turn are best for one row, one for more.
INLINE void tile(const int q4, const int T, const uint8_t *w, const float *s, const uint8_t *x, uint32_t blocks, v128_t *y) {
  const int w_step = q4 ? Q4_GROUP_BYTES / 4 : Q8_GROUP_BYTES / 4, per = T == 1 ? 2 : 1;
  v128_t acc[TILE], mins[TILE];
  for (int j = 0; j < T; j++) acc[j] = mins[j] = wasm_f32x4_splat(0.0f);
  for (uint32_t b = 0; b < blocks; b++) {
    v128_t first[TILE], second[TILE];
    for (int j = 0; j < T; j++) first[j] = second[j] = wasm_i32x4_splat(0);
#pragma clang loop unroll(disable)
    for (int c = 0; c < 4; c += per) {
      for (int i = 0; i < per; i++, w += w_step, x += X_STEP_BYTES(T)) step(q4, T, w, x, first, second);
    }
    v128_t d = wasm_v128_load(s);
    for (int j = 0; j < T; j++) {
      v128_t t = wasm_f32x4_convert_i32x4(join_pairs(first[j], second[j]));
      acc[j] = wasm_f32x4_add(acc[j], wasm_f32x4_mul(t, wasm_f32x4_mul(d, wasm_v128_load(x + 32 * j))));
      if (q4) mins[j] = wasm_f32x4_add(mins[j], wasm_f32x4_mul(wasm_v128_load(s + 4), wasm_v128_load(x + 32 * j + 16)));
    }
    x += 32 * T, s += q4 ? Q4_SCALE_FLOATS : Q8_SCALE_FLOATS;
  }
  for (int j = 0; j < T; j++) y[j] = q4 ? wasm_f32x4_add(acc[j], mins[j]) : acc[j];
}

typedef struct {
  uint32_t m, k;
  int add;
} Shape;

INLINE void tile_out(const int q4, const int T, const uint8_t *w, const float *s, const uint8_t *x, float *out, uint32_t rows, Shape sh) {
  v128_t y[TILE];
  tile(q4, T, w, s, x, sh.k / BLOCK, y);
  for (int j = 0; j < T; j++) store_rows(out + (size_t)j * sh.m, y[j], rows, sh.add);
}

// Every group of four weight rows over n <= X_ROWS packed rows of x: tiles of four, then one of the rest.
INLINE void product_quant(const int q4, const uint8_t *w, const float *s, const uint8_t *x, float *out, uint32_t n, Shape sh) {
  const uint32_t blocks = sh.k / BLOCK, w_bytes = blocks * (q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES);
  const uint32_t s_floats = blocks * (q4 ? Q4_SCALE_FLOATS : Q8_SCALE_FLOATS);
  for (uint32_t r = 0; r < sh.m; r += GROUP_ROWS, w += w_bytes, s += s_floats) {
    uint32_t rows = sh.m - r < GROUP_ROWS ? sh.m - r : GROUP_ROWS, j = 0;
    for (; j + TILE <= n; j += TILE) tile_out(q4, 4, w, s, x + j * blocks * X_BLOCK_BYTES(1), out + (size_t)j * sh.m + r, rows, sh);
    const uint8_t *xj = x + j * blocks * X_BLOCK_BYTES(1);
    float *oj = out + (size_t)j * sh.m + r;
    if (n - j == 3) tile_out(q4, 3, w, s, xj, oj, rows, sh);
    if (n - j == 2) tile_out(q4, 2, w, s, xj, oj, rows, sh);
    if (n - j == 1) tile_out(q4, 1, w, s, xj, oj, rows, sh);
  }
}

static void pack_rows(const float *x, uint32_t n, uint32_t k, uint8_t *scratch) {
  for (uint32_t j = 0; j < n; j++) {
    uint32_t start = j / TILE * TILE, T = n - start < TILE ? n - start : TILE;
    quantise_row(x + (size_t)j * k, k, T, j - start, scratch + start * (k / BLOCK) * X_BLOCK_BYTES(1));
  }
}

// f32 and f16 weights are row-major as in the checkpoint. Two vectors of partial sums a row, k ascending.
INLINE v128_t load4(const int half, const uint8_t *w, uint32_t k) {
  return half ? f16x4_to_f32x4(wasm_v128_load64_zero(w + 2 * k)) : wasm_v128_load(w + 4 * k);
}

INLINE void tile_float(const int half, const int T, const uint8_t *w, const float *x, float *out, Shape sh) {
  v128_t even[TILE], odd[TILE];
  for (int j = 0; j < T; j++) even[j] = odd[j] = wasm_f32x4_splat(0.0f);
#pragma clang loop unroll(disable)
  for (uint32_t i = 0; i < sh.k; i += 8) {
    v128_t w0 = load4(half, w, i), w1 = load4(half, w, i + 4);
    for (int j = 0; j < T; j++) {
      even[j] = wasm_f32x4_add(even[j], wasm_f32x4_mul(w0, wasm_v128_load(x + j * sh.k + i)));
      odd[j] = wasm_f32x4_add(odd[j], wasm_f32x4_mul(w1, wasm_v128_load(x + j * sh.k + i + 4)));
    }
  }
  for (int j = 0; j < T; j++) {
    float y = hsum(wasm_f32x4_add(even[j], odd[j])), *o = out + (size_t)j * sh.m;
    *o = sh.add ? *o + y : y;
  }
}

INLINE void product_float(const int half, const uint8_t *w, const float *x, float *out, uint32_t n, Shape sh) {
  for (uint32_t r = 0; r < sh.m; r++, w += (half ? 2 : 4) * sh.k) {
    uint32_t j = 0;
    for (; j + TILE <= n; j += TILE) tile_float(half, TILE, w, x + (size_t)j * sh.k, out + (size_t)j * sh.m + r, sh);
    for (; j < n; j++) tile_float(half, 1, w, x + (size_t)j * sh.k, out + (size_t)j * sh.m + r, sh);
  }
}

// Arguments: x, quants, scales, out, fmt, m, k, add. Scratch: X_ROWS * k * 5 bytes.
uint32_t op_linear(const uint32_t *rec, uint8_t *scratch) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, fmt = a[4];
  const uint8_t *w = at(a[1]);
  const float *scales = at(a[2]);
  Shape sh = {a[5], a[6], (int)a[7]};
  for (uint32_t j = 0; j < range.count; j += X_ROWS) {
    uint32_t n = range.count - j < X_ROWS ? range.count - j : X_ROWS;
    const float *x = (const float *)at(a[0]) + (size_t)j * sh.k;
    float *out = (float *)at_rw(a[3]) + (size_t)j * sh.m;
    if (fmt == FMT_Q4_1 || fmt == FMT_Q8_0) pack_rows(x, n, sh.k, scratch);
    switch (fmt) {
      case FMT_F32: product_float(0, w, x, out, n, sh); break;
      case FMT_F16: product_float(1, w, x, out, n, sh); break;
      case FMT_Q4_1: product_quant(1, w, scales, scratch, out, n, sh); break;
      case FMT_Q8_0: product_quant(0, w, scales, scratch, out, n, sh); break;
      default: return FAULT_FORMAT;
    }
  }
  return FAULT_NONE;
}
