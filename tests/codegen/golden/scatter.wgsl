// One workgroup of 256 a lane; at most 610 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> arena: array<u32>;
@group(0) @binding(2) var<storage, read> lanes: array<u32>;
@group(0) @binding(3) var<storage, read_write> results: array<u32>;
@group(0) @binding(4) var<storage, read_write> scratch: array<u32>;
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
fn run_scatter_add_0(lid: u32, base: u32, index: u32, values: u32, result: u32) {  // rows of a thread's own, updates in index order
  for (var i = lid; i < 49152u; i += 256u) { scratch[result + i] = arena[base + i]; }
  storageBarrier();
  for (var unit = lid; unit < 256u; unit += 256u) {
    let column = unit % 1u;
    let share = unit / 1u;
    for (var j = 0u; j < 1u; j += 1u) {
      let row = scratch[index + j];
      if (row < 49152u && row % 256u == share) {
        let to = result + row * 1u + column;
        scratch[to] = bitcast<u32>(bitcast<f32>(scratch[to]) + bitcast<f32>(scratch[values + j * 1u + column]));
      }
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 8u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 49160u;
  let lane_param_0 = lanes[lane + 6u];
  let lane_take_0 = lanes[lane + 2u];
  let logits_0 = lanes[lane] * 49152u;
  let lane_param_1 = lanes[lane + 7u];
  let lane_put_0 = lanes[lane + 3u];
  let lane_copy_0 = lanes[lane + 4u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 49152 elements, a loop over 1 elements
  let param_2 = bitcast<f32>(lane_param_0);  // %2 param(slot=0) f32[]
  var nan_1: u32 = 0u;  // 1 for a NaN in %1
  var fold_5: u32 = 0u;  // %5 reduce_argmax(%4) i32[]
  var fold_5_at = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[49152]
    let output_1 = logits[logits_0 + i];  // %1 output(index=0, name=logits) f32[49152]
    let mul_3 = param_2 * take_0;  // %3 mul(%2, %0) f32[49152]
    let sub_4 = output_1 - mul_3;  // %4 sub(%1, %3) f32[49152]
    nan_1 = max(nan_1, f_nan(output_1));
    let key_5 = f_key(sub_4);
    if (key_5 > fold_5) { fold_5 = key_5; fold_5_at = i; }
  }
  let param_7 = bitcast<f32>(lane_param_1);  // %7 param(slot=1) f32[]
  for (var i = lid; i < 1u; i += 256u) {  // at most 1 iterations
    let broadcast_8 = param_7;  // %8 broadcast(%7) f32[1]
    scratch[mine + i] = bitcast<u32>(broadcast_8);
  }
  storageBarrier();
  // the parts of all threads joined: nan_1, fold_5
  part0[lid] = nan_1;
  part1[lid] = fold_5;
  part2[lid] = fold_5_at;
  workgroupBarrier();
  if (lid < 16u) {
    nan_1 = part0[lid * 16u];
    fold_5 = part1[lid * 16u];
    fold_5_at = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      nan_1 = max(nan_1, part0[lid * 16u + j]);
      let other_5 = part1[lid * 16u + j];
      let other_5_at = part2[lid * 16u + j];
      if (other_5 > fold_5 || (other_5 == fold_5 && other_5_at < fold_5_at)) { fold_5 = other_5; fold_5_at = other_5_at; }
    }
    whole0[lid] = nan_1;
    whole1[lid] = fold_5;
    whole2[lid] = fold_5_at;
  }
  workgroupBarrier();
  nan_1 = whole0[0u];
  fold_5 = whole1[0u];
  fold_5_at = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    nan_1 = max(nan_1, whole0[j]);
    let other_5 = whole1[j];
    let other_5_at = whole2[j];
    if (other_5 > fold_5 || (other_5 == fold_5 && other_5_at < fold_5_at)) { fold_5 = other_5; fold_5_at = other_5_at; }
  }
  let reduce_argmax_5 = bitcast<i32>(fold_5_at);  // %5 reduce_argmax(%4) i32[]
  // phase 1: a loop over 1 elements, 1 op from memory to memory
  for (var i = lid; i < 1u; i += 256u) {  // at most 1 iterations
    let reshape_6 = reduce_argmax_5;  // %6 reshape(%5) i32[1]
    scratch[mine + 49156u + i] = bitcast<u32>(reshape_6);
  }
  storageBarrier();
  // %9 scatter_add(%0, %6, %8) f32[49152]
  run_scatter_add_0(lid, lane_take_0, mine + 49156u, mine, mine + 4u);  // at most 194 iterations
  storageBarrier();
  // phase 2: a loop over 49152 elements
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let scatter_add_9 = bitcast<f32>(scratch[mine + 4u + i]);  // %9 scatter_add(%0, %6, %8) f32[49152]
    if (lane_put_0 != NONE) { arena[lane_put_0 + i] = bitcast<u32>(scatter_add_9); }
    if (lane_copy_0 != NONE) { results[lane_copy_0 + i] = bitcast<u32>(scatter_add_9); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_out_0 != NONE) { results[lane_out_0] = bitcast<u32>(reduce_argmax_5); }
    if (lane_status != NONE) { results[lane_status] = nan_1; }
  }
}
