// One workgroup of 256 a lane; at most 10 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
fn cumprod_0(lid: u32, source: u32, result: u32) {  // one row a thread, left to right
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
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 4120u;
  let v1 = lanes[lane + 2u];
  let v3 = lanes[lane + 5u];
  let v4 = lanes[lane + 1u];
  // phase 0: no loops, 1 from memory to memory
  // %1 cumprod(%0) f32[3, 8]
  cumprod_0(lid, v1, mine + 4096u);  // at most 9 iterations
  storageBarrier();
  // phase 1: loops over 24
  for (var i = lid; i < 24u; i += 256u) {  // at most 1 iterations
    let v2 = bitcast<f32>(scratch[mine + 4096u + i]);  // %1 cumprod(%0) f32[3, 8]
    if (v3 != 0xffffffffu) { results[v3 + i] = bitcast<u32>(v2); }
  }
  // scalar results
  if (lid == 0u) {
    if (v4 != 0xffffffffu) { results[v4] = 0u; }
  }
}
