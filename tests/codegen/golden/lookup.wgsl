// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 5u];
  let v2 = lanes[lane + 2u];
  let v4 = lanes[lane + 8u];
  let v5 = lanes[lane + 1u];
  // phase 0: loops over 24
  for (var i = lid; i < 24u; i += 256u) {  // at most 1 iterations
    let v3 = select(0.0, bitcast<f32>(arena[v2 + min(bitcast<u32>(bitcast<i32>(arena[v1 + (i / 4u)])), 8u) * 4u + (i) % 4u]), bitcast<u32>(bitcast<i32>(arena[v1 + (i / 4u)])) < 9u);  // %2 gather(%0, %1) f32[6, 4]
    if (v4 != 0xffffffffu) { results[v4 + i] = bitcast<u32>(v3); }
  }
  // scalar results
  if (lid == 0u) {
    if (v5 != 0xffffffffu) { results[v5] = 0u; }
  }
}
