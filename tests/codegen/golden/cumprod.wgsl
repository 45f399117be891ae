// One workgroup of 256 a lane; at most 10 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn run_cumprod_0(lid: u32, source: u32, result: u32) {  // one row a thread, left to right
  for (var row = lid; row < 3u; row += 256u) {
    var run = 1.0;
    for (var i = row * 8u; i < row * 8u + 8u; i += 1u) {
      run = run * bitcast<f32>(arena[source + i]);
      scratch[result + i] = bitcast<u32>(run);
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 6u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4120u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  // %1 cumprod(%0) f32[3, 8]
  run_cumprod_0(lid, lane_take_0, mine + 4096u);  // at most 9 iterations
  storageBarrier();
  // phase 1: a loop over 24 elements
  for (var i = lid; i < 24u; i += 256u) {  // at most 1 iterations
    let cumprod_1 = bitcast<f32>(scratch[mine + 4096u + i]);  // %1 cumprod(%0) f32[3, 8]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(cumprod_1); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
