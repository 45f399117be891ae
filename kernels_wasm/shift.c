// Shifts: rows of a step moved to the places that a count on the device gives them (docs/architecture.md, section 4).
#include "device.h"

enum { SHIFT_TOTAL = 0, SHIFT_FRESH, SHIFT_CELL, SHIFT_LIMIT, SHIFT_KNOWN, SHIFT_FIRST, SHIFT_EARLY, SHIFT_ROWS, SHIFT_WORDS };
enum { STEP_SHIFT_OFF = 11, STEP_SHIFTS = 12 };

static void move_row(uint32_t *step, uint64_t words, uint32_t *row, uint32_t shift) {
  uint32_t pos = row[TOKEN_POS] -= shift;
  if (row[TOKEN_SLOT] == NONE) return;
  uint64_t page = (uint64_t)row[TOKEN_PAGES] + pos / PAGE_TOKENS;
  row[TOKEN_SLOT] = page < words ? step[page] * PAGE_TOKENS + pos % PAGE_TOKENS : NONE;
}

// Arguments: arena, arena words. The total of each shift grows by what its count leaves over, and its rows go back by it.
uint32_t op_shift(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  uint32_t *step = at_rw(rec[REC_STEP]), *arena = at_rw(rec[REC_ARGS]);
  uint64_t words = rec[REC_STEP_WORDS], arena_words = rec[REC_ARGS + 1], table = step[STEP_SHIFT_OFF], shifts = step[STEP_SHIFTS];
  if (!shifts) return FAULT_NONE;
  if (shifts > rec[REC_BUCKET] || table < STEP_HEADER_WORDS || table + shifts * SHIFT_WORDS > words) return FAULT_STEP;
  for (const uint32_t *shift = step + table, *end = shift + shifts * SHIFT_WORDS; shift < end; shift += SHIFT_WORDS) {
    uint64_t first = shift[SHIFT_FIRST], rows = shift[SHIFT_ROWS];
    if (shift[SHIFT_TOTAL] >= arena_words || first + rows > range.count) return FAULT_STEP;
    uint32_t *total = arena + shift[SHIFT_TOTAL], before = shift[SHIFT_FRESH] ? 0 : *total;
    uint32_t limit = shift[SHIFT_LIMIT] & 0x7fffffff;
    *total = before;
    if (shift[SHIFT_CELL] < arena_words) {
      int32_t count = (int32_t)arena[shift[SHIFT_CELL]];
      *total += limit - (count < 0 ? 0 : (uint32_t)count > limit ? limit : (uint32_t)count);
    }
    for (uint64_t k = 0; k < rows; k++) {
      uint32_t *row = step + step[STEP_TOKEN_OFF] + TOKEN_WORDS * (first + k);
      move_row(step, words, row, (k < shift[SHIFT_EARLY] ? before : *total) - shift[SHIFT_KNOWN]);
    }
  }
  return FAULT_NONE;
}
