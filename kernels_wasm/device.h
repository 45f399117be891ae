// What the cpu device's kernels share: the record and step layouts, formats and small helpers.
#ifndef PIE_DEVICE_H
#define PIE_DEVICE_H

#include <stddef.h>
#include <stdint.h>
#include <wasm_simd128.h>

#define EXPORT(name) __attribute__((export_name(#name)))
#define INLINE static inline __attribute__((always_inline))

#define PAGE_TOKENS 16
#define NONE 0xffffffffu
#define MAX_PLAN_CALLS 16  // PLAN_CALLS of server/adapters/cpu_module.py

enum Format { FMT_F32 = 0, FMT_F16 = 1, FMT_Q4_1 = 2, FMT_Q8_0 = 3 };
enum Opcode { OP_EMBED = 1, OP_RMS_NORM, OP_LINEAR, OP_ROPE_APPEND, OP_ATTENTION, OP_MAP, OP_EPILOGUE, OP_MOVE_SLOTS, OP_RECUR, OP_GATE, OP_SHIFT };

// The step buffer (docs/architecture.md, section 4).
enum { STEP_TOKENS = 0, STEP_READS, STEP_SEQS, STEP_TOKEN_OFF, STEP_READ_OFF, STEP_PAGE_OFF, STEP_HEADER_WORDS = 16 };
enum { TOKEN_ID = 0, TOKEN_SRC, TOKEN_POS, TOKEN_SLOT, TOKEN_PAGES, TOKEN_WINDOW, TOKEN_SINKS, TOKEN_MASK, TOKEN_WORDS = 8 };
enum { MASK_FIRST = 0, MASK_COUNT, MASK_BITS };

// A plan record is 16 words: these five, then up to eleven arguments (pointers are byte addresses, floats their bits).
enum { REC_OP = 0, REC_STEP, REC_STEP_WORDS, REC_ROWS, REC_BUCKET, REC_ARGS, REC_WORDS = 16 };
enum Rows { ROWS_TOKENS = 0, ROWS_READS = 1 };

// Rows that a kernel of this record works on, and where the rows' own words start. `count` is 0 when the step is malformed.
typedef struct {
  uint32_t count;
  const uint32_t *step, *first;
} RowRange;

INLINE const void *at(uint32_t address) { return (const void *)(uintptr_t)address; }
INLINE void *at_rw(uint32_t address) { return (void *)(uintptr_t)address; }
INLINE float bits_to_f32(uint32_t bits) { return (union { uint32_t u; float f; }){bits}.f; }
INLINE float nan_f32(void) { return __builtin_nanf(""); }

INLINE float hsum(v128_t a) {
  v128_t b = wasm_f32x4_add(a, wasm_i32x4_shuffle(a, a, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(b, 0) + wasm_f32x4_extract_lane(b, 1);
}

INLINE void fill_f32(float *out, uint32_t n, float value) {
  for (uint32_t i = 0; i < n; i++) out[i] = value;
}

// Four halves in the low 64 bits -> four f32, exactly (denormals, inf and NaN included).
INLINE v128_t f16x4_to_f32x4(v128_t halves) {
  v128_t h = wasm_u32x4_extend_low_u16x8(halves);
  v128_t magnitude = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x7fff)), 13);
  v128_t value = wasm_f32x4_mul(magnitude, wasm_f32x4_splat(0x1p112f));  // moves the exponent bias from 15 to 127
  v128_t special = wasm_i32x4_gt(magnitude, wasm_i32x4_splat(0x0f7fffff));
  value = wasm_v128_or(value, wasm_v128_and(special, wasm_i32x4_splat(0x7f800000)));
  return wasm_v128_or(value, wasm_i32x4_shl(wasm_i32x4_shr(wasm_i32x4_shl(h, 16), 31), 31));
}

INLINE float f16_to_f32(uint16_t half) { return wasm_f32x4_extract_lane(f16x4_to_f32x4(wasm_i16x8_splat((short)half)), 0); }

// Bytes of weights and of scales of four rows and one block of 32 columns in device layout (kernels_wasm/linear.c).
#define GROUP_ROWS 4
#define BLOCK 32
#define Q4_GROUP_BYTES 64
#define Q8_GROUP_BYTES 128
#define Q4_SCALE_FLOATS 8
#define Q8_SCALE_FLOATS 4

uint32_t op_embed(const uint32_t *rec);
uint32_t op_rms_norm(const uint32_t *rec);
uint32_t op_linear(const uint32_t *rec, uint8_t *scratch);
uint32_t op_rope_append(const uint32_t *rec);
uint32_t op_move_slots(const uint32_t *rec);
uint32_t op_recur(const uint32_t *rec);
uint32_t op_gate(const uint32_t *rec);
uint32_t op_shift(const uint32_t *rec);
uint32_t op_attention(const uint32_t *rec, uint8_t *scratch);

// Why a record was refused; 0 is fine. The host turns them into sentences (pie_core/device/cpu_plan.py).
enum Fault { FAULT_NONE = 0, FAULT_OPCODE = 1, FAULT_STEP = 2, FAULT_FORMAT = 3 };

// Row range of the record; false when the header's counts or offsets leave the buffer, or there are more rows than the bucket.
INLINE int row_range(const uint32_t *rec, RowRange *out) {
  const uint32_t *step = at(rec[REC_STEP]);
  int reads = rec[REC_ROWS] == ROWS_READS;
  uint64_t words = rec[REC_STEP_WORDS], count = step[reads ? STEP_READS : STEP_TOKENS];
  uint64_t offset = step[reads ? STEP_READ_OFF : STEP_TOKEN_OFF];
  *out = (RowRange){(uint32_t)count, step, step + offset};
  return count <= rec[REC_BUCKET] && offset + count * (reads ? 1 : TOKEN_WORDS) <= words;
}

#endif
