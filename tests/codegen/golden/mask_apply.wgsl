// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn mask_apply(x: f32, word: u32, i: u32) -> f32 {  // x where bit i % 32 is set, else -inf
  return bitcast<f32>(select(0xff800000u, bitcast<u32>(x), ((word >> (i & 31u)) & 1u) == 1u));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 100 elements
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[100]
    let mask_apply_2 = mask_apply(take_0, arena[lane_take_1 + (i >> 5u)], i);  // %2 mask_apply(%0, %1) f32[100]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(mask_apply_2); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
