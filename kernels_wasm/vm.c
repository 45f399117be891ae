// The virtual machine for tensor programs: walks the word list of pie_core/codegen/cpu.py over chunks of 1,024 elements.
//
// One function an op, over four lanes at a time; vm_ops.h (generated from the op table) holds all that are a single expression.
// What reads other elements, or works from memory to memory, lies in vm_lookup.c, vm_select.c, vm_sort.c and vm_linear.c. Sums run in a
// fixed order, so a row alone and the same row in a batch have the same bits.
#include "simd_math.h"
#include "vm.h"

enum { VM_CHUNK = 1024, VM_HEADER = 8, VM_BLOCK = 3, VM_INSTRUCTION = 6 };
enum { BLOCK_ONCE, BLOCK_LOOP, BLOCK_END, BLOCK_ROWS };
enum { AT_SCALAR, AT_TEMP, AT_LOGITS, AT_HIDDEN, AT_ARENA, AT_INPUT, AT_RESULTS, AT_OUT, AT_LANES, AT_SCRATCH, AT_TABLE };
#define VM_NONE 0xffffffffu
#define VM_WHOLE 0x8000000u  // the operand's first element, wherever the chunk is

typedef void (*VmFunction)(const VmArgs *);

// Ops of the table -----------------------------------------------------------------------------------------------------------

#define VM_MAP1(id, ...)                                                 \
  static void vm_##id(const VmArgs *x) {                                 \
    const uint8_t *pa = x->a;                                            \
    for (uint32_t k = 0; k < x->nv; k++, pa += x->sa) {                  \
      v128_t a = wasm_v128_load(pa);                                     \
      wasm_v128_store(x->d + 16 * k, __VA_ARGS__);                       \
    }                                                                    \
  }
#define VM_MAP2(id, ...)                                                 \
  static void vm_##id(const VmArgs *x) {                                 \
    const uint8_t *pa = x->a, *pb = x->b;                                \
    for (uint32_t k = 0; k < x->nv; k++, pa += x->sa, pb += x->sb) {     \
      v128_t a = wasm_v128_load(pa), b = wasm_v128_load(pb);             \
      wasm_v128_store(x->d + 16 * k, __VA_ARGS__);                       \
    }                                                                    \
  }
#define VM_MAP3(id, ...)                                                                 \
  static void vm_##id(const VmArgs *x) {                                                 \
    const uint8_t *pa = x->a, *pb = x->b, *pc = x->c;                                    \
    for (uint32_t k = 0; k < x->nv; k++, pa += x->sa, pb += x->sb, pc += x->sc) {        \
      v128_t a = wasm_v128_load(pa), b = wasm_v128_load(pb), c = wasm_v128_load(pc);     \
      wasm_v128_store(x->d + 16 * k, __VA_ARGS__);                                       \
    }                                                                                    \
  }
#define VM_GENERATOR0(id, ...)                                           \
  static void vm_##id(const VmArgs *x) {                                 \
    uint32_t i = x->i + x->imm;                                          \
    for (uint32_t k = 0; k < x->nv; k++, i += 4) wasm_v128_store(x->d + 16 * k, __VA_ARGS__); \
  }
#define VM_GENERATOR1(id, ...)                                           \
  static void vm_##id(const VmArgs *x) {                                 \
    uint32_t i = x->i + x->imm;                                          \
    uint64_t seed = rng_seed(*(const uint32_t *)(const void *)x->a, *(const uint32_t *)(const void *)x->b); \
    for (uint32_t k = 0; k < x->nv; k++, i += 4) wasm_v128_store(x->d + 16 * k, __VA_ARGS__); \
  }
