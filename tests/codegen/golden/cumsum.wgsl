// One workgroup of 256 a lane; at most 293 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> parts: array<u32, 256>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn run_cumsum_0_before(lid: u32, part: f32) -> f32 {
  parts[lid] = bitcast<u32>(part);
  workgroupBarrier();
  var sum = 0.0;
  for (var j = 0u; j < lid; j += 1u) { sum = sum + bitcast<f32>(parts[j]); }
  return sum;
}
fn run_cumsum_0(lid: u32, source: u32, result: u32) {  // each thread a part of the row, from what the parts before it come to
  for (var row = 0u; row < 1u; row += 1u) {
    let start = row * 3000u + min(lid * 12u, 3000u);
    let end = row * 3000u + min(lid * 12u + 12u, 3000u);
    var run = 0.0;
    for (var i = start; i < end; i += 1u) { run = run + bitcast<f32>(arena[source + i]); }
    run = run_cumsum_0_before(lid, run);
    for (var i = start; i < end; i += 1u) {
      run = run + bitcast<f32>(arena[source + i]);
      scratch[result + i] = bitcast<u32>(run);
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 6u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 7096u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  // %1 cumsum(%0) f32[3000]
  run_cumsum_0(lid, lane_take_0, mine + 4096u);  // at most 281 iterations
  storageBarrier();
  // phase 1: a loop over 3000 elements
  for (var i = lid; i < 3000u; i += 256u) {  // at most 12 iterations
    let cumsum_1 = bitcast<f32>(scratch[mine + 4096u + i]);  // %1 cumsum(%0) f32[3000]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(cumsum_1); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
