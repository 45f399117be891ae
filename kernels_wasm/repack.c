// Checkpoint blocks to the device layout of kernels_wasm/linear.c, a few rows at a time from a staging area.
#include "device.h"

// GGUF Q4_1: f16 d, f16 m, 16 bytes whose low nibbles are elements 0..15 and high nibbles elements 16..31.
#define Q4_1_BYTES 20
// GGUF Q8_0: f16 d, 32 int8.
#define Q8_0_BYTES 34

INLINE float load_f16(const uint8_t *p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  return f16_to_f32(half);
}

// Eight bytes e0 .. e7 of nibbles -> in the low four of each half: e0 | e4 << 4, e1 | e5 << 4, …
INLINE v128_t join_nibbles(v128_t nibbles) { return wasm_v128_or(nibbles, wasm_u64x2_shr(nibbles, 28)); }

static void repack_q4_1(const uint8_t *src, uint32_t blocks, uint32_t lane, uint8_t *w, float *s) {
  w += 8 * (lane / 2) + 4 * (lane % 2), s += lane;
  for (uint32_t b = 0; b < blocks; b++, src += Q4_1_BYTES, w += Q4_GROUP_BYTES, s += Q4_SCALE_FLOATS) {
    v128_t scales = f16x4_to_f32x4(wasm_v128_load32_zero(src)), q = wasm_v128_load(src + 4);
    v128_t low = join_nibbles(wasm_v128_and(q, wasm_u8x16_splat(15))), high = join_nibbles(wasm_u8x16_shr(q, 4));
    s[0] = wasm_f32x4_extract_lane(scales, 0), s[4] = wasm_f32x4_extract_lane(scales, 1);
    wasm_v128_store32_lane(w, low, 0);
    wasm_v128_store32_lane(w + 16, low, 2);
    wasm_v128_store32_lane(w + 32, high, 0);
    wasm_v128_store32_lane(w + 48, high, 2);
  }
}

static void repack_q8_0(const uint8_t *src, uint32_t blocks, uint32_t lane, uint8_t *w, float *s) {
  w += 16 * (lane / 2) + 4 * (lane % 2), s += lane;
  for (uint32_t b = 0; b < blocks; b++, src += Q8_0_BYTES, w += Q8_GROUP_BYTES, s += Q8_SCALE_FLOATS) {
    s[0] = load_f16(src);
    for (int c = 0; c < 8; c++) __builtin_memcpy(w + 32 * (c / 2) + 8 * (c % 2), src + 2 + 4 * c, 4);
  }
}

// `rows` rows of `cols` columns at `src` become rows first, first + 1, … of the weight at `quants` and `scales`.
EXPORT(repack) uint32_t repack(uint32_t fmt, uint32_t src, uint32_t first, uint32_t rows, uint32_t cols, uint32_t quants, uint32_t scales) {
  uint32_t blocks = cols / BLOCK;
  const uint8_t *from = at(src);
  for (uint32_t r = first; r < first + rows; r++) {
    size_t group = (size_t)(r / GROUP_ROWS) * blocks;
    uint32_t lane = r % GROUP_ROWS;
    uint8_t *w = at_rw(quants);
    float *s = at_rw(scales);
    if (fmt == FMT_Q4_1) {
      repack_q4_1(from, blocks, lane, w + group * Q4_GROUP_BYTES, s + group * Q4_SCALE_FLOATS);
      from += (size_t)blocks * Q4_1_BYTES;
    } else if (fmt == FMT_Q8_0) {
      repack_q8_0(from, blocks, lane, w + group * Q8_GROUP_BYTES, s + group * Q8_SCALE_FLOATS);
      from += (size_t)blocks * Q8_0_BYTES;
    } else {
      return FAULT_FORMAT;
    }
  }
  return FAULT_NONE;
}
