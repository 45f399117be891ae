// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
fn mask_apply(x: f32, word: u32, i: u32) -> f32 {  // x where bit i % 32 is set, else -inf
  return bitcast<f32>(select(0xff800000u, bitcast<u32>(x), ((word >> (i & 31u)) & 1u) == 1u));
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 2u];
  let v3 = lanes[lane + 5u];
  let v5 = lanes[lane + 8u];
  let v6 = lanes[lane + 1u];
  // phase 0: loops over 100
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let v2 = bitcast<f32>(arena[v1 + i]);  // %0 take(chan=0) f32[100]
    let v4 = mask_apply(v2, arena[v3 + (i >> 5u)], i);  // %2 mask_apply(%0, %1) f32[100]
    if (v5 != 0xffffffffu) { results[v5 + i] = bitcast<u32>(v4); }
  }
  // scalar results
  if (lid == 0u) {
    if (v6 != 0xffffffffu) { results[v6] = 0u; }
  }
}
