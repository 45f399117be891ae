// One workgroup of 256 a lane; at most 52 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn run_sort_desc_0(lid: u32, source: u32, values: u32, indices: u32) {  // rank of an element: how many of its row come before it
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
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4600u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_out_1 = lanes[lane + 6u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  // %1 sort_desc(%0) i32[3, 50]
  run_sort_desc_0(lid, lane_take_0, mine + 4296u, mine + 4448u);  // at most 51 iterations
  storageBarrier();
  // phase 1: a loop over 150 elements
  for (var i = lid; i < 150u; i += 256u) {  // at most 1 iterations
    let sort_desc_1 = bitcast<i32>(scratch[mine + 4296u + i]);  // %1 sort_desc(%0) i32[3, 50]
    let pick_2 = scratch[mine + 4448u + i];  // %2 pick(%1, i=1) u32[3, 50]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(sort_desc_1); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = pick_2; }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
