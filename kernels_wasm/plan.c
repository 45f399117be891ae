// The exports: where free memory begins, clearing and copying, and the walk over a plan's records.
#include "device.h"

extern uint8_t __heap_base;

EXPORT(heap_base) uint32_t heap_base(void) { return (uint32_t)(uintptr_t)&__heap_base; }

EXPORT(mem_zero) uint32_t mem_zero(uint32_t address, uint32_t bytes) {
  __builtin_memset(at_rw(address), 0, bytes);
  return FAULT_NONE;
}

EXPORT(mem_copy) uint32_t mem_copy(uint32_t to, uint32_t from, uint32_t bytes) {
  __builtin_memmove(at_rw(to), at(from), bytes);
  return FAULT_NONE;
}

void vm_epilogue(const uint32_t *prog, const float *logits, const float *hidden, uint32_t *arena, const uint32_t *lanes, uint32_t n_lanes,
                 uint32_t *results, uint32_t *scratch);
void vm_map(const uint32_t *prog, const uint32_t *step, const float *const *inputs, float *out, uint32_t *scratch);

static uint32_t run_record(const uint32_t *rec, uint8_t *scratch, uint32_t lane_offset, uint32_t lanes) {
  const uint32_t *a = rec + REC_ARGS;
  uint32_t *words = (uint32_t *)(void *)scratch;
  RowRange range;
  switch (rec[REC_OP]) {
    case OP_EMBED: return op_embed(rec);
    case OP_RMS_NORM: return op_rms_norm(rec);
    case OP_LINEAR: return op_linear(rec, scratch);
    case OP_ROPE_APPEND: return op_rope_append(rec);
    case OP_ATTENTION: return op_attention(rec, scratch);
    case OP_MOVE_SLOTS: return op_move_slots(rec);
    case OP_RECUR: return op_recur(rec);
    case OP_GATE: return op_gate(rec);
    case OP_SHIFT: return op_shift(rec);
    case OP_MAP:  // program, table of input addresses, out
      if (!row_range(rec, &range)) return FAULT_STEP;
      vm_map(at(a[0]), range.step, at(a[1]), at_rw(a[2]), words);
      return FAULT_NONE;
    case OP_EPILOGUE:  // program, logits, hidden, arena, lanes, results
      vm_epilogue(at(a[0]), at(a[1]), at(a[2]), at_rw(a[3]), at(a[4] + lane_offset), lanes, at_rw(a[5]), words);
      return FAULT_NONE;
    default: return FAULT_OPCODE;
  }
}

// Whether a gate has left the record no rows. An epilogue has no step: its lanes say it themselves.
static int idle(const uint32_t *rec) {
  const uint32_t *step = at(rec[REC_STEP]);
  return rec[REC_OP] != OP_EPILOGUE && rec[REC_OP] != OP_GATE && !step[rec[REC_ROWS] == ROWS_READS ? STEP_READS : STEP_TOKENS];
}

// Runs n records. `gated`: those are skipped that have no rows left. `lane_offset` (bytes) and `lanes` are of the epilogue records. 0, or 256 * index of the record + fault.
EXPORT(run_plan) uint32_t run_plan(uint32_t records, uint32_t n, uint32_t scratch, uint32_t lane_offset, uint32_t lanes, uint32_t gated) {
  const uint32_t *rec = at(records);
  for (uint32_t i = 0; i < n; i++, rec += REC_WORDS) {
    if (gated && idle(rec)) continue;
    uint32_t fault = run_record(rec, at_rw(scratch), lane_offset, lanes);
    if (fault) return i << 8 | fault;
  }
  return FAULT_NONE;
}

// Calls of run_plan that the host makes as one: their arguments, in its order, and then run_plans. The first result that is not 0.
static uint32_t plan_calls[MAX_PLAN_CALLS][6];

EXPORT(plan_calls_at) uint32_t plan_calls_at(void) { return (uint32_t)(uintptr_t)plan_calls; }

EXPORT(run_plans) uint32_t run_plans(uint32_t n) {
  uint32_t fault = FAULT_NONE;
  for (uint32_t i = 0; i < n && i < MAX_PLAN_CALLS && !fault; i++) {
    const uint32_t *a = plan_calls[i];
    fault = run_plan(a[0], a[1], a[2], a[3], a[4], a[5]);
  }
  return fault;
}
