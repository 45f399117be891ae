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
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_down_key(x: f32) -> u32 {  // ordered the other way round; NaN is 0 here too
  let k = f_key(x);
  return select(~k, 0u, k == 0u);
}
fn f_unkey(k: u32) -> f32 {  // the number of an f_key
  return bitcast<f32>(select(~k, k ^ 0x80000000u, k >= 0x80000000u));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 16u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_out_1 = lanes[lane + 6u];
  let lane_out_2 = lanes[lane + 7u];
  let lane_out_3 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 3 rows of 500 elements
  for (var r = 0u; r < 3u; r += 1u) {  // at most 3 iterations
    var fold_1: f32 = 0.0;  // %1 reduce_sum(%0) f32[3]
    var fold_2: u32 = 0x007fffffu;  // %2 reduce_max(%0) f32[3]
    var fold_3: u32 = 0x007fffffu;  // %3 reduce_min(%0) f32[3]
    var fold_4: u32 = 0u;  // %4 reduce_argmax(%0) i32[3]
    var fold_4_at = 0u;
    for (var k = lid; k < 500u; k += 256u) {  // at most 6 iterations
      let i = r * 500u + k;
      let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[3, 500]
      fold_1 = fold_1 + take_0;
      fold_2 = max(fold_2, f_key(take_0));
      fold_3 = max(fold_3, f_down_key(take_0));
      let key_4 = f_key(take_0);
      if (key_4 > fold_4) { fold_4 = key_4; fold_4_at = k; }
    }
    // the parts of all threads joined: fold_1, fold_2, fold_3, fold_4
    part0[lid] = bitcast<u32>(fold_1);
    part1[lid] = fold_2;
    part2[lid] = fold_3;
    part3[lid] = fold_4;
    part4[lid] = fold_4_at;
    workgroupBarrier();
    if (lid < 16u) {
      fold_1 = bitcast<f32>(part0[lid * 16u]);
      fold_2 = part1[lid * 16u];
      fold_3 = part2[lid * 16u];
      fold_4 = part3[lid * 16u];
      fold_4_at = part4[lid * 16u];
      for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
        fold_1 = fold_1 + bitcast<f32>(part0[lid * 16u + j]);
        fold_2 = max(fold_2, part1[lid * 16u + j]);
        fold_3 = max(fold_3, part2[lid * 16u + j]);
        let other_4 = part3[lid * 16u + j];
        let other_4_at = part4[lid * 16u + j];
        if (other_4 > fold_4 || (other_4 == fold_4 && other_4_at < fold_4_at)) { fold_4 = other_4; fold_4_at = other_4_at; }
      }
      whole0[lid] = bitcast<u32>(fold_1);
      whole1[lid] = fold_2;
      whole2[lid] = fold_3;
      whole3[lid] = fold_4;
      whole4[lid] = fold_4_at;
    }
    workgroupBarrier();
    fold_1 = bitcast<f32>(whole0[0u]);
    fold_2 = whole1[0u];
    fold_3 = whole2[0u];
    fold_4 = whole3[0u];
    fold_4_at = whole4[0u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 45 iterations
      fold_1 = fold_1 + bitcast<f32>(whole0[j]);
      fold_2 = max(fold_2, whole1[j]);
      fold_3 = max(fold_3, whole2[j]);
      let other_4 = whole3[j];
      let other_4_at = whole4[j];
      if (other_4 > fold_4 || (other_4 == fold_4 && other_4_at < fold_4_at)) { fold_4 = other_4; fold_4_at = other_4_at; }
    }
    if (lid == 0u) {
      scratch[mine + r] = bitcast<u32>(fold_1);
      scratch[mine + 4u + r] = bitcast<u32>(f_unkey(fold_2));
      scratch[mine + 8u + r] = bitcast<u32>(f_unkey(~fold_3));
      scratch[mine + 12u + r] = bitcast<u32>(bitcast<i32>(fold_4_at));
    }
  }
  storageBarrier();
  // phase 1: a loop over 3 elements
  for (var i = lid; i < 3u; i += 256u) {  // at most 1 iterations
    let reduce_sum_1 = bitcast<f32>(scratch[mine + i]);  // %1 reduce_sum(%0) f32[3]
    let reduce_max_2 = bitcast<f32>(scratch[mine + 4u + i]);  // %2 reduce_max(%0) f32[3]
    let reduce_min_3 = bitcast<f32>(scratch[mine + 8u + i]);  // %3 reduce_min(%0) f32[3]
    let reduce_argmax_4 = bitcast<i32>(scratch[mine + 12u + i]);  // %4 reduce_argmax(%0) i32[3]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(reduce_sum_1); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = bitcast<u32>(reduce_max_2); }
    if (lane_out_2 != NONE) { results[lane_out_2 + i] = bitcast<u32>(reduce_min_3); }
    if (lane_out_3 != NONE) { results[lane_out_3 + i] = bitcast<u32>(reduce_argmax_4); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
