// Split: 8 workgroups of 256 a lane; at most 24 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
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
  let lane = group.y * 3u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.y * 6144u;
  let v5 = (lanes[lane + 0u]) * 49152u;
  // phase 0: loops over 49152
  var v1: u32 = 0u;
  var v3: u32 = 0u;
  var v4 = 0u;
  for (var i = group.x * 6144u + lid; i < min(49152u, group.x * 6144u + 6144u); i += 256u) {  // at most 24 iterations
    let v6 = logits[v5 + i];  // %0 output(index=0, name=logits) f32[49152]
    v1 = max(v1, f_nan(v6));
    let v7 = f_key(v6);
    if (v7 > v3) { v3 = v7; v4 = i; }
  }
  scratch[mine + 0u + group.x * 256u + lid] = v1;
  scratch[mine + 2048u + group.x * 256u + lid] = v3;
  scratch[mine + 4096u + group.x * 256u + lid] = v4;
}

// Split: 8 workgroups of 256 a lane; at most 38 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
var<workgroup> part2: array<u32, 256>;
var<workgroup> whole2: array<u32, 16>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.y * 3u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.y * 6144u;
  let v1 = lanes[lane + 2u];
  let v2 = lanes[lane + 1u];
  // what the launches before left: parts of groups, then of threads
  var v3: u32 = 0u;
  var v5: u32 = 0u;
  var v6 = 0u;
  for (var g = 0u; g < 8u; g += 1u) {  // at most 8 iterations
    v3 = max(v3, scratch[mine + 0u + g * 256u + lid]);
    let v7 = scratch[mine + 2048u + g * 256u + lid];
    let v8 = scratch[mine + 4096u + g * 256u + lid];
    if (v7 > v5 || (v7 == v5 && v8 < v6)) { v5 = v7; v6 = v8; }
  }
  part0[lid] = v3;
  part1[lid] = v5;
  part2[lid] = v6;
  workgroupBarrier();
  if (lid < 16u) {
    v3 = part0[lid * 16u];
    v5 = part1[lid * 16u];
    v6 = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v3 = max(v3, part0[lid * 16u + j]);
      let v9 = part1[lid * 16u + j];
      let v10 = part2[lid * 16u + j];
      if (v9 > v5 || (v9 == v5 && v10 < v6)) { v5 = v9; v6 = v10; }
    }
    whole0[lid] = v3;
    whole1[lid] = v5;
    whole2[lid] = v6;
  }
  workgroupBarrier();
  v3 = whole0[0u];
  v5 = whole1[0u];
  v6 = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v3 = max(v3, whole0[j]);
    let v11 = whole1[j];
    let v12 = whole2[j];
    if (v11 > v5 || (v11 == v5 && v12 < v6)) { v5 = v11; v6 = v12; }
  }
  let nan0 = v3;  // %0 output(index=0, name=logits) f32[49152]
  let fold1 = bitcast<i32>(v6);  // %1 reduce_argmax(%0) i32[]
  // scalar results
  if (lid == 0u) {
    if (v1 != 0xffffffffu) { results[v1 + 0u] = bitcast<u32>(fold1); }
    if (v2 != 0xffffffffu) { results[v2] = nan0; }
  }
}
