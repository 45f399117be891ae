// Vector math for v128 of four f32: exp, log, sin, cos, tanh; each lane within 2 ulp, no FMA, same bits on every host.
//
// Common rules: NaN in gives NaN out; no lane depends on another; results below 2^-126 are flushed to a zero of the
// right sign (exp); denormal arguments are exact arguments. Polynomial coefficients are minimax fits made for this file.
#ifndef PIE_SIMD_MATH_H
#define PIE_SIMD_MATH_H

#include <stdint.h>
#include <wasm_simd128.h>

static inline v128_t simd_splat(float x) { return wasm_f32x4_splat(x); }

// a * b + c, two roundings (wasm has no FMA outside relaxed SIMD).
static inline v128_t simd_madd(v128_t a, v128_t b, v128_t c) { return wasm_f32x4_add(wasm_f32x4_mul(a, b), c); }

// x within [low, high]; NaN passes through. (pmin and pmax are one instruction where min and max take several.)
static inline v128_t simd_clamp(v128_t x, v128_t low, v128_t high) { return wasm_f32x4_pmax(wasm_f32x4_pmin(x, high), low); }

// e^x: 0 below -87.33654, +inf above 88.72283.
static inline v128_t simd_exp(v128_t x) {
  v128_t t = simd_clamp(x, simd_splat(-88.0f), simd_splat(89.0f));
  v128_t n = wasm_f32x4_nearest(wasm_f32x4_mul(t, simd_splat(0x1.715476p+0f)));
  v128_t r = wasm_f32x4_sub(t, wasm_f32x4_mul(n, simd_splat(0.693359375f)));  // 9-bit constant: n * c is exact
  r = wasm_f32x4_add(r, wasm_f32x4_mul(n, simd_splat(0x1.bd0106p-13f)));
  v128_t p = simd_splat(0x1.a1c5d4p-13f);
  p = simd_madd(p, r, simd_splat(0x1.6da608p-10f));
  p = simd_madd(p, r, simd_splat(0x1.111074p-7f));
  p = simd_madd(p, r, simd_splat(0x1.55546ep-5f));
  p = simd_madd(p, r, simd_splat(0x1.555556p-3f));
  p = simd_madd(p, r, simd_splat(0.5f));
  p = wasm_f32x4_add(simd_madd(wasm_f32x4_mul(r, r), p, r), simd_splat(1.0f));
  // 2^n in two factors, so that n = 128 neither overflows early nor needs a branch.
  v128_t i = wasm_i32x4_trunc_sat_f32x4(n), a = wasm_i32x4_shr(i, 1), b = wasm_i32x4_sub(i, a), bias = wasm_i32x4_splat(127);
  p = wasm_f32x4_mul(p, wasm_i32x4_shl(wasm_i32x4_add(a, bias), 23));
  p = wasm_f32x4_mul(p, wasm_i32x4_shl(wasm_i32x4_add(b, bias), 23));
  return wasm_v128_andnot(p, wasm_f32x4_lt(x, simd_splat(-0x1.5d589ep+6f)));
}

// ln(m * 2^e) for m in [sqrt(1/2), sqrt(2)).
static inline v128_t simd_log_of(v128_t m, v128_t e) {
  v128_t n = wasm_f32x4_convert_i32x4(e), f = wasm_f32x4_sub(m, simd_splat(1.0f)), z = wasm_f32x4_mul(f, f);
  v128_t p = simd_splat(0x1.14573ep-4f);
  p = simd_madd(p, f, simd_splat(-0x1.de3bf8p-4f));
  p = simd_madd(p, f, simd_splat(0x1.e6f08cp-4f));
  p = simd_madd(p, f, simd_splat(-0x1.fc220ep-4f));
  p = simd_madd(p, f, simd_splat(0x1.233766p-3f));
  p = simd_madd(p, f, simd_splat(-0x1.555c4ep-3f));
  p = simd_madd(p, f, simd_splat(0x1.99a4b6p-3f));
  p = simd_madd(p, f, simd_splat(-0x1.000006p-2f));
  p = simd_madd(p, f, simd_splat(0x1.555548p-2f));
  p = wasm_f32x4_mul(wasm_f32x4_mul(p, f), z);
  p = wasm_f32x4_sub(p, wasm_f32x4_mul(n, simd_splat(0x1.bd0106p-13f)));  // ln 2 = 0.693359375 - 0x1.bd0106p-13
  p = wasm_f32x4_sub(p, wasm_f32x4_mul(z, simd_splat(0.5f)));
  return wasm_f32x4_add(wasm_f32x4_add(f, p), wasm_f32x4_mul(n, simd_splat(0.693359375f)));
}

