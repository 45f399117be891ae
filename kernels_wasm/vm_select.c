// Selection without sorting: the k-th greatest key of a row, where the mass of a row passes a bound, and the k greatest elements.
//
// Keys are narrowed digit by digit with histograms. Before that a bound that the wanted key cannot be below is found by plain SIMD, so the
// histograms see few elements: from the greatest keys of groups (ranks), or from the mean of the mass to spare (masses). Few elements are
// sorted instead.
#include "vm.h"

enum { DIGITS = 2048, GROUPS = 2048, LIST = GROUPS / 2, FEW = GROUPS / 4, SHORT = 256 };

// Calls EACH(key, index) for the elements whose key is at least `low`, in index order.
#define EACH_FROM(x, n, kind, low, EACH)                                                                              \
  do {                                                                                                                \
    v128_t bound_ = wasm_i32x4_splat((int32_t)(low));                                                                 \
    for (uint32_t i_ = 0; i_ < (n); i_ += 16) {                                                                       \
      v128_t hit_[4], key_[4];                                                                                        \
      uint32_t left_ = (n)-i_, vectors_ = left_ < 16 ? (left_ + 3) / 4 : 4;                                           \
      v128_t any_ = wasm_i32x4_splat(0);                                                                              \
      for (uint32_t v_ = 0; v_ < vectors_; v_++) {                                                                    \
        key_[v_] = ordered_keys(wasm_v128_load((x) + i_ + 4 * v_), kind);                                             \
        hit_[v_] = wasm_u32x4_ge(key_[v_], bound_);                                                                   \
        any_ = wasm_v128_or(any_, hit_[v_]);                                                                          \
      }                                                                                                               \
      if (!wasm_v128_any_true(any_)) continue;                                                                        \
      for (uint32_t v_ = 0; v_ < vectors_; v_++) {                                                                    \
        uint32_t keys_[4], bits_ = wasm_i32x4_bitmask(hit_[v_]);                                                      \
        wasm_v128_store(keys_, key_[v_]);                                                                             \
        for (; bits_; bits_ &= bits_ - 1) {                                                                           \
          uint32_t lane_ = (uint32_t)__builtin_ctz(bits_);                                                            \
          if (i_ + 4 * v_ + lane_ < (n)) EACH(keys_[lane_], i_ + 4 * v_ + lane_);                                     \
        }                                                                                                             \
      }                                                                                                               \
    }                                                                                                                 \
  } while (0)

// The k-th greatest key (1 <= k <= elements with a key of at least `low`), and how many keys are greater. counts: DIGITS words.
static NOINLINE uint32_t rank_key(const uint32_t *x, uint32_t n, KeyKind kind, uint32_t low, uint32_t k, uint32_t *greater, uint32_t *counts) {
  static const uint8_t shifts[] = {21, 10, 0};
  uint32_t prefix = 0, known = 0, above = 0;
  for (uint32_t level = 0; level < 3; level++) {
    uint32_t shift = shifts[level], digit = (level < 2 ? DIGITS : DIGITS / 2) - 1;
    __builtin_memset(counts, 0, 4 * DIGITS);
#define COUNT(key, index) counts[(key) >> shift & digit] += ((key) & known) == prefix
    EACH_FROM(x, n, kind, low, COUNT);
#undef COUNT
    uint32_t bin = digit;
    while (above + counts[bin] < k) above += counts[bin--];
    prefix |= bin << shift, known |= digit << shift;
    if (prefix > low) low = prefix;
  }
  *greater = above;
  return prefix;
}

// A key that at least k elements reach, close to the k-th greatest when k is small: the k-th of the maxima of groups. 0 when there is none.
static NOINLINE uint32_t rank_bound(const uint32_t *x, uint32_t n, KeyKind kind, uint32_t k, uint32_t *work) {
  uint32_t vectors = n / 4, each = (vectors + GROUPS / 4 - 1) / (GROUPS / 4), *maxima = work + DIGITS, count = 0, greater;
  if (each < 2 || k > FEW) return 0;
  for (uint32_t v = 0; v + each <= vectors; v += each, count += 4) {
    v128_t most = wasm_i32x4_splat(0);
    for (uint32_t j = 0; j < each; j++) most = wasm_u32x4_max(most, ordered_keys(wasm_v128_load(x + 4 * (v + j)), kind));
    wasm_v128_store(maxima + count, most);
  }
  KeyKind plain = {wasm_i32x4_splat(0), wasm_i32x4_splat(0), wasm_i32x4_splat(-1)};
  return rank_key(maxima, count, plain, 0, k, &greater, work);
}

// All elements with a key of at least `low` as key_and_index in `list`, in index order; more than LIST when they do not fit.
static NOINLINE uint32_t gather_from(const uint32_t *x, uint32_t n, KeyKind kind, uint32_t low, uint64_t *list) {
  uint32_t count = 0;
#define GATHER(key, index)                        \
  do {                                            \
    if (count == LIST) return LIST + 1;           \
    list[count++] = key_and_index(key, index);    \
  } while (0)
  EACH_FROM(x, n, kind, low, GATHER);
#undef GATHER
  return count;
}

