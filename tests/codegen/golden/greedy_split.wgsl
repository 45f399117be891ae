// Split: 8 workgroups of 256 a lane; at most 24 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
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
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.y * 3u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.y * 6144u;
  let logits_0 = lanes[lane] * 49152u;
  // phase 0: a loop over 49152 elements
  var nan_0: u32 = 0u;  // 1 for a NaN in %0
  var fold_1: u32 = 0u;  // %1 reduce_argmax(%0) i32[]
  var fold_1_at = 0u;
  for (var i = group.x * 6144u + lid; i < min(49152u, group.x * 6144u + 6144u); i += 256u) {  // at most 24 iterations
    let output_0 = logits[logits_0 + i];  // %0 output(index=0, name=logits) f32[49152]
    nan_0 = max(nan_0, f_nan(output_0));
    let key_1 = f_key(output_0);
    if (key_1 > fold_1) { fold_1 = key_1; fold_1_at = i; }
  }
  scratch[mine + 0u + group.x * 256u + lid] = nan_0;
  scratch[mine + 2048u + group.x * 256u + lid] = fold_1;
  scratch[mine + 4096u + group.x * 256u + lid] = fold_1_at;
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
const NONE = 0xffffffffu;  // a lane word that stands for nothing
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.y * 3u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.y * 6144u;
  let lane_out_0 = lanes[lane + 2u];
  let lane_status = lanes[lane + 1u];
  // what the launches before left: parts of groups, then of threads
  var nan_0: u32 = 0u;  // 1 for a NaN in %0
  var fold_1: u32 = 0u;  // %1 reduce_argmax(%0) i32[]
  var fold_1_at = 0u;
  for (var g = 0u; g < 8u; g += 1u) {  // at most 8 iterations
    nan_0 = max(nan_0, scratch[mine + 0u + g * 256u + lid]);
    let other_1 = scratch[mine + 2048u + g * 256u + lid];
    let other_1_at = scratch[mine + 4096u + g * 256u + lid];
    if (other_1 > fold_1 || (other_1 == fold_1 && other_1_at < fold_1_at)) { fold_1 = other_1; fold_1_at = other_1_at; }
  }
  // the parts of all threads joined: nan_0, fold_1
  part0[lid] = nan_0;
  part1[lid] = fold_1;
  part2[lid] = fold_1_at;
  workgroupBarrier();
  if (lid < 16u) {
    nan_0 = part0[lid * 16u];
    fold_1 = part1[lid * 16u];
    fold_1_at = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      nan_0 = max(nan_0, part0[lid * 16u + j]);
      let other_1 = part1[lid * 16u + j];
      let other_1_at = part2[lid * 16u + j];
      if (other_1 > fold_1 || (other_1 == fold_1 && other_1_at < fold_1_at)) { fold_1 = other_1; fold_1_at = other_1_at; }
    }
    whole0[lid] = nan_0;
    whole1[lid] = fold_1;
    whole2[lid] = fold_1_at;
  }
  workgroupBarrier();
  nan_0 = whole0[0u];
  fold_1 = whole1[0u];
  fold_1_at = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    nan_0 = max(nan_0, whole0[j]);
    let other_1 = whole1[j];
    let other_1_at = whole2[j];
    if (other_1 > fold_1 || (other_1 == fold_1 && other_1_at < fold_1_at)) { fold_1 = other_1; fold_1_at = other_1_at; }
  }
  let any_nan_0 = nan_0;  // 1 for a NaN in %0
  let reduce_argmax_1 = bitcast<i32>(fold_1_at);  // %1 reduce_argmax(%0) i32[]
  // scalar results
  if (lid == 0u) {
    if (lane_out_0 != NONE) { results[lane_out_0] = bitcast<u32>(reduce_argmax_1); }
    if (lane_status != NONE) { results[lane_status] = any_nan_0; }
  }
}
