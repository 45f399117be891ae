// One workgroup of 256 a lane; at most 31 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 13u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 12u];
  let v5 = lanes[lane + 5u];
  let v7 = lanes[lane + 8u];
  let v10 = lanes[lane + 9u];
  let v11 = lanes[lane + 10u];
  let v13 = lanes[lane + 11u];
  let v14 = lanes[lane + 1u];
  // phase 0: loops over 40
  let v2 = bitcast<i32>(v1);  // %3 param(slot=0) i32[]
  var v3: i32 = 0i;
  for (var i = lid; i < 40u; i += 256u) {  // at most 1 iterations
    let v6 = arena[v5 + i] != 0u;  // %1 read(chan=1) bool[40]
    let v8 = bitcast<i32>(arena[v7 + i]);  // %2 take(chan=2) i32[40]
    let v9 = select(v2, v8, v6);  // %4 select(%1, %2, %3) i32[40]
    v3 = v3 + v9;
    if (v10 != 0xffffffffu) { arena[v10 + i] = bitcast<u32>(v9); }
    if (v11 != 0xffffffffu) { results[v11 + i] = bitcast<u32>(v9); }
  }
  part0[lid] = bitcast<u32>(v3);
  workgroupBarrier();
  if (lid < 16u) {
    v3 = bitcast<i32>(part0[lid * 16u]);
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v3 = v3 + bitcast<i32>(part0[lid * 16u + j]);
    }
    whole0[lid] = bitcast<u32>(v3);
  }
  workgroupBarrier();
  v3 = bitcast<i32>(whole0[0u]);
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v3 = v3 + bitcast<i32>(whole0[j]);
  }
  let v12 = v3;  // %7 reduce_sum(%6) i32[]
  // scalar results
  if (lid == 0u) {
    if (v13 != 0xffffffffu) { results[v13 + 0u] = bitcast<u32>(v12); }
    if (v14 != 0xffffffffu) { results[v14] = 0u; }
  }
}