static const uint32_t F32_KIND[3] = {0xffffffffu, 0x80000000u, 0};

// d: two words a row, the least key kept and the last index kept for it; b: k; table: rows, n, work as words from d.
void vm_pivot_rank(const VmArgs *x) {
  const uint32_t *t = words(x->c), n = t[1], wanted = word_at(x->b, 0);
  uint32_t *out = (uint32_t *)(void *)x->d, *work = out + (int32_t)t[2], greater, k = wanted < n ? wanted : n;
  KeyKind kind = key_kind(F32_KIND);
  for (uint32_t r = 0; r < t[0]; r++, out += 2) {
    const uint32_t *row = words(x->a) + r * n;
    uint32_t key = 0xffffffffu;
    if (k) {
      uint32_t low = rank_bound(row, n, kind, k, work);
      uint64_t *list = (uint64_t *)(void *)(work + DIGITS);
      uint32_t count = low || n <= SHORT ? gather_from(row, n, kind, low, list) : LIST + 1;
      if (count <= LIST) {
        sort_u64_desc(list, count);
        key = (uint32_t)(list[k - 1] >> 32);
      } else {
        key = rank_key(row, n, kind, low, k, &greater, work);
      }
      if (!key) key = 1;  // fewer than k numbers: all of them, no NaN
    }
    out[0] = key, out[1] = n - 1;
  }
}

static inline v128_t masses(v128_t x) {
  v128_t inside = wasm_f32x4_pmin(wasm_f32x4_pmax(wasm_f32x4_splat(0.0f), x), wasm_f32x4_splat(1.0f));  // NaN is 0
  return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_mul(inside, wasm_f32x4_splat(0x1p30f)));
}

static uint32_t mass_of(uint32_t bits) { return (uint32_t)wasm_i32x4_extract_lane(masses(wasm_i32x4_splat((int32_t)bits)), 0); }

// The mass of a row, without that of elements whose order is a NaN.
static uint64_t total_mass(const uint32_t *order, const uint32_t *row, uint32_t n) {
  v128_t sum = wasm_i64x2_splat(0);
  for (uint32_t i = 0; i < n; i += 4) {
    v128_t by = wasm_v128_load(order + i), m = wasm_v128_and(masses(wasm_v128_load(row + i)), wasm_f32x4_eq(by, by));
    if (n - i < 4) m = wasm_v128_and(m, first_lanes(n - i));
    sum = wasm_i64x2_add(sum, wasm_i64x2_add(wasm_u64x2_extend_low_u32x4(m), wasm_u64x2_extend_high_u32x4(m)));
  }
  return (uint64_t)wasm_i64x2_extract_lane(sum, 0) + (uint64_t)wasm_i64x2_extract_lane(sum, 1);
}

// Adds the masses over `cut` of the elements whose keys agree with `prefix` where `known` is set to the bins of their digits.
static void add_masses(const uint32_t *order, const uint32_t *row, uint32_t n, int32_t cut, uint32_t prefix, uint32_t known, uint32_t shift,
                       uint32_t digit, uint64_t *bins) {
  v128_t bound = wasm_i32x4_splat(cut), want = wasm_i32x4_splat((int32_t)prefix), mask = wasm_i32x4_splat((int32_t)known);
  for (uint32_t i = 0; i < n; i += 4) {
    v128_t key = f32_keys(wasm_v128_load(order + i)), m = masses(wasm_v128_load(row + i));
    v128_t hit = wasm_v128_and(wasm_i32x4_gt(m, bound), wasm_i32x4_eq(wasm_v128_and(key, mask), want));
    if (n - i < 4) hit = wasm_v128_and(hit, first_lanes(n - i));
    if (!wasm_v128_any_true(hit)) continue;
    uint32_t keys[4], mass[4], hits = wasm_i32x4_bitmask(hit);
    wasm_v128_store(keys, key);
    wasm_v128_store(mass, m);
    for (; hits; hits &= hits - 1) {
      uint32_t lane = (uint32_t)__builtin_ctz(hits);
      bins[keys[lane] >> shift & digit] += mass[lane];
    }
  }
}

// The elements with a mass over `cut` in descending order, as bits and index; more than SHORT when there are more.
static uint32_t short_list(const uint32_t *row, uint32_t n, int32_t cut, uint64_t *list) {
  uint32_t count = 0;
  v128_t bound = wasm_i32x4_splat(cut);
  for (uint32_t i = 0; i < n; i += 4) {
    v128_t hit = wasm_i32x4_gt(masses(wasm_v128_load(row + i)), bound);
    if (n - i < 4) hit = wasm_v128_and(hit, first_lanes(n - i));
    uint32_t hits = wasm_i32x4_bitmask(hit);
    for (; hits; hits &= hits - 1) {
      if (count == SHORT) return SHORT + 1;
      uint32_t at = i + (uint32_t)__builtin_ctz(hits);
      list[count++] = key_and_index(row[at], at);
    }
  }
  sort_u64_desc(list, count);
  return count;
}

