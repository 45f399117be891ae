// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 5u];
  let v3 = lanes[lane + 2u];
  let v5 = lanes[lane + 8u];
  let v6 = lanes[lane + 1u];
  // phase 0: loops over 9
  for (var i = lid; i < 9u; i += 256u) {  // at most 1 iterations
    let v2 = bitcast<i32>(arena[v1 + i]);  // %1 take(chan=1) i32[9]
    let v4 = select(0.0, bitcast<f32>(arena[v3 + (i) * 4u + min(bitcast<u32>(v2), 3u)]), bitcast<u32>(v2) < 4u);  // %2 gather_row(%0, %1) f32[9]
    if (v5 != 0xffffffffu) { results[v5 + i] = bitcast<u32>(v4); }
  }
  // scalar results
  if (lid == 0u) {
    if (v6 != 0xffffffffu) { results[v6] = 0u; }
  }
}
