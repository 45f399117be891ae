"""WGSL helper functions that the op table calls, and the binding declarations of generated kernels.

WGSL promises nothing about NaN and infinities (compilers may assume finite maths), so comparisons work on integer keys and special values
are assembled as bits at run time. exp, log, sin, cos and tanh are polynomials of our own: the built-in ones are too coarse (ln near 1
decides Gumbel samples). Compilers may also merge `n * a + (n * b + c)` into `n * (a + b) + c` (Mesa does), which destroys a range
reduction in two parts: a clamp that never bites stands between the parts.
"""

from __future__ import annotations

import re

from pie_core.eta import rng


def _pair(value: int) -> str:
    return f"vec2<u32>({value & 0xFFFFFFFF:#010x}u, {value >> 32:#010x}u)"


def _mix() -> str:
    first, second, third = rng.SHIFTS
    return f"""fn u64_mix(x0: vec2<u32>) -> vec2<u32> {{
  var x = u64_mul(u64_xorshift(x0, {first}u), {_pair(rng.MULS[0])});
  x = u64_mul(u64_xorshift(x, {second}u), {_pair(rng.MULS[1])});
  return u64_xorshift(x, {third}u);
}}"""


HELPERS: dict[str, str] = {
    "f_key": """fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}""",
    "f_down_key": """fn f_down_key(x: f32) -> u32 {  // ordered the other way round; NaN is 0 here too
  let k = f_key(x);
  return select(~k, 0u, k == 0u);
}""",
    "f_unkey": """fn f_unkey(k: u32) -> f32 {  // the number of an f_key
  return bitcast<f32>(select(~k, k ^ 0x80000000u, k >= 0x80000000u));
}""",
    "f_nan": """fn f_nan(x: f32) -> u32 {  // 1 for NaN
  return select(0u, 1u, (bitcast<u32>(x) << 1u) > 0xff000000u);
}""",
    "f_gt": "fn f_gt(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) > k; }",
    "f_ge": "fn f_ge(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) >= k; }",
    "f_eq": "fn f_eq(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) == k; }",
    "f_ne": "fn f_ne(a: f32, b: f32) -> bool { let k = f_key(b); return k == 0u || f_key(a) != k; }",
    "f_lt": "fn f_lt(a: f32, b: f32) -> bool { let k = f_key(a); return k != 0u && k < f_key(b); }",
    "f_le": "fn f_le(a: f32, b: f32) -> bool { let k = f_key(a); return k != 0u && k <= f_key(b); }",
    "f_max": """fn f_max(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_key(a) > f_key(b)));
}""",
    "f_min": """fn f_min(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_down_key(a) > f_down_key(b)));
}""",
    "mask_apply": """fn mask_apply(x: f32, word: u32, i: u32) -> f32 {  // x where bit i % 32 is set, else -inf
  return bitcast<f32>(select(0xff800000u, bitcast<u32>(x), ((word >> (i & 31u)) & 1u) == 1u));
}""",
    "f_sign": """fn f_sign(x: f32) -> f32 {
  let k = f_key(x);
  return select(select(0.0, 1.0, k > 0x80000000u), -1.0, k < 0x80000000u && k != 0u);
}""",
    "f_to_i32": """fn f_to_i32(x: f32) -> i32 {
  let k = f_key(x);
  if (k == 0u) { return 0i; }
  if (k >= 0xcf000000u) { return 2147483647i; }  // 2^31 and up
  if (k <= 0x30ffffffu) { return -2147483647i - 1i; }  // -2^31 and down
  return i32(x);
}""",
    "f_to_u32": """fn f_to_u32(x: f32) -> u32 {
  let k = f_key(x);
  if (k <= 0x80000000u) { return 0u; }
  if (k >= 0xcf800000u) { return 0xffffffffu; }  // 2^32 and up
  return u32(x);
}""",
    # f32(x) may round either way; two exact halves and one addition round to nearest.
    "f_from_i32": """fn f_from_i32(x: i32) -> f32 {  // to nearest: of two halves, both exact
  return f32(x >> 16u) * 65536.0 + f32(x & 0xffffi);
}""",
    "f_from_u32": """fn f_from_u32(x: u32) -> f32 {  // to nearest: of two halves, both exact
  return f32(x >> 16u) * 65536.0 + f32(x & 0xffffu);
}""",
    "f_rem": """fn f_rem(a: f32, b: f32) -> f32 {  // exact: long division of the mantissas, 20 bits of the quotient a turn
  let x = bitcast<u32>(a) & 0x7fffffffu;
  let y = bitcast<u32>(b) & 0x7fffffffu;
  if (x >= 0x7f800000u || y > 0x7f800000u || y == 0u) { return bitcast<f32>(x | 0x7fc00000u); }  // NaN
  if (x < y) { return a; }
  let e = max(y >> 23u, 1u);
  let m = (y & 0x007fffffu) | select(0u, 0x00800000u, y >= 0x00800000u);
  var r = ((x & 0x007fffffu) | select(0u, 0x00800000u, x >= 0x00800000u)) % m;
  var left = max(x >> 23u, 1u) - e;
  for (var turn = 0u; turn < 13u && left > 0u; turn += 1u) {
    let bits = min(left, 20u);
    let q = u32(f32(r) / f32(m) * f32(1u << bits));  // off by one at most
    r = (r << bits) - q * m;  // modulo 2^32, which is enough: it lies between -m and 2 m
    r = select(r, r + m, r >= 0x80000000u);
    r = select(r, r - m, r >= m);
    left -= bits;
  }
  let up = min(countLeadingZeros(r) - 8u, e - 1u);
  let found = select(((e - up - 1u) << 23u) + (r << up), 0u, r == 0u);
  return bitcast<f32>(found | (bitcast<u32>(a) & 0x80000000u));
}""",
    "i_div": """fn i_div(a: i32, b: i32) -> i32 {
  if (b == 0i) { return 0i; }
  if (b == -1i) { return 0i - a; }
  return a / b;
}""",
    "i_rem": """fn i_rem(a: i32, b: i32) -> i32 {
  if (b == 0i || b == -1i) { return 0i; }
  return a - (a / b) * b;
}""",
    "u_div": """fn u_div(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a / b;
}""",
    "u_rem": """fn u_rem(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a % b;
}""",
    "f_pow2": """fn f_pow2(n: i32) -> f32 {  // n in [-126, 127]
  return bitcast<f32>(u32(n + 127i) << 23u);
}""",
    "f_exp": """fn f_exp(x: f32) -> f32 {  // e^x; 0 below -87.336, +inf above 88.722
  let k = f_key(x);
  let t = clamp(x, -87.5, 89.0);
  let n = floor(fma(t, 1.44269504, 0.5));
  let r = fma(n, 2.12194440e-4, clamp(fma(n, -0.693359375, t), -1.0, 1.0));
  var p = fma(r, 1.9875691500e-4, 1.3981999507e-3);
  p = fma(p, r, 8.3334519073e-3);
  p = fma(p, r, 4.1665795894e-2);
  p = fma(p, r, 1.6666665459e-1);
  p = fma(p, r, 5.0000001201e-1);
  p = fma(p, r * r, r) + 1.0;
  let i = i32(n);
  let h = i / 2i;
  let y = bitcast<u32>(p * f_pow2(h) * f_pow2(i - h));
  if (k == 0u) { return x; }
  if (k > 0xc2b17217u) { return bitcast<f32>(select(0x7f800000u, y, k == 0u)); }  // 88.72283
  if (k < 0x3d5153b0u) { return 0.0; }  // -87.336
  return bitcast<f32>(y);
}""",
    "f_log": """fn f_log(x: f32) -> f32 {  // ln x; relative error stays small around 1
  let b = bitcast<u32>(x);
  let small = b < 0x00800000u;
  let m = select(b, bitcast<u32>(f32(b)), small);  // a subnormal is its bits times 2^-149
  var e = i32(m >> 23u) - 127i - select(0i, 149i, small);
  var f = bitcast<f32>((m & 0x007fffffu) | 0x3f800000u);
  if (f > 1.41421356) { f = 0.5 * f; e = e + 1i; }
  f = f - 1.0;
  let z = f * f;
  var p = fma(f, 7.0376836292e-2, -1.1514610310e-1);
  p = fma(p, f, 1.1676998740e-1);
  p = fma(p, f, -1.2420140846e-1);
  p = fma(p, f, 1.4249322787e-1);
  p = fma(p, f, -1.6668057665e-1);
  p = fma(p, f, 2.0000714765e-1);
  p = fma(p, f, -2.4999993993e-1);
  p = fma(p, f, 3.3333331174e-1);
  let n = f32(e);
  let y = fma(-0.5, z, fma(n, -2.12194440e-4, p * f * z));
  var r = bitcast<u32>(fma(n, 0.693359375, clamp(f + y, -1.0, 1.0)));
  r = select(r, b, b >= 0x7f800000u);  // +inf and NaN stay
  r = select(r, 0x7fc00000u, b > 0x80000000u && b <= 0xff800000u);
  r = select(r, 0xff800000u, (b << 1u) == 0u);
  return bitcast<f32>(r);
}""",
    "f_octant": """fn f_octant(x: f32) -> u32 {  // even octant of |x| <= 8192
  let j = u32(min(abs(x), 100000.0) * 1.27323954);
  return j + (j & 1u);
}""",
    "f_reduced": """fn f_reduced(x: f32, j: u32) -> f32 {  // |x| - j pi/4
  let y = f32(j);
  let r = clamp(fma(y, -0.78515625, abs(x)), -16.0, 16.0);
  return fma(y, -3.77489497744594108e-8, clamp(fma(y, -2.4187564849853515625e-4, r), -2.0, 2.0));
}""",
    "f_sin_poly": """fn f_sin_poly(r: f32) -> f32 {
  let z = r * r;
  return fma(fma(fma(-1.9515295891e-4, z, 8.3321608736e-3), z, -1.6666654611e-1) * z, r, r);
}""",
    "f_cos_poly": """fn f_cos_poly(r: f32) -> f32 {
  let z = r * r;
  return fma(fma(fma(2.443315711809948e-5, z, -1.388731625493765e-3), z, 4.166664568298827e-2) * z, z, fma(-0.5, z, 1.0));
}""",
    "f_trig": """fn f_trig(x: f32, shift: u32) -> f32 {  // sin(x + shift pi/2); NaN for NaN and infinities
  let b = bitcast<u32>(x);
  let j = f_octant(x);
  let r = f_reduced(x, j);
  let q = (j >> 1u) + shift;
  let y = select(f_sin_poly(r), f_cos_poly(r), (q & 1u) == 1u);
  let flip = (q & 2u) << 30u;
  let odd = select(b & 0x80000000u, 0u, shift == 1u);
  return bitcast<f32>(select(bitcast<u32>(y) ^ flip ^ odd, 0x7fc00000u, (b & 0x7f800000u) == 0x7f800000u));
}""",
    "f_sin": "fn f_sin(x: f32) -> f32 { return f_trig(x, 0u); }",
    "f_cos": "fn f_cos(x: f32) -> f32 { return f_trig(x, 1u); }",
    "f_tanh": """fn f_tanh(x: f32) -> f32 {
  let b = bitcast<u32>(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) { return x; }
  let a = min(abs(x), 10.0);
  let z = a * a;
  var p = fma(z, -5.70498872745e-3, 2.06390887954e-2);
  p = fma(p, z, -5.37397155531e-2);
  p = fma(p, z, 1.33314422036e-1);
  p = fma(p, z, -3.33332819422e-1);
  let y = select(1.0 - 2.0 / (f_exp(2.0 * a) + 1.0), fma(p * z, a, a), a < 0.625);
  return bitcast<f32>(bitcast<u32>(y) | (b & 0x80000000u));
}""",
    "u64_high": """fn u64_high(a: u32, b: u32) -> u32 {  // high word of a * b
  let a0 = a & 0xffffu;
  let a1 = a >> 16u;
  let b0 = b & 0xffffu;
  let b1 = b >> 16u;
  let low = a0 * b0;
  let mid = a1 * b0 + (low >> 16u);
  let cross = a0 * b1 + (mid & 0xffffu);
  return a1 * b1 + (mid >> 16u) + (cross >> 16u);
}""",
    "u64_mul": """fn u64_mul(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {  // (low, high)
  return vec2<u32>(a.x * b.x, u64_high(a.x, b.x) + a.x * b.y + a.y * b.x);
}""",
    "u64_add": """fn u64_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = a.x + b.x;
  return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}""",
    "u64_xorshift": """fn u64_xorshift(x: vec2<u32>, s: u32) -> vec2<u32> {  // x ^ (x >> s), 0 < s < 64
  if (s < 32u) { return vec2<u32>(x.x ^ ((x.x >> s) | (x.y << (32u - s))), x.y ^ (x.y >> s)); }
  if (s == 32u) { return vec2<u32>(x.x ^ x.y, x.y); }
  return vec2<u32>(x.x ^ (x.y >> (s - 32u)), x.y);
}""",
    "u64_mix": _mix(),
    "rng_seed": "fn rng_seed(key: u32, counter: u32) -> vec2<u32> { return u64_mix(vec2<u32>(counter, key)); }",
    "rng_bits": f"""fn rng_bits(seed: vec2<u32>, i: u32) -> u32 {{  // 24 random bits for element i
  let step = u64_mul(vec2<u32>(i + 1u, select(0u, 1u, i == 0xffffffffu)), {_pair(rng.GAMMA)});
  return u64_mix(u64_add(seed, step)).y >> {rng.BITS_SHIFT - 32}u;
}}""",
    "rng_uniform": f"""fn rng_uniform(seed: vec2<u32>, i: u32) -> f32 {{  // between 0 and 1, neither of them
  return min((f32(rng_bits(seed, i)) + 0.5) * {rng.UNIFORM_SCALE!r}, {rng.UNIFORM_MAX!r});
}}""",
    "rng_gumbel": """fn rng_gumbel(seed: vec2<u32>, i: u32) -> f32 {
  return -f_log(-f_log(rng_uniform(seed, i)));
}""",
    "rng_normal": f"""fn rng_normal(seed: vec2<u32>, i: u32) -> f32 {{  // Box-Muller
  return sqrt(-2.0 * f_log(rng_uniform(seed, 2u * i))) * f_cos({rng.TWO_PI!r} * rng_uniform(seed, 2u * i + 1u));
}}""",
}

LOOPS = {"f_rem": 13}  # helpers with a loop, and its most iterations
_CALL = re.compile(r"\b([a-z]\w*)\(")


def iterations_of(code: str) -> int:
    """Most loop iterations of the helpers that `code` calls itself."""
    return sum(LOOPS.get(name, 0) for name in _CALL.findall(code))


def helpers_for(body: str) -> str:
    """The helper functions that `body` calls, directly or through others, in the table's order."""
    needed: set[str] = set()
    todo = [body]
    while todo:
        for name in _CALL.findall(todo.pop()):
            if name in HELPERS and name not in needed:
                needed.add(name)
                todo.append(HELPERS[name])
    return "\n".join(text for name, text in HELPERS.items() if name in needed)
