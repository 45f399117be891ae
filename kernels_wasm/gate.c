// Gates: passes that were scheduled behind a stop, masked out of their step once the stop is known (docs/architecture.md, section 4).
#include "device.h"

enum { GATE_WORD = 0, GATE_CELL, GATE_PLACES, GATE_COUNT, GATE_WORDS };
enum { STEP_GATE_OFF = 8, STEP_GATES = 9, STEP_FREE_ROWS = 10 };

// Arguments: arena, arena words. A gate that is shut stores NONE at its places in the step buffer; with all gates shut and no row that
// has none, the step becomes empty.
uint32_t op_gate(const uint32_t *rec) {
  RowRange range;
  if (!row_range(rec, &range)) return FAULT_STEP;
  uint32_t *step = at_rw(rec[REC_STEP]), *arena = at_rw(rec[REC_ARGS]);
  uint64_t words = rec[REC_STEP_WORDS], arena_words = rec[REC_ARGS + 1], table = step[STEP_GATE_OFF], gates = step[STEP_GATES];
  if (!gates) return FAULT_NONE;
  if (gates > rec[REC_BUCKET] || table < STEP_HEADER_WORDS || table + gates * GATE_WORDS > words) return FAULT_STEP;
  int live = step[STEP_FREE_ROWS] != 0;
  for (const uint32_t *gate = step + table, *end = gate + gates * GATE_WORDS; gate < end; gate += GATE_WORDS) {
    uint64_t places = gate[GATE_PLACES], count = gate[GATE_COUNT];
    if (gate[GATE_WORD] >= arena_words || places < STEP_HEADER_WORDS || places + count > words) return FAULT_STEP;
    uint32_t *shut = arena + gate[GATE_WORD];
    if (gate[GATE_CELL] < arena_words && arena[gate[GATE_CELL]]) *shut = 1;
    if (!*shut) live = 1;
    for (uint64_t k = 0; *shut && k < count; k++) {
      uint32_t place = step[places + k];
      if (place >= STEP_HEADER_WORDS && place < words) step[place] = NONE;
    }
  }
  if (!live) step[STEP_TOKENS] = step[STEP_READS] = 0;
  return FAULT_NONE;
}
