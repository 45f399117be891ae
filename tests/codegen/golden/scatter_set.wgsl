// One workgroup of 256 a lane; at most 973 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> parts: array<u32, 256>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn before(lid: u32, count: u32) -> u32 {  // the sum of `count` over the threads before this one
  parts[lid] = count;
  workgroupBarrier();
  var sum = 0u;
  for (var j = 0u; j < lid; j += 1u) { sum = sum + parts[j]; }
  return sum;
}
fn run_scatter_set_0(lid: u32, base: u32, index: u32, values: u32, result: u32, work: u32) {  // the last update of each row, by sorting
  for (var i = lid; i < 1000u; i += 256u) { scratch[result + i] = arena[base + i]; }
  for (var j = lid; j < 1200u; j += 256u) {
    scratch[work + j] = min(arena[index + j], 500u);  // n: out of range
    scratch[work + 1200u + j] = j;
  }
  storageBarrier();
  let start = min(lid * 5u, 1200u);
  let end = min(start + 5u, 1200u);
  let all = work + 4800u;  // of each digit, a count of each thread's part
  let counts = all + lid;
  for (var turn = 0u; turn < 3u; turn += 1u) {
    let shift = 4u * turn;
    let keys = work + (turn & 1u) * 2400u;
    let sorted = work + (1u - (turn & 1u)) * 2400u;
    for (var d = 0u; d < 16u; d += 1u) { scratch[counts + d * 256u] = 0u; }
    for (var i = start; i < end; i += 1u) { scratch[counts + ((scratch[keys + i] >> shift) & 15u) * 256u] += 1u; }
    storageBarrier();
    var mine = 0u;
    for (var j = 0u; j < 16u; j += 1u) { mine += scratch[all + lid * 16u + j]; }
    var place = before(lid, mine);
    for (var j = all + lid * 16u; j < all + lid * 16u + 16u; j += 1u) {
      let count = scratch[j];
      scratch[j] = place;
      place += count;
    }
    storageBarrier();
    for (var i = start; i < end; i += 1u) {
      let key = scratch[keys + i];
      let digit = (key >> shift) & 15u;
      let to = min(scratch[counts + digit * 256u], 1200u - 1u);
      scratch[counts + digit * 256u] += 1u;
      scratch[sorted + to] = key;
      scratch[sorted + 1200u + to] = scratch[keys + 1200u + i];
    }
    storageBarrier();
  }
  for (var k = lid; k < 1200u; k += 256u) {
    let row = scratch[work + 2400u + k];
    if (row < 500u && (k + 1u == 1200u || scratch[work + 2400u + min(k + 1u, 1200u - 1u)] != row)) {
      let j = scratch[work + 2400u + 1200u + k];
      for (var column = 0u; column < 2u; column += 1u) { scratch[result + row * 2u + column] = arena[values + j * 2u + column]; }
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 12u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 9896u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_take_2 = lanes[lane + 8u];
  let lane_out_0 = lanes[lane + 11u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  // %3 scatter_set(%0, %1, %2) f32[500, 2]
  run_scatter_set_0(lid, lane_take_0, lane_take_1, lane_take_2, mine + 8896u, mine);  // at most 969 iterations
  storageBarrier();
  // phase 1: a loop over 1000 elements
  for (var i = lid; i < 1000u; i += 256u) {  // at most 4 iterations
    let scatter_set_3 = bitcast<f32>(scratch[mine + 8896u + i]);  // %3 scatter_set(%0, %1, %2) f32[500, 2]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(scatter_set_3); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
