// One workgroup of 32 a lane; at most 1567 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
var<workgroup> part0: array<u32, 32>;
var<workgroup> part1: array<u32, 32>;
var<workgroup> part2: array<u32, 32>;
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
@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 3u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let threads = min(32u, lanes[lane + 0u] + 32u);  // 32, but no compiler may count on it
  let v5 = (lanes[lane + 0u]) * 49152u;
  let v11 = lanes[lane + 2u];
  let v12 = lanes[lane + 1u];
  // phase 0: loops over 49152
  var v1: u32 = 0u;
  var v3: u32 = 0u;
  var v4 = 0u;
  for (var i = lid; i < 49152u; i += 32u) {  // at most 1536 iterations
    let v6 = logits[v5 + i];  // %0 output(index=0, name=logits) f32[49152]
    v1 = max(v1, f_nan(v6));
    let v7 = f_key(v6);
    if (v7 > v3) { v3 = v7; v4 = i; }
  }
  part0[lid] = v1;
  part1[lid] = v3;
  part2[lid] = v4;
  workgroupBarrier();
  v1 = part0[0u];
  v3 = part1[0u];
  v4 = part2[0u];
  for (var j = 1u; j < threads; j += 1u) {  // at most 31 iterations
    v1 = max(v1, part0[j]);
    let v8 = part1[j];
    let v9 = part2[j];
    if (v8 > v3 || (v8 == v3 && v9 < v4)) { v3 = v8; v4 = v9; }
  }
  let v10 = bitcast<i32>(v4);  // %1 reduce_argmax(%0) i32[]
  // scalar results
  if (lid == 0u) {
    if (v11 != 0xffffffffu) { results[v11 + 0u] = bitcast<u32>(v10); }
    if (v12 != 0xffffffffu) { results[v12] = v1; }
  }
}