// Natural logarithm of a normal number over 0.
static inline v128_t simd_log_normal(v128_t s) {
  // s = 2^e * m with m in [sqrt(1/2), sqrt(2)): offsetting the bits by those of sqrt(1/2) puts the cut there.
  v128_t e = wasm_i32x4_shr(wasm_i32x4_sub(s, wasm_i32x4_splat(0x3f3504f3)), 23);
  v128_t m = wasm_i32x4_sub(s, wasm_i32x4_shl(e, 23));
  return simd_log_of(m, e);
}

// Natural logarithm: -inf at 0, NaN below 0, +inf at +inf; denormal arguments are scaled, not flushed.
static inline v128_t simd_log(v128_t x) {
  v128_t tiny = wasm_f32x4_lt(x, simd_splat(0x1p-126f));
  v128_t s = wasm_v128_bitselect(wasm_f32x4_mul(x, simd_splat(0x1p23f)), x, tiny);
  // s = 2^e * m with m in [sqrt(1/2), sqrt(2)): offsetting the bits by those of sqrt(1/2) puts the cut there.
  v128_t off = wasm_i32x4_sub(s, wasm_i32x4_splat(0x3f3504f3));
  v128_t e = wasm_i32x4_shr(off, 23);
  v128_t m = wasm_i32x4_sub(s, wasm_i32x4_shl(e, 23));
  e = wasm_i32x4_sub(e, wasm_v128_and(tiny, wasm_i32x4_splat(23)));
  v128_t y = simd_log_of(m, e);
  v128_t inf = simd_splat(__builtin_inff()), zero = simd_splat(0.0f);
  y = wasm_v128_bitselect(y, x, wasm_f32x4_lt(x, inf));  // +inf and NaN return themselves
  y = wasm_v128_bitselect(simd_splat(__builtin_nanf("")), y, wasm_f32x4_lt(x, zero));
  return wasm_v128_bitselect(wasm_f32x4_neg(inf), y, wasm_f32x4_eq(x, zero));
}

// One half (two lanes, as f64) of the reduction by pi/2: remainder in [-pi/4, pi/4]; pi/2 in two parts, the first of 33 bits.
static inline v128_t simd_reduce_f64(v128_t x, v128_t *quadrant) {
  v128_t n = wasm_f64x2_nearest(wasm_f64x2_mul(x, wasm_f64x2_splat(0.63661977236758134308)));
  v128_t r = wasm_f64x2_sub(x, wasm_f64x2_mul(n, wasm_f64x2_splat(0x1.921fb544p+0)));
  *quadrant = wasm_i32x4_trunc_sat_f64x2_zero(n);
  r = wasm_f64x2_sub(r, wasm_f64x2_mul(n, wasm_f64x2_splat(0x1.0b4611a626331p-34)));
  // A huge angle has lost its remainder; the polynomials must still stay in [-1, 1]. NaN passes through.
  return wasm_f64x2_pmax(wasm_f64x2_pmin(r, wasm_f64x2_splat(0.7854)), wasm_f64x2_splat(-0.7854));
}

