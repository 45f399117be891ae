// One workgroup of 256 a lane; at most 148 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
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
  let lane = group.x * 3u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4u;
  let logits_0 = lanes[lane] * 1000u;
  let lane_out_0 = lanes[lane + 2u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 3000 elements, a loop over 3 rows of 1000 elements
  var nan_0: u32 = 0u;  // 1 for a NaN in %0
  for (var i = lid; i < 3000u; i += 256u) {  // at most 12 iterations
    let outputs_0 = logits[logits_0 + i];  // %0 outputs(name=logits) f32[3, 1000]
    nan_0 = max(nan_0, f_nan(outputs_0));
  }
  for (var r = 0u; r < 3u; r += 1u) {  // at most 3 iterations
    var fold_1: u32 = 0u;  // %1 reduce_argmax(%0) i32[3]
    var fold_1_at = 0u;
    for (var k = lid; k < 1000u; k += 256u) {  // at most 12 iterations
      let i = r * 1000u + k;
      let outputs_0 = logits[logits_0 + i];  // %0 outputs(name=logits) f32[3, 1000]
      let key_1 = f_key(outputs_0);
      if (key_1 > fold_1) { fold_1 = key_1; fold_1_at = k; }
    }
    // the parts of all threads joined: fold_1
    part0[lid] = fold_1;
    part1[lid] = fold_1_at;
    workgroupBarrier();
    if (lid < 16u) {
      fold_1 = part0[lid * 16u];
      fold_1_at = part1[lid * 16u];
      for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
        let other_1 = part0[lid * 16u + j];
        let other_1_at = part1[lid * 16u + j];
        if (other_1 > fold_1 || (other_1 == fold_1 && other_1_at < fold_1_at)) { fold_1 = other_1; fold_1_at = other_1_at; }
      }
      whole0[lid] = fold_1;
      whole1[lid] = fold_1_at;
    }
    workgroupBarrier();
    fold_1 = whole0[0u];
    fold_1_at = whole1[0u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
      let other_1 = whole0[j];
      let other_1_at = whole1[j];
      if (other_1 > fold_1 || (other_1 == fold_1 && other_1_at < fold_1_at)) { fold_1 = other_1; fold_1_at = other_1_at; }
    }
    if (lid == 0u) {
      scratch[mine + r] = bitcast<u32>(bitcast<i32>(fold_1_at));
    }
  }
  storageBarrier();
  // the parts of all threads joined: nan_0
  part0[lid] = nan_0;
  workgroupBarrier();
  if (lid < 16u) {
    nan_0 = part0[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      nan_0 = max(nan_0, part0[lid * 16u + j]);
    }
    whole0[lid] = nan_0;
  }
  workgroupBarrier();
  nan_0 = whole0[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    nan_0 = max(nan_0, whole0[j]);
  }
  // phase 1: a loop over 3 elements
  for (var i = lid; i < 3u; i += 256u) {  // at most 1 iterations
    let reduce_argmax_1 = bitcast<i32>(scratch[mine + i]);  // %1 reduce_argmax(%0) i32[3]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(reduce_argmax_1); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = nan_0; }
  }
}