// Index of the element with key `key` at which the masses of such elements reach `mass`.
static uint32_t last_equal(const uint32_t *order, const uint32_t *row, uint32_t n, uint32_t key, uint64_t mass) {
  v128_t want = wasm_i32x4_splat((int32_t)key);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < n; i += 4) {
    uint32_t hits = wasm_i32x4_bitmask(wasm_i32x4_eq(f32_keys(wasm_v128_load(order + i)), want));
    for (; hits; hits &= hits - 1) {
      uint32_t at = i + (uint32_t)__builtin_ctz(hits);
      if (at < n && (sum += mass_of(row[at])) >= mass) return at;
    }
  }
  return n - 1;
}

static void mass_row(const uint32_t *order, const uint32_t *row, uint32_t n, uint32_t target, uint64_t *bins, uint32_t *out) {
  static const uint8_t shifts[] = {21, 10, 0};
  uint64_t total = total_mass(order, row, n), before = 0;
  out[0] = target ? 1 : 0xffffffffu, out[1] = n - 1;
  if (total < target || !target) return;  // all numbers, or none
  int32_t cut = 0;
  if (order == row) {
    // Elements of at most this mass have a sum of at most total - target: the bound is passed before them.
    cut = (int32_t)((total - target) / n);
    uint32_t few = short_list(row, n, cut, bins);
    if (few <= SHORT) {
      uint32_t i = 0;
      while (before += mass_of((uint32_t)(bins[i] >> 32)), before < target) i++;
      out[0] = (uint32_t)(bins[i] >> 32) | 0x80000000u, out[1] = ~(uint32_t)bins[i];
      return;
    }
  }
  uint32_t prefix = 0, known = 0;
  for (uint32_t level = 0; level < 3; level++) {
    uint32_t shift = shifts[level], digit = (level < 2 ? DIGITS : DIGITS / 2) - 1;
    __builtin_memset(bins, 0, 8 * DIGITS);
    add_masses(order, row, n, cut, prefix, known, shift, digit, bins);
    uint32_t bin = digit;
    while (before + bins[bin] < target) before += bins[bin--];
    prefix |= bin << shift, known |= digit << shift;
  }
  out[0] = prefix, out[1] = last_equal(order, row, n, prefix, target - before);
}

// The same of the mass, walked by an order: a: the order, b: probabilities; d holds p.
void vm_pivot_mass(const VmArgs *x) {
  const uint32_t *t = words(x->c), n = t[1];
  uint32_t *out = (uint32_t *)(void *)x->d, target = mass_of(out[0]);
  uint64_t *bins = (uint64_t *)(void *)(out + (int32_t)t[2]);
  for (uint32_t r = 0; r < t[0]; r++) mass_row(words(x->a) + r * n, words(x->b) + r * n, n, target, bins, out + 2 * r);
}

// The k greatest of a row (k <= LIST) as key_and_index, greatest first. work: 4,096 words, and 2 k behind them.
static const uint64_t *top_of_row(const uint32_t *row, uint32_t n, uint32_t k, KeyKind kind, uint32_t *work) {
  uint32_t low = rank_bound(row, n, kind, k, work), greater;
  uint64_t *list = (uint64_t *)(void *)(work + DIGITS);
  uint32_t count = low || n <= SHORT ? gather_from(row, n, kind, low, list) : LIST + 1;
  if (count <= LIST) {
    sort_u64_desc(list, count);
    return list;
  }
  uint32_t key = rank_key(row, n, kind, low, k, &greater, work), above = 0, equal = greater;
  list = (uint64_t *)(void *)(work + DIGITS + GROUPS);
#define TAKE(own, index)                                                         \
  do {                                                                           \
    if ((own) > key) list[above++] = key_and_index(own, index);                  \
    else if (equal < k) list[equal++] = key_and_index(own, index);               \
  } while (0)
  EACH_FROM(row, n, kind, key, TAKE);
#undef TAKE
  sort_u64_desc(list, greater);  // the equal ones behind them are in index order already
  return list;
}

// d: values; table: rows, n, k (at most 1,024), key kind (3 words), indices and work as words from d.
void vm_top_k(const VmArgs *x) {
  const uint32_t *t = words(x->c), n = t[1], k = t[2];
  uint32_t *values = (uint32_t *)(void *)x->d, *indices = values + (int32_t)t[6];
  for (uint32_t r = 0; r < t[0]; r++, values += k, indices += k) {
    const uint32_t *row = words(x->a) + r * n;
    const uint64_t *best = top_of_row(row, n, k, key_kind(t + 3), (uint32_t *)(void *)x->d + (int32_t)t[7]);
    for (uint32_t i = 0; i < k; i++) {
      uint32_t at = ~(uint32_t)best[i];
      indices[i] = at, values[i] = row[at];
    }
  }
}
