// The yardstick of bench/kernels_cpu.py: int16 activations against Q4_1 and Q8_0 weights in the plainest blocked form.
//
// Weights row by row: 16 bytes of nibbles (or 32 int8) a block of 32, f32 scales beside them ({d, m} or d). Activations:
// int16 [rows, k] and {scale, scale * sum} a block. One row of x: a weight row at a time. More: tiles of 2 weight rows by 4.
#include <stdint.h>
#include <wasm_simd128.h>

#define EXPORT(name) __attribute__((export_name(#name)))
#define WEIGHT_ROWS 2
#define X_ROWS 4

typedef struct {
  v128_t part[4];
} Block;

static inline Block unpack_q4(const uint8_t *w) {
  v128_t bytes = wasm_v128_load(w), low = wasm_v128_and(bytes, wasm_u8x16_splat(15)), high = wasm_u8x16_shr(bytes, 4);
  return (Block){{wasm_u16x8_extend_low_u8x16(low), wasm_u16x8_extend_high_u8x16(low), wasm_u16x8_extend_low_u8x16(high),
                  wasm_u16x8_extend_high_u8x16(high)}};
}

static inline Block unpack_q8(const int8_t *w) {
  v128_t first = wasm_v128_load(w), second = wasm_v128_load(w + 16);
  return (Block){{wasm_i16x8_extend_low_i8x16(first), wasm_i16x8_extend_high_i8x16(first), wasm_i16x8_extend_low_i8x16(second),
                  wasm_i16x8_extend_high_i8x16(second)}};
}

static inline v128_t dot(Block w, const int16_t *x) {
  v128_t p[4];
  for (int i = 0; i < 4; i++) p[i] = wasm_i32x4_dot_i16x8(wasm_v128_load(x + 8 * i), w.part[i]);
  return wasm_f32x4_convert_i32x4(wasm_i32x4_add(wasm_i32x4_add(p[0], p[1]), wasm_i32x4_add(p[2], p[3])));
}

static inline float sum(v128_t a) {
  return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1) + wasm_f32x4_extract_lane(a, 2) + wasm_f32x4_extract_lane(a, 3);
}

static void q4_row(const uint8_t *w, const float *s, const int16_t *x, const float *xs, float *y, int m, int k) {
  int blocks = k / 32;
  for (int r = 0; r < m; r++) {
    v128_t acc = wasm_f32x4_splat(0);
    float mins = 0;
    for (int b = 0; b < blocks; b++, w += 16, s += 2) {
      acc = wasm_f32x4_add(acc, wasm_f32x4_mul(dot(unpack_q4(w), x + 32 * b), wasm_f32x4_splat(s[0] * xs[2 * b])));
      mins += s[1] * xs[2 * b + 1];
    }
    y[r] = sum(acc) + mins;
  }
}

static void q4_tiles(const uint8_t *w, const float *s, const int16_t *x, const float *xs, float *y, int m, int k, int n) {
  int blocks = k / 32;
  for (int r = 0; r < m; r += WEIGHT_ROWS) {
    for (int t = 0; t < n; t += X_ROWS) {
      v128_t acc[WEIGHT_ROWS][X_ROWS];
      float mins[WEIGHT_ROWS][X_ROWS];
      for (int i = 0; i < WEIGHT_ROWS; i++) {
        for (int j = 0; j < X_ROWS; j++) acc[i][j] = wasm_f32x4_splat(0), mins[i][j] = 0;
      }
      for (int b = 0; b < blocks; b++) {
        for (int i = 0; i < WEIGHT_ROWS; i++) {
          Block block = unpack_q4(w + ((r + i) * blocks + b) * 16);
          const float *scale = s + ((r + i) * blocks + b) * 2;
          for (int j = 0; j < X_ROWS; j++) {
            const float *xscale = xs + ((t + j) * blocks + b) * 2;
            v128_t d = wasm_f32x4_splat(scale[0] * xscale[0]);
            acc[i][j] = wasm_f32x4_add(acc[i][j], wasm_f32x4_mul(dot(block, x + (t + j) * k + 32 * b), d));
            mins[i][j] += scale[1] * xscale[1];
          }
        }
      }
      for (int i = 0; i < WEIGHT_ROWS; i++) {
        for (int j = 0; j < X_ROWS; j++) y[(t + j) * m + r + i] = sum(acc[i][j]) + mins[i][j];
      }
    }
  }
}

EXPORT(q4_1) void q4_1(const uint8_t *w, const float *s, const int16_t *x, const float *xs, float *y, int m, int k, int n) {
  if (n == 1) {
    q4_row(w, s, x, xs, y, m, k);
  } else {
    q4_tiles(w, s, x, xs, y, m, k, n);
  }
}

EXPORT(q8_0) void q8_0(const int8_t *w, const float *s, const int16_t *x, const float *xs, float *y, int m, int k) {
  int blocks = k / 32;
  for (int r = 0; r < m; r++) {
    v128_t acc = wasm_f32x4_splat(0);
    for (int b = 0; b < blocks; b++, w += 32, s++) {
      acc = wasm_f32x4_add(acc, wasm_f32x4_mul(dot(unpack_q8(w), x + 32 * b), wasm_f32x4_splat(s[0] * xs[2 * b])));
    }
    y[r] = sum(acc);
  }
}
