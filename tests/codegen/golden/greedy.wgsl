// One workgroup of 256 a lane; at most 222 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
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
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 3u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v5 = (lanes[lane + 0u]) * 49152u;
  let v13 = lanes[lane + 2u];
  let v14 = lanes[lane + 1u];
  // phase 0: loops over 49152
  var v1: u32 = 0u;
  var v3: u32 = 0u;
  var v4 = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v6 = logits[v5 + i];  // %0 output(index=0, name=logits) f32[49152]
    v1 = max(v1, f_nan(v6));
    let v7 = f_key(v6);
    if (v7 > v3) { v3 = v7; v4 = i; }
  }
  part0[lid] = v1;
  part1[lid] = v3;
  part2[lid] = v4;
  workgroupBarrier();
  if (lid < 16u) {
    v1 = part0[lid * 16u];
    v3 = part1[lid * 16u];
    v4 = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v1 = max(v1, part0[lid * 16u + j]);
      let v8 = part1[lid * 16u + j];
      let v9 = part2[lid * 16u + j];
      if (v8 > v3 || (v8 == v3 && v9 < v4)) { v3 = v8; v4 = v9; }
    }
    whole0[lid] = v1;
    whole1[lid] = v3;
    whole2[lid] = v4;
  }
  workgroupBarrier();
  v1 = whole0[0u];
  v3 = whole1[0u];
  v4 = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v1 = max(v1, whole0[j]);
    let v10 = whole1[j];
    let v11 = whole2[j];
    if (v10 > v3 || (v10 == v3 && v11 < v4)) { v3 = v10; v4 = v11; }
  }
  let v12 = bitcast<i32>(v4);  // %1 reduce_argmax(%0) i32[]
  // scalar results
  if (lid == 0u) {
    if (v13 != 0xffffffffu) { results[v13 + 0u] = bitcast<u32>(v12); }
    if (v14 != 0xffffffffu) { results[v14] = v1; }
  }
}
