// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_take_1 = lanes[lane + 5u];
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 24 elements
  for (var i = lid; i < 24u; i += 256u) {  // at most 1 iterations
    let gather_2 = select(0.0, bitcast<f32>(arena[lane_take_0 + min(bitcast<u32>(bitcast<i32>(arena[lane_take_1 + (i / 4u)])), 8u) * 4u + i % 4u]), bitcast<u32>(bitcast<i32>(arena[lane_take_1 + (i / 4u)])) < 9u);  // %2 gather(%0, %1) f32[6, 4]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(gather_2); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
