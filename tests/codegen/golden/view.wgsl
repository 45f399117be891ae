// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 2u];
  let v3 = lanes[lane + 5u];
  let v6 = lanes[lane + 8u];
  let v7 = lanes[lane + 1u];
  // phase 0: loops over 15
  for (var i = lid; i < 15u; i += 256u) {  // at most 1 iterations
    let v2 = bitcast<f32>(arena[v1 + (i % 3u) * 5u + i / 3u]);  // %2 transpose(%0) f32[5, 3]
    let v4 = bitcast<f32>(arena[v3 + ((i) % 3u)]);  // %3 broadcast(%1) f32[5, 3]
    let v5 = v2 + v4;  // %4 add(%2, %3) f32[5, 3]
    if (v6 != 0xffffffffu) { results[v6 + i] = bitcast<u32>(v5); }
  }
  // scalar results
  if (lid == 0u) {
    if (v7 != 0xffffffffu) { results[v7] = 0u; }
  }
}