// A reduction: the accumulator is one v128. A chunk is summed on its own by four accumulators first, then joined: short chains of roundings.
#define VM_FOLD(id, INIT, STEP, FINAL)                                                                      \
  static inline v128_t vm_##id##_join(v128_t acc, v128_t a) { return STEP; }                                \
  static void vm_##id##_init(const VmArgs *x) { wasm_v128_store(x->d, INIT); }                              \
  static void vm_##id##_step(const VmArgs *x) {                                                             \
    v128_t p[4] = {INIT, INIT, INIT, INIT};                                                                 \
    uint32_t k = 0, full = x->n / 4;                                                                        \
    for (; k + 4 <= full; k += 4)                                                                           \
      for (uint32_t j = 0; j < 4; j++) p[j] = vm_##id##_join(p[j], wasm_v128_load(x->a + 16 * (k + j)));     \
    for (; k < full; k++) p[0] = vm_##id##_join(p[0], wasm_v128_load(x->a + 16 * k));                       \
    if (x->n % 4) {                                                                                         \
      v128_t a = wasm_v128_bitselect(wasm_v128_load(x->a + 16 * k), INIT, first_lanes(x->n % 4));           \
      p[0] = vm_##id##_join(p[0], a);                                                                       \
    }                                                                                                       \
    v128_t all = vm_##id##_join(vm_##id##_join(p[0], p[1]), vm_##id##_join(p[2], p[3]));                     \
    wasm_v128_store(x->d, vm_##id##_join(wasm_v128_load(x->d), all));                                       \
  }                                                                                                         \
  static void vm_##id##_final(const VmArgs *x) {                                                            \
    v128_t acc = wasm_v128_load(x->a);                                                                      \
    acc = vm_##id##_join(acc, wasm_i32x4_shuffle(acc, acc, 2, 3, 0, 1));                                    \
    acc = vm_##id##_join(acc, wasm_i32x4_shuffle(acc, acc, 1, 0, 3, 2));                                    \
    wasm_v128_store(x->d, FINAL);                                                                           \
  }

static inline v128_t v_iota(uint32_t i) { return wasm_i32x4_add(wasm_i32x4_splat((int32_t)i), wasm_i32x4_make(0, 1, 2, 3)); }

static inline v128_t v_sign_f32(v128_t a) {
  v128_t zero = wasm_f32x4_splat(0.0f), one = wasm_f32x4_splat(1.0f);
  return wasm_f32x4_sub(wasm_v128_and(wasm_f32x4_gt(a, zero), one), wasm_v128_and(wasm_f32x4_lt(a, zero), one));
}
static inline v128_t v_sign_i32(v128_t a) {
  v128_t zero = wasm_i32x4_splat(0);
  return wasm_i32x4_sub(wasm_i32x4_lt(a, zero), wasm_i32x4_gt(a, zero));
}
static inline v128_t v_max_f32(v128_t a, v128_t b) {
  return wasm_v128_bitselect(a, b, wasm_v128_or(wasm_f32x4_gt(a, b), wasm_f32x4_ne(b, b)));
}
static inline v128_t v_min_f32(v128_t a, v128_t b) {
  return wasm_v128_bitselect(a, b, wasm_v128_or(wasm_f32x4_lt(a, b), wasm_f32x4_ne(b, b)));
}

static int32_t div_i32(int32_t a, int32_t b) { return b == 0 ? 0 : b == -1 ? (int32_t)(0u - (uint32_t)a) : a / b; }
static int32_t rem_i32(int32_t a, int32_t b) { return b == 0 || b == -1 ? 0 : a % b; }
static uint32_t div_u32(uint32_t a, uint32_t b) { return b == 0 ? 0 : a / b; }
static uint32_t rem_u32(uint32_t a, uint32_t b) { return b == 0 ? 0 : a % b; }
// Exact, whatever the quotient: long division of the mantissas, 40 bits a turn.
static float rem_f32(float a, float b) {
  union { float f; uint32_t u; } from = {.f = a}, by = {.f = b};
  uint32_t sign = from.u & 0x80000000u, x = from.u ^ sign, y = by.u & 0x7fffffffu;
  if (x >= 0x7f800000u || y > 0x7f800000u || y == 0) return __builtin_nanf("");
  if (x < y) return a;
  uint32_t e = y >> 23 ? y >> 23 : 1, left = (x >> 23 ? x >> 23 : 1) - e;
  uint64_t m = (y & 0x7fffffu) | (y >> 23 ? 0x800000u : 0), r = ((x & 0x7fffffu) | (x >> 23 ? 0x800000u : 0)) % m;
  for (uint32_t bits; left; left -= bits) {
    bits = left < 40 ? left : 40;
    r = (r << bits) % m;
  }
  uint32_t up = r ? (uint32_t)__builtin_clz((uint32_t)r) - 8 : 0;
  if (up > e - 1) up = e - 1;
  from.u = sign | (r ? ((e - up - 1) << 23) + ((uint32_t)r << up) : 0);
  return from.f;
}
#define VM_LANES(name, T, scalar)                                        \
  static inline v128_t name(v128_t a, v128_t b) {                        \
    T x[4], y[4];                                                        \
    wasm_v128_store(x, a);                                               \
    wasm_v128_store(y, b);                                               \
    for (int k = 0; k < 4; k++) x[k] = scalar(x[k], y[k]);               \
    return wasm_v128_load(x);                                            \
  }
