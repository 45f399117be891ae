// One workgroup of 256 a lane; at most 100 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
var<workgroup> part2: array<u32, 256>;
var<workgroup> whole2: array<u32, 16>;
var<workgroup> part3: array<u32, 256>;
var<workgroup> whole3: array<u32, 16>;
var<workgroup> part4: array<u32, 256>;
var<workgroup> whole4: array<u32, 16>;
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_down_key(x: f32) -> u32 {
  let k = f_key(x);
  return select(~k, 0u, k == 0u);
}
fn f_unkey(k: u32) -> f32 {
  return bitcast<f32>(select(~k, k ^ 0x80000000u, k >= 0x80000000u));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 16u;
  let v9 = lanes[lane + 2u];
  let v20 = lanes[lane + 5u];
  let v21 = lanes[lane + 6u];
  let v22 = lanes[lane + 7u];
  let v23 = lanes[lane + 8u];
  let v24 = lanes[lane + 1u];
  // phase 0: loops over 3 rows of 500
  for (var r = 0u; r < 3u; r += 1u) {  // at most 3 iterations
    var v1: f32 = 0.0;
    var v3: u32 = 0x007fffffu;
    var v5: u32 = 0x007fffffu;
    var v7: u32 = 0u;
    var v8 = 0u;
    for (var k = lid; k < 500u; k += 256u) {  // at most 6 iterations
      let i = r * 500u + k;
      let v10 = bitcast<f32>(arena[v9 + i]);  // %0 take(chan=0) f32[3, 500]
      v1 = v1 + v10;
      v3 = max(v3, f_key(v10));
      v5 = max(v5, f_down_key(v10));
      let v11 = f_key(v10);
      if (v11 > v7) { v7 = v11; v8 = k; }
    }
    part0[lid] = bitcast<u32>(v1);
    part1[lid] = v3;
    part2[lid] = v5;
    part3[lid] = v7;
    part4[lid] = v8;
    workgroupBarrier();
    if (lid < 16u) {
      v1 = bitcast<f32>(part0[lid * 16u]);
      v3 = part1[lid * 16u];
      v5 = part2[lid * 16u];
      v7 = part3[lid * 16u];
      v8 = part4[lid * 16u];
      for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
        v1 = v1 + bitcast<f32>(part0[lid * 16u + j]);
        v3 = max(v3, part1[lid * 16u + j]);
        v5 = max(v5, part2[lid * 16u + j]);
        let v12 = part3[lid * 16u + j];
        let v13 = part4[lid * 16u + j];
        if (v12 > v7 || (v12 == v7 && v13 < v8)) { v7 = v12; v8 = v13; }
      }
      whole0[lid] = bitcast<u32>(v1);
      whole1[lid] = v3;
      whole2[lid] = v5;
      whole3[lid] = v7;
      whole4[lid] = v8;
    }
    workgroupBarrier();
    v1 = bitcast<f32>(whole0[0u]);
    v3 = whole1[0u];
    v5 = whole2[0u];
    v7 = whole3[0u];
    v8 = whole4[0u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
      v1 = v1 + bitcast<f32>(whole0[j]);
      v3 = max(v3, whole1[j]);
      v5 = max(v5, whole2[j]);
      let v14 = whole3[j];
      let v15 = whole4[j];
      if (v14 > v7 || (v14 == v7 && v15 < v8)) { v7 = v14; v8 = v15; }
    }
    if (lid == 0u) {
      scratch[mine + 0u + r] = bitcast<u32>(v1);
      scratch[mine + 4u + r] = bitcast<u32>(f_unkey(v3));
      scratch[mine + 8u + r] = bitcast<u32>(f_unkey(~v5));
      scratch[mine + 12u + r] = bitcast<u32>(bitcast<i32>(v8));
    }
  }
  storageBarrier();
  storageBarrier();
  // phase 1: loops over 3
  for (var i = lid; i < 3u; i += 256u) {  // at most 1 iterations
    let v16 = bitcast<f32>(scratch[mine + 0u + i]);  // %1 reduce_sum(%0) f32[3]
    let v17 = bitcast<f32>(scratch[mine + 4u + i]);  // %2 reduce_max(%0) f32[3]
    let v18 = bitcast<f32>(scratch[mine + 8u + i]);  // %3 reduce_min(%0) f32[3]
    let v19 = bitcast<i32>(scratch[mine + 12u + i]);  // %4 reduce_argmax(%0) i32[3]
    if (v20 != 0xffffffffu) { results[v20 + i] = bitcast<u32>(v16); }
    if (v21 != 0xffffffffu) { results[v21 + i] = bitcast<u32>(v17); }
    if (v22 != 0xffffffffu) { results[v22 + i] = bitcast<u32>(v18); }
    if (v23 != 0xffffffffu) { results[v23 + i] = bitcast<u32>(v19); }
  }
  // scalar results
  if (lid == 0u) {
    if (v24 != 0xffffffffu) { results[v24] = 0u; }
  }
}
