// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 15 elements
  for (var i = lid; i < 15u; i += 256u) {  // at most 1 iterations
    let transpose_2 = bitcast<f32>(arena[lane_take_0 + (i % 3u) * 5u + i / 3u]);  // %2 transpose(%0) f32[5, 3]
    let broadcast_3 = bitcast<f32>(arena[lane_take_1 + (i % 3u)]);  // %3 broadcast(%1) f32[5, 3]
    let add_4 = transpose_2 + broadcast_3;  // %4 add(%2, %3) f32[5, 3]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(add_4); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
