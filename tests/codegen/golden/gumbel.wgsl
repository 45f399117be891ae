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
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_nan(x: f32) -> u32 {
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
fn rng_bits(seed: vec2<u32>, i: u32) -> u32 {
  let step = u64_mul(vec2<u32>(i + 1u, select(0u, 1u, i == 0xffffffffu)), vec2<u32>(0x7f4a7c15u, 0x9e3779b9u));
  return u64_mix(u64_add(seed, step)).y >> 8u;
}
fn rng_uniform(seed: vec2<u32>, i: u32) -> f32 {
  return min((f32(rng_bits(seed, i)) + 0.5) * 5.960464477539063e-08, 0.9999999403953552);
}
fn rng_gumbel(seed: vec2<u32>, i: u32) -> f32 {
  return -f_log(-f_log(rng_uniform(seed, i)));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 7u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 6u];
  let v3 = lanes[lane + 2u];
  let v11 = (lanes[lane + 0u]) * 49152u;
  let v20 = lanes[lane + 3u];
  let v21 = lanes[lane + 4u];
  let v27 = lanes[lane + 5u];
  let v28 = lanes[lane + 1u];
  // phase 0: loops over 49152, 2
  let v2 = bitcast<f32>(v1);  // %5 param(slot=0) f32[]
  let v4 = arena[v3 + 0u];  // %0 take(chan=0) u32[2]
  let v5 = arena[v3 + 1u];  // %0 take(chan=0) u32[2]
  let v6 = rng_seed(v4, v5);
  var v7: u32 = 0u;
  var v9: u32 = 0u;
  var v10 = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v12 = logits[v11 + i];  // %4 output(index=0, name=logits) f32[49152]
    let v13 = v12 / v2;  // %6 div(%4, %5) f32[49152]
    let v14 = rng_gumbel(v6, i);  // %7 rng_gumbel(%0) f32[49152]
    let v15 = v13 + v14;  // %8 add(%6, %7) f32[49152]
    v7 = max(v7, f_nan(v12));
    let v16 = f_key(v15);
    if (v16 > v9) { v9 = v16; v10 = i; }
  }
  for (var i = lid; i < 2u; i += 256u) {  // at most 1 iterations
    let v17 = arena[v3 + i];  // %0 take(chan=0) u32[2]
    let v18 = i;  // %1 iota() u32[2]
    let v19 = v17 + v18;  // %2 add(%0, %1) u32[2]
    if (v20 != 0xffffffffu) { arena[v20 + i] = v19; }
    if (v21 != 0xffffffffu) { results[v21 + i] = v19; }
  }
  part0[lid] = v7;
  part1[lid] = v9;
  part2[lid] = v10;
  workgroupBarrier();
  if (lid < 16u) {
    v7 = part0[lid * 16u];
    v9 = part1[lid * 16u];
    v10 = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v7 = max(v7, part0[lid * 16u + j]);
      let v22 = part1[lid * 16u + j];
      let v23 = part2[lid * 16u + j];
      if (v22 > v9 || (v22 == v9 && v23 < v10)) { v9 = v22; v10 = v23; }
    }
    whole0[lid] = v7;
    whole1[lid] = v9;
    whole2[lid] = v10;
  }
  workgroupBarrier();
  v7 = whole0[0u];
  v9 = whole1[0u];
  v10 = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v7 = max(v7, whole0[j]);
    let v24 = whole1[j];
    let v25 = whole2[j];
    if (v24 > v9 || (v24 == v9 && v25 < v10)) { v9 = v24; v10 = v25; }
  }
  let v26 = bitcast<i32>(v10);  // %9 reduce_argmax(%8) i32[]
  // scalar results
  if (lid == 0u) {
    if (v27 != 0xffffffffu) { results[v27 + 0u] = bitcast<u32>(v26); }
    if (v28 != 0xffffffffu) { results[v28] = v7; }
  }
}
