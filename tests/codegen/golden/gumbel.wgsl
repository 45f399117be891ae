// One workgroup of 256 a lane; at most 223 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> arena: array<u32>;
@group(0) @binding(2) var<storage, read> lanes: array<u32>;
@group(0) @binding(3) var<storage, read_write> results: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
var<workgroup> part2: array<u32, 256>;
var<workgroup> whole2: array<u32, 16>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_nan(x: f32) -> u32 {  // 1 for NaN
  return select(0u, 1u, (bitcast<u32>(x) << 1u) > 0xff000000u);
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
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 7u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_param_0 = lanes[lane + 6u];
  let lane_take_0 = lanes[lane + 2u];
  let logits_0 = lanes[lane] * 49152u;
  let lane_put_0 = lanes[lane + 3u];
  let lane_copy_0 = lanes[lane + 4u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 49152 elements, a loop over 2 elements
  let param_5 = bitcast<f32>(lane_param_0);  // %5 param(slot=0) f32[]
  let take_0_at_0 = arena[lane_take_0];  // %0 take(chan=0) u32[2]
  let take_0_at_1 = arena[lane_take_0 + 1u];  // %0 take(chan=0) u32[2]
  let seed_7 = rng_seed(take_0_at_0, take_0_at_1);
  var nan_4: u32 = 0u;  // 1 for a NaN in %4
  var fold_9: u32 = 0u;  // %9 reduce_argmax(%8) i32[]
  var fold_9_at = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let output_4 = logits[logits_0 + i];  // %4 output(index=0, name=logits) f32[49152]
    let div_6 = output_4 / param_5;  // %6 div(%4, %5) f32[49152]
    let rng_gumbel_7 = rng_gumbel(seed_7, i);  // %7 rng_gumbel(%0) f32[49152]
    let add_8 = div_6 + rng_gumbel_7;  // %8 add(%6, %7) f32[49152]
    nan_4 = max(nan_4, f_nan(output_4));
    let key_9 = f_key(add_8);
    if (key_9 > fold_9) { fold_9 = key_9; fold_9_at = i; }
  }
  for (var i = lid; i < 2u; i += 256u) {  // at most 1 iterations
    let take_0 = arena[lane_take_0 + i];  // %0 take(chan=0) u32[2]
    let iota_1 = i;  // %1 iota() u32[2]
    let add_2 = take_0 + iota_1;  // %2 add(%0, %1) u32[2]
    if (lane_put_0 != NONE) { arena[lane_put_0 + i] = add_2; }
    if (lane_copy_0 != NONE) { results[lane_copy_0 + i] = add_2; }
  }
  // the parts of all threads joined: nan_4, fold_9
  part0[lid] = nan_4;
  part1[lid] = fold_9;
  part2[lid] = fold_9_at;
  workgroupBarrier();
  if (lid < 16u) {
    nan_4 = part0[lid * 16u];
    fold_9 = part1[lid * 16u];
    fold_9_at = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      nan_4 = max(nan_4, part0[lid * 16u + j]);
      let other_9 = part1[lid * 16u + j];
      let other_9_at = part2[lid * 16u + j];
      if (other_9 > fold_9 || (other_9 == fold_9 && other_9_at < fold_9_at)) { fold_9 = other_9; fold_9_at = other_9_at; }
    }
    whole0[lid] = nan_4;
    whole1[lid] = fold_9;
    whole2[lid] = fold_9_at;
  }
  workgroupBarrier();
  nan_4 = whole0[0u];
  fold_9 = whole1[0u];
  fold_9_at = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    nan_4 = max(nan_4, whole0[j]);
    let other_9 = whole1[j];
    let other_9_at = whole2[j];
    if (other_9 > fold_9 || (other_9 == fold_9 && other_9_at < fold_9_at)) { fold_9 = other_9; fold_9_at = other_9_at; }
  }
  let reduce_argmax_9 = bitcast<i32>(fold_9_at);  // %9 reduce_argmax(%8) i32[]
  // scalar results
  if (lid == 0u) {
    if (lane_out_0 != NONE) { results[lane_out_0] = bitcast<u32>(reduce_argmax_9); }
    if (lane_status != NONE) { results[lane_status] = nan_4; }
  }
}
