// One workgroup of 256 a lane; at most 31 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 13u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_param_0 = lanes[lane + 12u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_take_2 = lanes[lane + 8u];
  let lane_put_2 = lanes[lane + 9u];
  let lane_copy_2 = lanes[lane + 10u];
  let lane_out_0 = lanes[lane + 11u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 40 elements
  let param_3 = bitcast<i32>(lane_param_0);  // %3 param(slot=0) i32[]
  var fold_7: i32 = 0i;  // %7 reduce_sum(%6) i32[]
  for (var i = lid; i < 40u; i += 256u) {  // at most 1 iterations
    let read_1 = arena[lane_take_1 + i] != 0u;  // %1 read(chan=1) bool[40]
    let take_2 = bitcast<i32>(arena[lane_take_2 + i]);  // %2 take(chan=2) i32[40]
    let select_4 = select(param_3, take_2, read_1);  // %4 select(%1, %2, %3) i32[40]
    fold_7 = fold_7 + select_4;
    if (lane_put_2 != NONE) { arena[lane_put_2 + i] = bitcast<u32>(select_4); }
    if (lane_copy_2 != NONE) { results[lane_copy_2 + i] = bitcast<u32>(select_4); }
  }
  // the parts of all threads joined: fold_7
  part0[lid] = bitcast<u32>(fold_7);
  workgroupBarrier();
  if (lid < 16u) {
    fold_7 = bitcast<i32>(part0[lid * 16u]);
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      fold_7 = fold_7 + bitcast<i32>(part0[lid * 16u + j]);
    }
    whole0[lid] = bitcast<u32>(fold_7);
  }
  workgroupBarrier();
  fold_7 = bitcast<i32>(whole0[0u]);
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    fold_7 = fold_7 + bitcast<i32>(whole0[j]);
  }
  let reduce_sum_7 = fold_7;  // %7 reduce_sum(%6) i32[]
  // scalar results
  if (lid == 0u) {
    if (lane_out_0 != NONE) { results[lane_out_0] = bitcast<u32>(reduce_sum_7); }
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
