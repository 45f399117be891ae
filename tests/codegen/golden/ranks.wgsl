// One workgroup of 256 a lane; at most 52 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
fn sort_desc_0(lid: u32, source: u32, values: u32, indices: u32) {  // rank of an element: how many of its row come before it
  for (var e = lid; e < 150u; e += 256u) {
    let row = e / 50u;
    let at = e % 50u;
    let first = source + row * 50u;
    let key = (arena[source + e] ^ 0x80000000u);
    var rank = 0u;
    for (var j = 0u; j < 50u; j += 1u) {
      let other = (arena[first + j] ^ 0x80000000u);
      rank += select(0u, 1u, other > key || (other == key && j < at));
    }
    if (rank < 50u) {
      scratch[values + row * 50u + rank] = arena[source + e];
      scratch[indices + row * 50u + rank] = at;
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 7u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 4600u;
  let v1 = lanes[lane + 2u];
  let v4 = lanes[lane + 5u];
  let v5 = lanes[lane + 6u];
  let v6 = lanes[lane + 1u];
  // phase 0: no loops, 1 from memory to memory
  // %1 sort_desc(%0) i32[3, 50]
  sort_desc_0(lid, v1, mine + 4296u, mine + 4448u);  // at most 51 iterations
  storageBarrier();
  // phase 1: loops over 150
  for (var i = lid; i < 150u; i += 256u) {  // at most 1 iterations
    let v2 = bitcast<i32>(scratch[mine + 4296u + i]);  // %1 sort_desc(%0) i32[3, 50]
    let v3 = scratch[mine + 4448u + i];  // %2 pick(%1, i=1) u32[3, 50]
    if (v4 != 0xffffffffu) { results[v4 + i] = bitcast<u32>(v2); }
    if (v5 != 0xffffffffu) { results[v5 + i] = v3; }
  }
  // scalar results
  if (lid == 0u) {
    if (v6 != 0xffffffffu) { results[v6] = 0u; }
  }
}