VM_LANES(v_div_i32, int32_t, div_i32)
VM_LANES(v_rem_i32, int32_t, rem_i32)
VM_LANES(v_div_u32, uint32_t, div_u32)
VM_LANES(v_rem_u32, uint32_t, rem_u32)
VM_LANES(v_rem_f32, float, rem_f32)

// Random numbers; the constants come from the table through vm_ops.h.
#define VM_RANDOM                                                                                                    \
  static inline uint64_t rng_mix(uint64_t x) {                                                                       \
    x = (x ^ (x >> RNG_SHIFT0)) * RNG_MUL0;                                                                          \
    x = (x ^ (x >> RNG_SHIFT1)) * RNG_MUL1;                                                                          \
    return x ^ (x >> RNG_SHIFT2);                                                                                    \
  }                                                                                                                  \
  static inline uint64_t rng_seed(uint32_t key, uint32_t counter) { return rng_mix((uint64_t)key << 32 | counter); } \
  static inline v128_t rng_mix2(v128_t x) {                                                                          \
    x = wasm_i64x2_mul(wasm_v128_xor(x, wasm_u64x2_shr(x, RNG_SHIFT0)), wasm_i64x2_splat((int64_t)RNG_MUL0));        \
    x = wasm_i64x2_mul(wasm_v128_xor(x, wasm_u64x2_shr(x, RNG_SHIFT1)), wasm_i64x2_splat((int64_t)RNG_MUL1));        \
    return wasm_u64x2_shr(wasm_v128_xor(x, wasm_u64x2_shr(x, RNG_SHIFT2)), RNG_BITS_SHIFT);                          \
  }                                                                                                                  \
  static inline v128_t v_uniform(uint64_t seed, uint32_t i) {                                                        \
    uint64_t base = seed + RNG_GAMMA * ((uint64_t)i + 1);                                                            \
    v128_t low = wasm_i64x2_make((int64_t)base, (int64_t)(base + RNG_GAMMA));                                        \
    v128_t high = wasm_i64x2_add(low, wasm_i64x2_splat((int64_t)(2 * RNG_GAMMA)));                                   \
    v128_t bits = wasm_i32x4_shuffle(rng_mix2(low), rng_mix2(high), 0, 2, 4, 6);                                     \
    v128_t u = wasm_f32x4_add(wasm_f32x4_convert_i32x4(bits), wasm_f32x4_splat(0.5f));                               \
    return wasm_f32x4_min(wasm_f32x4_mul(u, wasm_f32x4_splat(RNG_SCALE)), wasm_f32x4_splat(RNG_MAX));                \
  }                                                                                                                  \
  static inline v128_t v_gumbel(uint64_t seed, uint32_t i) {                                                         \
    return wasm_f32x4_neg(simd_log(wasm_f32x4_neg(simd_log(v_uniform(seed, i)))));                                   \
  }                                                                                                                  \
  static inline v128_t v_normal(uint64_t seed, uint32_t i) {                                                         \
    v128_t p = v_uniform(seed, 2 * i), q = v_uniform(seed, 2 * i + 4);                                               \
    v128_t u = wasm_i32x4_shuffle(p, q, 0, 2, 4, 6), v = wasm_i32x4_shuffle(p, q, 1, 3, 5, 7);                       \
    v128_t r = wasm_f32x4_sqrt(wasm_f32x4_mul(wasm_f32x4_splat(-2.0f), simd_log(u)));                                \
    return wasm_f32x4_mul(r, simd_cos(wasm_f32x4_mul(wasm_f32x4_splat(RNG_TWO_PI), v)));                             \
  }

