// One workgroup of 256 a lane; at most 128 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn run_matmul_0(lid: u32, a: u32, b: u32, result: u32) {  // one element a thread
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
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 800u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  // %2 matmul(%0, %1) f32[20, 40]
  run_matmul_0(lid, lane_take_0, lane_take_1, mine);  // at most 124 iterations
  storageBarrier();
  // phase 1: a loop over 800 elements
  for (var i = lid; i < 800u; i += 256u) {  // at most 4 iterations
    let matmul_2 = bitcast<f32>(scratch[mine + i]);  // %2 matmul(%0, %1) f32[20, 40]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(matmul_2); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
