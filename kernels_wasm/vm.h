// What the parts of the virtual machine share: an instruction's arguments and the functions that vm.c does not hold itself.
#ifndef PIE_VM_H
#define PIE_VM_H

#include <stddef.h>
#include <stdint.h>
#include <wasm_simd128.h>

#define NOINLINE __attribute__((noinline))  // called from several places: the page downloads the module

// Operands are (address, stride): stride 0 repeats a scalar slot, stride 16 walks a vector.
typedef struct {
  const uint8_t *a, *b, *c;
  uint32_t sa, sb, sc;
  uint8_t *d;
  uint32_t nv, n;   // vectors and elements of this chunk
  uint32_t i, imm;  // index of the chunk's first element; the instruction's immediate
  uint32_t start;   // index of the first element of this row, 0 outside of row loops
} VmArgs;

static inline const uint32_t *words(const uint8_t *p) { return (const uint32_t *)(const void *)p; }
static inline uint32_t word_at(const uint8_t *p, uint32_t index) { return words(p)[index]; }
static inline v128_t first_lanes(uint32_t n) { return wasm_u32x4_lt(wasm_i32x4_make(0, 1, 2, 3), wasm_i32x4_splat((int32_t)n)); }

// Ordered keys: a greater element has a greater u32 key. f32: NaN is 0, -0 equals +0. The three words come from the emitter:
// f32 (~0, 1 << 31, 0), i32 (0, 1 << 31, ~0), u32 (0, 0, ~0).
typedef struct {
  v128_t is_f32, flip, all;
} KeyKind;

static inline KeyKind key_kind(const uint32_t *w) {
  return (KeyKind){wasm_v128_load32_splat(w), wasm_v128_load32_splat(w + 1), wasm_v128_load32_splat(w + 2)};
}

static inline v128_t ordered_keys(v128_t x, KeyKind kind) {
  v128_t b = wasm_v128_bitselect(wasm_f32x4_add(x, wasm_f32x4_splat(0.0f)), x, kind.is_f32);  // -0 + 0 is +0
  b = wasm_v128_xor(b, wasm_v128_or(wasm_v128_and(wasm_i32x4_shr(b, 31), kind.is_f32), kind.flip));
  return wasm_v128_and(b, wasm_v128_or(wasm_f32x4_eq(x, x), kind.all));
}

static inline v128_t f32_keys(v128_t x) {
  v128_t b = wasm_f32x4_add(x, wasm_f32x4_splat(0.0f));
  b = wasm_v128_xor(b, wasm_v128_or(wasm_i32x4_shr(b, 31), wasm_i32x4_splat((int32_t)0x80000000)));
  return wasm_v128_and(b, wasm_f32x4_eq(x, x));
}

// vm_lookup.c: chunk ops that read memory at other elements.
void vm_view(const VmArgs *x);
void vm_gather(const VmArgs *x);
void vm_gather_rows(const VmArgs *x);
void vm_gather_row(const VmArgs *x);
void vm_mask_apply(const VmArgs *x);
void vm_pivot(const VmArgs *x);

// vm_select.c, vm_sort.c, vm_linear.c: skeletons, from memory to memory.
void vm_pivot_rank(const VmArgs *x);
void vm_pivot_mass(const VmArgs *x);
void vm_top_k(const VmArgs *x);
void vm_sort_desc(const VmArgs *x);
void vm_cumsum_f32(const VmArgs *x);
void vm_cumsum_u32(const VmArgs *x);
void vm_cumprod_f32(const VmArgs *x);
void vm_cumprod_u32(const VmArgs *x);
void vm_matmul(const VmArgs *x);
void vm_copy_words(const VmArgs *x);
void vm_scatter_set(const VmArgs *x);
void vm_scatter_add_f32(const VmArgs *x);
void vm_scatter_add_u32(const VmArgs *x);

// Sorts n values, greatest first.
void sort_u64_desc(uint64_t *v, uint32_t n);
// A key and the index of its element: greater means earlier in descending order with ties by lower index.
static inline uint64_t key_and_index(uint32_t key, uint32_t index) { return (uint64_t)key << 32 | (uint32_t)~index; }

#endif