// Fixed ops ------------------------------------------------------------------------------------------------------------------

VM_MAP1(copy, a)
VM_MAP1(neg_log, wasm_f32x4_neg(simd_log_normal(a)))
VM_MAP1(mask, wasm_i32x4_ne(a, wasm_i32x4_splat(0)))

static void vm_const(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat((int32_t)x->imm)); }
static void vm_load(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat((int32_t)word_at(x->a, x->imm))); }
static void vm_load_bool(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat(word_at(x->a, x->imm) ? -1 : 0)); }
static void vm_splat(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat((int32_t)word_at(x->a, 0))); }

static void vm_store(const VmArgs *x) {
  if (!x->d) return;
  v128_t keep = wasm_i32x4_splat(x->imm ? 1 : -1);
  uint32_t full = x->n / 4, *out = (uint32_t *)(void *)x->d;
  for (uint32_t k = 0; k < full; k++) wasm_v128_store(out + 4 * k, wasm_v128_and(wasm_v128_load(x->a + 16 * k), keep));
  for (uint32_t k = 4 * full; k < x->n; k++) out[k] = word_at(x->a, k) & (uint32_t)wasm_i32x4_extract_lane(keep, 0);
}

static void vm_nan_init(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat(0)); }
static void vm_nan_step(const VmArgs *x) {
  v128_t p[4] = {wasm_v128_load(x->d), wasm_i32x4_splat(0), wasm_i32x4_splat(0), wasm_i32x4_splat(0)};
  uint32_t k = 0, full = x->n / 4;
  for (; k + 4 <= full; k += 4)
    for (uint32_t j = 0; j < 4; j++) {
      v128_t a = wasm_v128_load(x->a + 16 * (k + j));
      p[j] = wasm_v128_or(p[j], wasm_f32x4_ne(a, a));
    }
  for (; 4 * k < x->n; k++) {
    v128_t a = wasm_v128_load(x->a + 16 * k), inside = 4 * k + 4 <= x->n ? wasm_i32x4_splat(-1) : first_lanes(x->n % 4);
    p[0] = wasm_v128_or(p[0], wasm_v128_and(wasm_f32x4_ne(a, a), inside));
  }
  wasm_v128_store(x->d, wasm_v128_or(wasm_v128_or(p[0], p[1]), wasm_v128_or(p[2], p[3])));
}
static void vm_nan_final(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat(wasm_v128_any_true(wasm_v128_load(x->a)) ? 1 : 0)); }

// Argmax: the maximum of a chunk first; only a chunk that beats the best so far is searched. State: [best, index, found, 0].
static void vm_argmax_init(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat(0)); }
static void vm_argmax_final(const VmArgs *x) { wasm_v128_store(x->d, wasm_i32x4_splat((int32_t)word_at(x->a, 1))); }
#define VM_ARGMAX(T, id, LOWEST, MAX, EQ, EXTRACT)                                                              \
  static void vm_argmax_##id(const VmArgs *x) {                                                                 \
    const T *v = (const T *)(const void *)x->a;                                                                 \
    v128_t p[4] = {LOWEST, LOWEST, LOWEST, LOWEST};                                                             \
    uint32_t k = 0, *state = (uint32_t *)(void *)x->d;                                                          \
    for (; k + 16 <= x->n; k += 16)                                                                             \
      for (uint32_t j = 0; j < 4; j++) p[j] = MAX(p[j], wasm_v128_load(v + k + 4 * j));                         \
    v128_t m = MAX(MAX(p[0], p[1]), MAX(p[2], p[3]));                                                           \
    m = MAX(m, wasm_i32x4_shuffle(m, m, 2, 3, 0, 1));                                                           \
    m = MAX(m, wasm_i32x4_shuffle(m, m, 1, 0, 3, 2));                                                           \
    T most = (T)EXTRACT(m, 0), *best = (T *)(void *)state;                                                      \
    for (; k < x->n; k++) most = v[k] > most ? v[k] : most;                                                     \
    if (state[2] && !(most > *best)) return;                                                                    \
    v128_t wanted = wasm_v128_load32_splat(&most);                                                              \
    for (k = 0; k + 4 <= x->n && !wasm_v128_any_true(EQ(wasm_v128_load(v + k), wanted)); k += 4) {              \
    }                                                                                                           \
    while (k < x->n && v[k] != most) k++;                                                                       \
    if (k == x->n) return; /* only NaN so far */                                                                \
    *best = most, state[1] = x->i - x->start + k, state[2] = 1;                                                          \
  }
