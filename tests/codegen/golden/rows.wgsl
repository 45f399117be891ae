// One workgroup of 256 a lane; at most 148 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
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
  let mine = group.x * 4u;
  let v3 = (lanes[lane + 0u]) * 1000u;
  let v14 = lanes[lane + 2u];
  let v15 = lanes[lane + 1u];
  // phase 0: loops over 3000, 3 rows of 1000
  var v1: u32 = 0u;
  for (var i = lid; i < 3000u; i += 256u) {  // at most 12 iterations
    let v4 = logits[v3 + i];  // %0 outputs(name=logits) f32[3, 1000]
    v1 = max(v1, f_nan(v4));
  }
  for (var r = 0u; r < 3u; r += 1u) {  // at most 3 iterations
    var v5: u32 = 0u;
    var v6 = 0u;
    for (var k = lid; k < 1000u; k += 256u) {  // at most 12 iterations
      let i = r * 1000u + k;
      let v7 = logits[v3 + i];  // %0 outputs(name=logits) f32[3, 1000]
      let v8 = f_key(v7);
      if (v8 > v5) { v5 = v8; v6 = k; }
    }
    part0[lid] = v5;
    part1[lid] = v6;
    workgroupBarrier();
    if (lid < 16u) {
      v5 = part0[lid * 16u];
      v6 = part1[lid * 16u];
      for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
        let v9 = part0[lid * 16u + j];
        let v10 = part1[lid * 16u + j];
        if (v9 > v5 || (v9 == v5 && v10 < v6)) { v5 = v9; v6 = v10; }
      }
      whole0[lid] = v5;
      whole1[lid] = v6;
    }
    workgroupBarrier();
    v5 = whole0[0u];
    v6 = whole1[0u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
      let v11 = whole0[j];
      let v12 = whole1[j];
      if (v11 > v5 || (v11 == v5 && v12 < v6)) { v5 = v11; v6 = v12; }
    }
    if (lid == 0u) {
      scratch[mine + 0u + r] = bitcast<u32>(bitcast<i32>(v6));
    }
  }
  storageBarrier();
  part0[lid] = v1;
  workgroupBarrier();
  if (lid < 16u) {
    v1 = part0[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v1 = max(v1, part0[lid * 16u + j]);
    }
    whole0[lid] = v1;
  }
  workgroupBarrier();
  v1 = whole0[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v1 = max(v1, whole0[j]);
  }
  storageBarrier();
  // phase 1: loops over 3
  for (var i = lid; i < 3u; i += 256u) {  // at most 1 iterations
    let v13 = bitcast<i32>(scratch[mine + 0u + i]);  // %1 reduce_argmax(%0) i32[3]
    if (v14 != 0xffffffffu) { results[v14 + i] = bitcast<u32>(v13); }
  }
  // scalar results
  if (lid == 0u) {
    if (v15 != 0xffffffffu) { results[v15] = v1; }
  }
}
