// One workgroup of 256 a lane; at most 128 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
fn matmul_0(lid: u32, a: u32, b: u32, result: u32) {  // one element a thread
  for (var e = lid; e < 800u; e += 256u) {
    let row = a + (e / 40u) * 30u;
    let column = b + e % 40u;
    var sum = 0.0;
    for (var j = 0u; j < 30u; j += 1u) { sum = fma(bitcast<f32>(arena[row + j]), bitcast<f32>(arena[column + j * 40u]), sum); }
    scratch[result + e] = bitcast<u32>(sum);
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 9u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 800u;
  let v1 = lanes[lane + 2u];
  let v2 = lanes[lane + 5u];
  let v4 = lanes[lane + 8u];
  let v5 = lanes[lane + 1u];
  // phase 0: no loops, 1 from memory to memory
  // %2 matmul(%0, %1) f32[20, 40]
  matmul_0(lid, v1, v2, mine + 0u);  // at most 124 iterations
  storageBarrier();
  // phase 1: loops over 800
  for (var i = lid; i < 800u; i += 256u) {  // at most 4 iterations
    let v3 = bitcast<f32>(scratch[mine + 0u + i]);  // %2 matmul(%0, %1) f32[20, 40]
    if (v4 != 0xffffffffu) { results[v4 + i] = bitcast<u32>(v3); }
  }
  // scalar results
  if (lid == 0u) {
    if (v5 != 0xffffffffu) { results[v5] = 0u; }
  }
}