VM_ARGMAX(float, f32, wasm_f32x4_splat(-__builtin_inff()), wasm_f32x4_pmax, wasm_f32x4_eq, wasm_f32x4_extract_lane)
VM_ARGMAX(int32_t, i32, wasm_i32x4_splat((int32_t)0x80000000), wasm_i32x4_max, wasm_i32x4_eq, wasm_i32x4_extract_lane)
VM_ARGMAX(uint32_t, u32, wasm_i32x4_splat(0), wasm_u32x4_max, wasm_i32x4_eq, wasm_i32x4_extract_lane)

#include "vm_ops.h"

// The walk -------------------------------------------------------------------------------------------------------------------

typedef struct {
  uint8_t *scratch, *temps;
  uint32_t *memory;                // scratch words of the schedule
  const uint32_t *tables;          // constants of instructions, in the program
  const float *logits, *hidden;    // first row of this lane
  uint32_t logits_width, hidden_width;
  uint32_t *arena, *results;
  const uint32_t *lane;
  const float *inputs[8];          // this row of each input
  float *out;
} Vm;

// Address of an operand; `base` is the first element of the chunk.
static inline uint8_t *address(const Vm *vm, uint32_t operand, uint32_t base, uint32_t *stride) {
  uint32_t index = operand & (VM_WHOLE - 1);
  if (operand & VM_WHOLE) base = 0;
  *stride = 16;
  switch (operand >> 28) {
    case AT_SCALAR: *stride = 0; return vm->scratch + 16 * index;
    case AT_TEMP: return vm->temps + 4 * VM_CHUNK * index;
    case AT_LOGITS: return (uint8_t *)(uintptr_t)(vm->logits + index * vm->logits_width + base);
    case AT_HIDDEN: return (uint8_t *)(uintptr_t)(vm->hidden + index * vm->hidden_width + base);
    case AT_ARENA: return vm->lane[index] == VM_NONE ? 0 : (uint8_t *)(vm->arena + vm->lane[index] + base);
    case AT_RESULTS: return vm->lane[index] == VM_NONE ? 0 : (uint8_t *)(vm->results + vm->lane[index] + base);
    case AT_INPUT: return (uint8_t *)(uintptr_t)(vm->inputs[index] + base);
    case AT_OUT: return (uint8_t *)(vm->out + base);
    case AT_SCRATCH: return (uint8_t *)(vm->memory + index + base);
    case AT_TABLE: *stride = 0; return (uint8_t *)(uintptr_t)(vm->tables + index);
    default: *stride = 0; return (uint8_t *)(uintptr_t)(vm->lane + index);
  }
}

static void run_code(const Vm *vm, const uint32_t *code, uint32_t count, uint32_t base, uint32_t n, uint32_t start) {
  uint32_t ignored;
  for (const uint32_t *end = code + count; code < end; code += VM_INSTRUCTION) {
    VmArgs x = {.n = n, .nv = (n + 3) / 4, .i = base, .imm = code[1], .start = start};
    x.d = address(vm, code[2], base, &ignored);
    x.a = address(vm, code[3], base, &x.sa);
    x.b = address(vm, code[4], base, &x.sb);
    x.c = address(vm, code[5], base, &x.sc);
    VM_FUNCTIONS[code[0]](&x);
  }
}

