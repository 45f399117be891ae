// One workgroup of 256 a lane; at most 293 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> parts: array<u32, 256>;
fn cumsum_0_before(lid: u32, part: f32) -> f32 {
  parts[lid] = bitcast<u32>(part);
  workgroupBarrier();
  var sum = 0.0;
  for (var j = 0u; j < lid; j += 1u) { sum = sum + bitcast<f32>(parts[j]); }
  return sum;
}
fn cumsum_0(lid: u32, source: u32, result: u32) {  // each thread a part of the row, from what the parts before it come to
  for (var row = 0u; row < 1u; row += 1u) {
    let start = row * 3000u + min(lid * 12u, 3000u);
    let end = row * 3000u + min(lid * 12u + 12u, 3000u);
    var run = 0.0;
    for (var i = start; i < end; i += 1u) { run = run + bitcast<f32>(arena[source + i]); }
    run = cumsum_0_before(lid, run);
    for (var i = start; i < end; i += 1u) {
      run = run + bitcast<f32>(arena[source + i]);
      scratch[result + i] = bitcast<u32>(run);
    }
    workgroupBarrier();
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 6u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 7096u;
  let v1 = lanes[lane + 2u];
  let v3 = lanes[lane + 5u];
  let v4 = lanes[lane + 1u];
  // phase 0: no loops, 1 from memory to memory
  // %1 cumsum(%0) f32[3000]
  cumsum_0(lid, v1, mine + 4096u);  // at most 281 iterations
  storageBarrier();
  // phase 1: loops over 3000
  for (var i = lid; i < 3000u; i += 256u) {  // at most 12 iterations
    let v2 = bitcast<f32>(scratch[mine + 4096u + i]);  // %1 cumsum(%0) f32[3000]
    if (v3 != 0xffffffffu) { results[v3 + i] = bitcast<u32>(v2); }
  }
  // scalar results
  if (lid == 0u) {
    if (v4 != 0xffffffffu) { results[v4] = 0u; }
  }
}
