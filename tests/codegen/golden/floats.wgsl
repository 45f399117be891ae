// One workgroup of 256 a lane; at most 14 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_down_key(x: f32) -> u32 {  // ordered the other way round; NaN is 0 here too
  let k = f_key(x);
  return select(~k, 0u, k == 0u);
}
fn f_gt(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) > k; }
fn f_ge(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) >= k; }
fn f_eq(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) == k; }
fn f_ne(a: f32, b: f32) -> bool { let k = f_key(b); return k == 0u || f_key(a) != k; }
fn f_lt(a: f32, b: f32) -> bool { let k = f_key(a); return k != 0u && k < f_key(b); }
fn f_le(a: f32, b: f32) -> bool { let k = f_key(a); return k != 0u && k <= f_key(b); }
fn f_max(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_key(a) > f_key(b)));
}
fn f_min(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_down_key(a) > f_down_key(b)));
}
fn f_sign(x: f32) -> f32 {
  let k = f_key(x);
  return select(select(0.0, 1.0, k > 0x80000000u), -1.0, k < 0x80000000u && k != 0u);
}
fn f_to_i32(x: f32) -> i32 {
  let k = f_key(x);
  if (k == 0u) { return 0i; }
  if (k >= 0xcf000000u) { return 2147483647i; }  // 2^31 and up
  if (k <= 0x30ffffffu) { return -2147483647i - 1i; }  // -2^31 and down
  return i32(x);
}
fn f_to_u32(x: f32) -> u32 {
  let k = f_key(x);
  if (k <= 0x80000000u) { return 0u; }
  if (k >= 0xcf800000u) { return 0xffffffffu; }  // 2^32 and up
  return u32(x);
}
fn f_rem(a: f32, b: f32) -> f32 {  // exact: long division of the mantissas, 20 bits of the quotient a turn
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
}
fn f_pow2(n: i32) -> f32 {  // n in [-126, 127]
  return bitcast<f32>(u32(n + 127i) << 23u);
}
fn f_exp(x: f32) -> f32 {  // e^x; 0 below -87.336, +inf above 88.722
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
}
fn f_log(x: f32) -> f32 {  // ln x; relative error stays small around 1
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
}
fn f_octant(x: f32) -> u32 {  // even octant of |x| <= 8192
  let j = u32(min(abs(x), 100000.0) * 1.27323954);
  return j + (j & 1u);
}
fn f_reduced(x: f32, j: u32) -> f32 {  // |x| - j pi/4
  let y = f32(j);
  let r = clamp(fma(y, -0.78515625, abs(x)), -16.0, 16.0);
  return fma(y, -3.77489497744594108e-8, clamp(fma(y, -2.4187564849853515625e-4, r), -2.0, 2.0));
}
fn f_sin_poly(r: f32) -> f32 {
  let z = r * r;
  return fma(fma(fma(-1.9515295891e-4, z, 8.3321608736e-3), z, -1.6666654611e-1) * z, r, r);
}
fn f_cos_poly(r: f32) -> f32 {
  let z = r * r;
  return fma(fma(fma(2.443315711809948e-5, z, -1.388731625493765e-3), z, 4.166664568298827e-2) * z, z, fma(-0.5, z, 1.0));
}
fn f_trig(x: f32, shift: u32) -> f32 {  // sin(x + shift pi/2); NaN for NaN and infinities
  let b = bitcast<u32>(x);
  let j = f_octant(x);
  let r = f_reduced(x, j);
  let q = (j >> 1u) + shift;
  let y = select(f_sin_poly(r), f_cos_poly(r), (q & 1u) == 1u);
  let flip = (q & 2u) << 30u;
  let odd = select(b & 0x80000000u, 0u, shift == 1u);
  return bitcast<f32>(select(bitcast<u32>(y) ^ flip ^ odd, 0x7fc00000u, (b & 0x7f800000u) == 0x7f800000u));
}
fn f_sin(x: f32) -> f32 { return f_trig(x, 0u); }
fn f_cos(x: f32) -> f32 { return f_trig(x, 1u); }
fn f_tanh(x: f32) -> f32 {
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
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 36u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_out_1 = lanes[lane + 9u];
  let lane_out_2 = lanes[lane + 10u];
  let lane_out_3 = lanes[lane + 11u];
  let lane_out_4 = lanes[lane + 12u];
  let lane_out_5 = lanes[lane + 13u];
  let lane_out_6 = lanes[lane + 14u];
  let lane_out_7 = lanes[lane + 15u];
  let lane_out_8 = lanes[lane + 16u];
  let lane_out_9 = lanes[lane + 17u];
  let lane_out_10 = lanes[lane + 18u];
  let lane_out_11 = lanes[lane + 19u];
  let lane_out_12 = lanes[lane + 20u];
  let lane_out_13 = lanes[lane + 21u];
  let lane_out_14 = lanes[lane + 22u];
  let lane_out_15 = lanes[lane + 23u];
  let lane_out_16 = lanes[lane + 24u];
  let lane_out_17 = lanes[lane + 25u];
  let lane_out_18 = lanes[lane + 26u];
  let lane_out_19 = lanes[lane + 27u];
  let lane_out_20 = lanes[lane + 28u];
  let lane_out_21 = lanes[lane + 29u];
  let lane_out_22 = lanes[lane + 30u];
  let lane_out_23 = lanes[lane + 31u];
  let lane_out_24 = lanes[lane + 32u];
  let lane_out_25 = lanes[lane + 33u];
  let lane_out_26 = lanes[lane + 34u];
  let lane_out_27 = lanes[lane + 35u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 100 elements
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[100]
    let take_1 = bitcast<f32>(arena[lane_take_1 + i]);  // %1 take(chan=1) f32[100]
    let exp_2 = f_exp(take_0);  // %2 exp(%0) f32[100]
    let log_3 = f_log(take_0);  // %3 log(%0) f32[100]
    let recip_4 = 1.0 / take_0;  // %4 recip(%0) f32[100]
    let sin_5 = f_sin(take_0);  // %5 sin(%0) f32[100]
    let cos_6 = f_cos(take_0);  // %6 cos(%0) f32[100]
    let sqrt_7 = sqrt(take_0);  // %7 sqrt(%0) f32[100]
    let rsqrt_8 = inverseSqrt(take_0);  // %8 rsqrt(%0) f32[100]
    let tanh_9 = f_tanh(take_0);  // %9 tanh(%0) f32[100]
    let neg_10 = bitcast<f32>(bitcast<u32>(take_0) ^ 0x80000000u);  // %10 neg(%0) f32[100]
    let abs_11 = bitcast<f32>(bitcast<u32>(take_0) & 0x7fffffffu);  // %11 abs(%0) f32[100]
    let sign_12 = f_sign(take_0);  // %12 sign(%0) f32[100]
    let add_13 = take_0 + take_1;  // %13 add(%0, %1) f32[100]
    let sub_14 = take_0 - take_1;  // %14 sub(%0, %1) f32[100]
    let mul_15 = take_0 * take_1;  // %15 mul(%0, %1) f32[100]
    let div_16 = take_0 / take_1;  // %16 div(%0, %1) f32[100]
    let rem_17 = f_rem(take_0, take_1);  // %17 rem(%0, %1) f32[100]; at most 13 iterations
    let max_18 = f_max(take_0, take_1);  // %18 max(%0, %1) f32[100]
    let min_19 = f_min(take_0, take_1);  // %19 min(%0, %1) f32[100]
    let gt_20 = f_gt(take_0, take_1);  // %20 gt(%0, %1) bool[100]
    let ge_21 = f_ge(take_0, take_1);  // %21 ge(%0, %1) bool[100]
    let eq_22 = f_eq(take_0, take_1);  // %22 eq(%0, %1) bool[100]
    let ne_23 = f_ne(take_0, take_1);  // %23 ne(%0, %1) bool[100]
    let lt_24 = f_lt(take_0, take_1);  // %24 lt(%0, %1) bool[100]
    let le_25 = f_le(take_0, take_1);  // %25 le(%0, %1) bool[100]
    let select_26 = select(take_1, take_0, gt_20);  // %26 select(%20, %0, %1) f32[100]
    let cast_27 = f_to_i32(take_0);  // %27 cast(%0) i32[100]
    let cast_28 = f_to_u32(take_0);  // %28 cast(%0) u32[100]
    let cast_29 = (bitcast<u32>(take_0) << 1u) != 0u;  // %29 cast(%0) bool[100]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(exp_2); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = bitcast<u32>(log_3); }
    if (lane_out_2 != NONE) { results[lane_out_2 + i] = bitcast<u32>(recip_4); }
    if (lane_out_3 != NONE) { results[lane_out_3 + i] = bitcast<u32>(sin_5); }
    if (lane_out_4 != NONE) { results[lane_out_4 + i] = bitcast<u32>(cos_6); }
    if (lane_out_5 != NONE) { results[lane_out_5 + i] = bitcast<u32>(sqrt_7); }
    if (lane_out_6 != NONE) { results[lane_out_6 + i] = bitcast<u32>(rsqrt_8); }
    if (lane_out_7 != NONE) { results[lane_out_7 + i] = bitcast<u32>(tanh_9); }
    if (lane_out_8 != NONE) { results[lane_out_8 + i] = bitcast<u32>(neg_10); }
    if (lane_out_9 != NONE) { results[lane_out_9 + i] = bitcast<u32>(abs_11); }
    if (lane_out_10 != NONE) { results[lane_out_10 + i] = bitcast<u32>(sign_12); }
    if (lane_out_11 != NONE) { results[lane_out_11 + i] = bitcast<u32>(add_13); }
    if (lane_out_12 != NONE) { results[lane_out_12 + i] = bitcast<u32>(sub_14); }
    if (lane_out_13 != NONE) { results[lane_out_13 + i] = bitcast<u32>(mul_15); }
    if (lane_out_14 != NONE) { results[lane_out_14 + i] = bitcast<u32>(div_16); }
    if (lane_out_15 != NONE) { results[lane_out_15 + i] = bitcast<u32>(rem_17); }
    if (lane_out_16 != NONE) { results[lane_out_16 + i] = bitcast<u32>(max_18); }
    if (lane_out_17 != NONE) { results[lane_out_17 + i] = bitcast<u32>(min_19); }
    if (lane_out_18 != NONE) { results[lane_out_18 + i] = select(0u, 1u, gt_20); }
    if (lane_out_19 != NONE) { results[lane_out_19 + i] = select(0u, 1u, ge_21); }
    if (lane_out_20 != NONE) { results[lane_out_20 + i] = select(0u, 1u, eq_22); }
    if (lane_out_21 != NONE) { results[lane_out_21 + i] = select(0u, 1u, ne_23); }
    if (lane_out_22 != NONE) { results[lane_out_22 + i] = select(0u, 1u, lt_24); }
    if (lane_out_23 != NONE) { results[lane_out_23 + i] = select(0u, 1u, le_25); }
    if (lane_out_24 != NONE) { results[lane_out_24 + i] = bitcast<u32>(select_26); }
    if (lane_out_25 != NONE) { results[lane_out_25 + i] = bitcast<u32>(cast_27); }
    if (lane_out_26 != NONE) { results[lane_out_26 + i] = cast_28; }
    if (lane_out_27 != NONE) { results[lane_out_27 + i] = select(0u, 1u, cast_29); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