// One walk over n elements from `start`.
static void run_chunks(const Vm *vm, const uint32_t *code, uint32_t count, uint32_t start, uint32_t n) {
  for (uint32_t at = 0; at < n; at += VM_CHUNK)
    run_code(vm, code, count, start + at, n - at < VM_CHUNK ? n - at : VM_CHUNK, start);
}

// A block of row loops: behind its three words stand rows and the words of its three parts, then the parts: before each row, over its
// chunks, after it (with the row's number as the index).
static void run_rows(const Vm *vm, const uint32_t *block) {
  const uint32_t n = block[2], rows = block[3], *first = block + 7, *body = first + block[4], *last = body + block[5];
  for (uint32_t r = 0; r < rows; r++) {
    run_code(vm, first, block[4], 0, 1, 0);
    run_chunks(vm, body, block[5], r * n, n);
    run_code(vm, last, block[6], r, 1, 0);
  }
}

// Runs the blocks of the kinds in `which`: a map runs its ONCE blocks once and its loops for each row.
enum { RUN_ONCE = 1, RUN_LOOPS = 2 };
static void run_blocks(const Vm *vm, const uint32_t *block, int which) {
  for (; block[0] != BLOCK_END; block += VM_BLOCK + block[1]) {
    if (block[0] == BLOCK_ONCE) {
      if (which & RUN_ONCE) run_code(vm, block + VM_BLOCK, block[1], 0, 1, 0);
    } else if (which & RUN_LOOPS) {
      if (block[0] == BLOCK_ROWS) run_rows(vm, block);
      else run_chunks(vm, block + VM_BLOCK, block[1], 0, block[2]);
    }
  }
}

// Runs an epilogue for each of n_lanes lanes. `scratch`: CpuProgram.scratch_bytes, 16-byte aligned.
void vm_epilogue(const uint32_t *prog, const float *logits, const float *hidden, uint32_t *arena, const uint32_t *lanes, uint32_t n_lanes,
                 uint32_t *results, uint32_t *scratch) {
  Vm vm = {.scratch = (uint8_t *)scratch, .arena = arena, .results = results, .logits_width = prog[3], .hidden_width = prog[4]};
  vm.temps = vm.scratch + 16 * prog[5];
  vm.memory = (uint32_t *)(void *)(vm.temps + 4 * VM_CHUNK * prog[6]);
  vm.tables = prog + prog[7];
  for (uint32_t l = 0; l < n_lanes; l++) {
    vm.lane = lanes + (size_t)l * prog[2];
    if (vm.lane[0] == VM_NONE) continue;  // its gate is shut
    vm.logits = logits + (size_t)vm.lane[0] * vm.logits_width;
    vm.hidden = hidden + (size_t)vm.lane[0] * vm.hidden_width;
    run_blocks(&vm, prog + VM_HEADER, RUN_ONCE | RUN_LOOPS);
  }
}

// Runs a map program for every row of the step. `scratch`: CpuProgram.scratch_bytes, 16-byte aligned.
void vm_map(const uint32_t *prog, const uint32_t *step, const float *const *inputs, float *out, uint32_t *scratch) {
  uint32_t count = step[prog[2]], n_inputs = prog[3], n = prog[4];
  const uint32_t *strides = prog + VM_HEADER, *blocks = strides + 2 * n_inputs;
  Vm vm = {.scratch = (uint8_t *)scratch};
  vm.temps = vm.scratch + 16 * prog[5];
  run_blocks(&vm, blocks, RUN_ONCE);
  for (uint32_t t = 0; t < count; t++) {
    for (uint32_t k = 0; k < n_inputs; k++) vm.inputs[k] = inputs[k] + (size_t)t * strides[2 * k] + strides[2 * k + 1];
    vm.out = out + (size_t)t * n;
    run_blocks(&vm, blocks, RUN_LOOPS);
  }
}
