// The diagonal linear recurrence h = decay * h + gain * x over runs of rows, between state slots.
#include "device.h"

enum { RUN_END = 0, RUN_START, RUN_WRITE, RUN_LIMIT, RUN_CELL, RUN_WORDS };
enum { STEP_RUN_OFF = 6, STEP_RUNS = 7 };

typedef struct {
  const float *start;  // NULL: zeros
  float *write;        // NULL: the state is not kept
  uint32_t rows, limit, folded;
} Run;

// Four elements of one run: `x` and `out` point at them in its first row. Behind `limit` rows it goes on from what was folded.
INLINE void advance(const Run *run, uint32_t i, uint32_t width, const float *x, v128_t decay, v128_t gain, float *out) {
  v128_t h = run->start ? wasm_v128_load(run->start + i) : wasm_f32x4_splat(0.0f), kept = h;
  for (uint32_t r = 0; r < run->rows; r++, x += width, out += width) {
    if (r == run->limit) h = kept;
    h = wasm_f32x4_add(wasm_f32x4_mul(decay, h), wasm_f32x4_mul(gain, wasm_v128_load(x)));
    wasm_v128_store(out, h);
    if (r + 1 == run->folded) kept = h;
  }
  if (run->write) wasm_v128_store(run->write + i, kept);
}

// Arguments: arena, x, decay, gain, state, out, width (a multiple of 4), floats of a slot, offset of this state in it, slots, arena words.
// Rows that no run covers, and those of a malformed run, are NaN.
uint32_t op_recur(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  const uint32_t *a = rec + REC_ARGS, width = a[6], stride = a[7], offset = a[8], slots = a[9], arena_words = a[10];
  const int32_t *arena = at(a[0]);
  const float *x = at(a[1]), *decay = at(a[2]), *gain = at(a[3]);
  float *state = (float *)at_rw(a[4]) + offset, *out = at_rw(a[5]);
  uint64_t table = range.step[STEP_RUN_OFF], runs = range.step[STEP_RUNS];
  if (table < STEP_HEADER_WORDS || table + runs * RUN_WORDS > rec[REC_STEP_WORDS]) runs = 0;
  const uint32_t *word = range.step + table;
  uint32_t begin = 0;
  for (uint64_t k = 0; k < runs; k++, word += RUN_WORDS) {
    uint32_t end = word[RUN_END], start = word[RUN_START], write = word[RUN_WRITE], limit = word[RUN_LIMIT], cell = word[RUN_CELL];
    if (begin > end || end > range.count || limit > end - begin || (start != NONE && start >= slots) || (write != NONE && write >= slots) ||
        (cell != NONE && cell >= arena_words)) {
      uint32_t last = end < range.count ? end : range.count;
      for (uint32_t t = begin; t < last; t++) fill_f32(out + (size_t)t * width, width, nan_f32());
      begin = end;
      continue;
    }
    int32_t count = cell == NONE ? (int32_t)limit : arena[cell];
    Run run = {
        .start = start == NONE ? NULL : state + (size_t)start * stride,
        .write = write == NONE ? NULL : state + (size_t)write * stride,
        .rows = end - begin,
        .limit = limit,
        .folded = count < 0 ? 0 : (uint32_t)count < limit ? (uint32_t)count : limit,
    };
    const float *rows = x + (size_t)begin * width;
    float *results = out + (size_t)begin * width;
    for (uint32_t i = 0; i < width; i += 4) {
      advance(&run, i, width, rows + i, wasm_v128_load(decay + i), wasm_v128_load(gain + i), results + i);
    }
    begin = end;
  }
  for (uint32_t t = begin; t < range.count; t++) fill_f32(out + (size_t)t * width, width, nan_f32());
  return FAULT_NONE;
}