// sin and cos (f32) of four f64 angles. |x| <= 1.6e6: within 2 ulp (n * pi/2 is exact there); beyond, the reduction loses
// bits one by one and from 2^31 quadrants on the value is a bounded but arbitrary number. inf gives NaN. sin(-0) is +0.
static inline void simd_sincos_f64(v128_t low, v128_t high, v128_t *sin_out, v128_t *cos_out) {
  v128_t q0, q1, r0 = simd_reduce_f64(low, &q0), r1 = simd_reduce_f64(high, &q1);
  v128_t r = wasm_i32x4_shuffle(wasm_f32x4_demote_f64x2_zero(r0), wasm_f32x4_demote_f64x2_zero(r1), 0, 1, 4, 5);
  v128_t q = wasm_i32x4_shuffle(q0, q1, 0, 1, 4, 5);
  v128_t z = wasm_f32x4_mul(r, r);
  v128_t s = simd_madd(simd_splat(0x1.6cbecep-19f), z, simd_splat(-0x1.a00f32p-13f));
  s = simd_madd(s, z, simd_splat(0x1.111108p-7f));
  s = simd_madd(s, z, simd_splat(-0x1.555556p-3f));
  s = simd_madd(wasm_f32x4_mul(s, z), r, r);
  v128_t c = simd_madd(simd_splat(0x1.99e338p-16f), z, simd_splat(-0x1.6c0c22p-10f));
  c = simd_madd(c, z, simd_splat(0x1.55554ap-5f));
  c = wasm_f32x4_add(simd_madd(wasm_f32x4_mul(z, z), c, wasm_f32x4_mul(z, simd_splat(-0.5f))), simd_splat(1.0f));
  v128_t odd = wasm_i32x4_ne(wasm_v128_and(q, wasm_i32x4_splat(1)), wasm_i32x4_splat(0));
  v128_t neg_s = wasm_i32x4_shl(wasm_v128_and(q, wasm_i32x4_splat(2)), 30);
  v128_t neg_c = wasm_i32x4_shl(wasm_v128_and(wasm_i32x4_add(q, wasm_i32x4_splat(1)), wasm_i32x4_splat(2)), 30);
  *sin_out = wasm_v128_xor(wasm_v128_bitselect(c, s, odd), neg_s);
  *cos_out = wasm_v128_xor(wasm_v128_bitselect(s, c, odd), neg_c);
}

// The same of f32 angles.
static inline void simd_sincos(v128_t x, v128_t *sin_out, v128_t *cos_out) {
  v128_t high = wasm_i32x4_shuffle(x, x, 2, 3, 2, 3);
  simd_sincos_f64(wasm_f64x2_promote_low_f32x4(x), wasm_f64x2_promote_low_f32x4(high), sin_out, cos_out);
}

static inline v128_t simd_sin(v128_t x) {
  v128_t s, c;
  simd_sincos(x, &s, &c);
  return s;
}

static inline v128_t simd_cos(v128_t x) {
  v128_t s, c;
  simd_sincos(x, &s, &c);
  return c;
}

// tanh: odd polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above; the sign (of zero too) is the argument's.
static inline v128_t simd_tanh(v128_t x) {
  v128_t a = wasm_f32x4_abs(x), z = wasm_f32x4_mul(x, x);
  v128_t p = simd_madd(simd_splat(-0x1.75214p-8f), z, simd_splat(0x1.52022ep-6f));
  p = simd_madd(p, z, simd_splat(-0x1.b837fp-5f));
  p = simd_madd(p, z, simd_splat(0x1.11071p-3f));
  p = simd_madd(p, z, simd_splat(-0x1.555532p-2f));
  v128_t small = simd_madd(wasm_f32x4_mul(p, z), x, x);
  v128_t big = wasm_f32x4_div(simd_splat(2.0f), wasm_f32x4_add(simd_exp(wasm_f32x4_add(a, a)), simd_splat(1.0f)));
  big = wasm_f32x4_sub(simd_splat(1.0f), big);
  v128_t y = wasm_v128_bitselect(small, big, wasm_f32x4_lt(a, simd_splat(0.625f)));
  return wasm_v128_bitselect(x, y, wasm_v128_or(wasm_i32x4_splat((int)0x80000000), wasm_f32x4_ne(x, x)));
}

#endif
