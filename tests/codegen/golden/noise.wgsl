// One workgroup of 256 a lane; at most 2 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
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
fn f_cos(x: f32) -> f32 { return f_trig(x, 1u); }
fn u64_high(a: u32, b: u32) -> u32 {  // high word of a * b
  let a0 = a & 0xffffu;
  let a1 = a >> 16u;
  let b0 = b & 0xffffu;
  let b1 = b >> 16u;
  let low = a0 * b0;
  let mid = a1 * b0 + (low >> 16u);
  let cross = a0 * b1 + (mid & 0xffffu);
  return a1 * b1 + (mid >> 16u) + (cross >> 16u);
}
fn u64_mul(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {  // (low, high)
  return vec2<u32>(a.x * b.x, u64_high(a.x, b.x) + a.x * b.y + a.y * b.x);
}
fn u64_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = a.x + b.x;
  return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}
fn u64_xorshift(x: vec2<u32>, s: u32) -> vec2<u32> {  // x ^ (x >> s), 0 < s < 64
  if (s < 32u) { return vec2<u32>(x.x ^ ((x.x >> s) | (x.y << (32u - s))), x.y ^ (x.y >> s)); }
  if (s == 32u) { return vec2<u32>(x.x ^ x.y, x.y); }
  return vec2<u32>(x.x ^ (x.y >> (s - 32u)), x.y);
}
fn u64_mix(x0: vec2<u32>) -> vec2<u32> {
  var x = u64_mul(u64_xorshift(x0, 27u), vec2<u32>(0x2ba7b653u, 0x3c79ac49u));
  x = u64_mul(u64_xorshift(x, 33u), vec2<u32>(0x4ac4ae35u, 0x1c69b3f7u));
  return u64_xorshift(x, 27u);
}
fn rng_seed(key: u32, counter: u32) -> vec2<u32> { return u64_mix(vec2<u32>(counter, key)); }
fn rng_bits(seed: vec2<u32>, i: u32) -> u32 {  // 24 random bits for element i
  let step = u64_mul(vec2<u32>(i + 1u, select(0u, 1u, i == 0xffffffffu)), vec2<u32>(0x7f4a7c15u, 0x9e3779b9u));
  return u64_mix(u64_add(seed, step)).y >> 8u;
}
fn rng_uniform(seed: vec2<u32>, i: u32) -> f32 {  // between 0 and 1, neither of them
  return min((f32(rng_bits(seed, i)) + 0.5) * 5.960464477539063e-08, 0.9999999403953552);
}
fn rng_gumbel(seed: vec2<u32>, i: u32) -> f32 {
  return -f_log(-f_log(rng_uniform(seed, i)));
}
fn rng_normal(seed: vec2<u32>, i: u32) -> f32 {  // Box-Muller
  return sqrt(-2.0 * f_log(rng_uniform(seed, 2u * i))) * f_cos(6.283185307179586 * rng_uniform(seed, 2u * i + 1u));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_take_0 = lanes[lane + 2u];
  let lane_put_0 = lanes[lane + 3u];
  let lane_copy_0 = lanes[lane + 4u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_out_1 = lanes[lane + 6u];
  let lane_out_3 = lanes[lane + 8u];
  let lane_out_2 = lanes[lane + 7u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 2 elements, a loop over 100 elements
  for (var i = lid; i < 2u; i += 256u) {  // at most 1 iterations
    let take_0 = arena[lane_take_0 + i];  // %0 take(chan=0) u32[2]
    let iota_1 = i;  // %1 iota() u32[2]
    let add_2 = take_0 + iota_1;  // %2 add(%0, %1) u32[2]
    if (lane_put_0 != NONE) { arena[lane_put_0 + i] = add_2; }
    if (lane_copy_0 != NONE) { results[lane_copy_0 + i] = add_2; }
  }
  let take_0_at_0 = arena[lane_take_0];  // %0 take(chan=0) u32[2]
  let take_0_at_1 = arena[lane_take_0 + 1u];  // %0 take(chan=0) u32[2]
  let seed_4 = rng_seed(take_0_at_0, take_0_at_1);
  let seed_5 = rng_seed(take_0_at_0, take_0_at_1);
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let rng_uniform_4 = rng_uniform(seed_4, i);  // %4 rng_uniform(%0) f32[100]
    let rng_normal_5 = rng_normal(seed_5, i);  // %5 rng_normal(%0) f32[100]
    let iota_7 = i;  // %7 iota() u32[100]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(rng_uniform_4); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = bitcast<u32>(rng_normal_5); }
    if (lane_out_3 != NONE) { results[lane_out_3 + i] = iota_7; }
  }
  // scalar results
  let seed_6 = rng_seed(take_0_at_0, take_0_at_1);
  let rng_gumbel_6 = rng_gumbel(seed_6, 0u);  // %6 rng_gumbel(%0) f32[]
  if (lid == 0u) {
    if (lane_out_2 != NONE) { results[lane_out_2] = bitcast<u32>(rng_gumbel_6); }
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
