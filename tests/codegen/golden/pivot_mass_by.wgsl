// One workgroup of 256 a lane; at most 1389 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> bins: array<atomic<u32>, 256>;
var<workgroup> wrapped: atomic<u32>;
var<workgroup> parts: array<u32, 256>;
var<workgroup> blocks: array<u32, 16>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn kept(x: f32, least: u32, last: u32, at: u32) -> bool {  // of a pivot: by key, equal keys by index
  let key = f_key(x);
  return key > least || (key == least && at <= last);
}
fn mass(p: f32) -> u32 {  // in units of 2^-30; 0 for NaN and below 0
  return select(u32(min(p, 1.0) * 1073741824.0), 0u, bitcast<u32>(p) > 0x7f800000u);
}
fn bin_of(b: u32) -> u32 {  // what a bin holds, at most 2^30: thresholds are not greater
  return select(min(atomicLoad(&bins[b]), 0x40000000u), 0x40000000u, atomicLoad(&wrapped) == b + 1u);
}
fn add_to_bin(b: u32, amount: u32) {
  let held = atomicAdd(&bins[b], amount);
  if (held + amount < held) { atomicMax(&wrapped, b + 1u); }  // the greatest one: no walk goes below it
}
fn clear_bins(lid: u32) {
  for (var b = lid; b < 256u; b += 256u) { atomicStore(&bins[b], 0u); }
  if (lid == 0u) { atomicStore(&wrapped, 0u); }
  workgroupBarrier();
}
fn digit_of(lid: u32, want: u32) -> vec2<u32> {  // the greatest bin that reaches `want`, and the sum above it
  workgroupBarrier();
  var above = 0u;
  if (lid < 16u) {
    var sum = 0u;
    for (var j = 0u; j < 16u; j += 1u) { sum = min(sum + bin_of(lid * 16u + j), 0x40000000u); }
    blocks[lid] = sum;
  }
  workgroupBarrier();
  var block = 15u;
  for (var j = 0u; j < 15u; j += 1u) {
    if (blocks[block] >= want - above) { break; }
    above += blocks[block];
    block -= 1u;
  }
  var b = block * 16u + 15u;
  for (var j = 0u; j < 15u; j += 1u) {
    let held = bin_of(b);
    if (held >= want - above) { break; }
    above += held;
    b -= 1u;
  }
  workgroupBarrier();
  return vec2<u32>(b, above);
}
fn mass_before(lid: u32, held: u32) -> u32 {  // the sum of `held` over the threads before this one, at most 2^30
  parts[lid] = held;
  workgroupBarrier();
  var sum = 0u;
  for (var j = 0u; j < lid; j += 1u) { sum = min(sum + parts[j], 0x40000000u); }
  return sum;
}
fn run_pivot_mass_0(lid: u32, order: u32, source: u32, result: u32, p: f32) {  // where the mass, walked by descending order, reaches p
  let want = mass(p);
  for (var row = 0u; row < 3u; row += 1u) {
    let first = order + row * 500u;
    let weights = source + row * 500u;
    var key = 0u;
    var mask = 0u;
    var above = 0u;
    for (var turn = 0u; turn < 4u; turn += 1u) {  // bits of the key, eight at a time
      let shift = 24u - 8u * turn;
      clear_bins(lid);
      for (var i = lid; i < 500u; i += 256u) {
        let k = f_key(bitcast<f32>(arena[first + i]));
        if ((k & mask) == key) { add_to_bin((k >> shift) & 255u, mass(bitcast<f32>(arena[weights + i]))); }
      }
      let digit = digit_of(lid, want - above);
      key |= digit.x << shift;
      above += digit.y;
      mask |= 255u << shift;
    }
    if (lid == 0u) {
      scratch[result + 2u * row] = select(max(key, 1u), 0xffffffffu, want == 0u);  // 1: no NaN
      scratch[result + 2u * row + 1u] = 0xffffffffu;
    }
    storageBarrier();
    let start = min(lid * 2u, 500u);
    let end = min(start + 2u, 500u);
    var held = 0u;  // by elements of this key, of which the lowest indices are kept
    for (var i = start; i < end; i += 1u) { held = min(held + select(0u, mass(bitcast<f32>(arena[weights + i])), f_key(bitcast<f32>(arena[first + i])) == key), 0x40000000u); }
    above += mass_before(lid, held);
    if (key != 0u && above < want && want <= above + held) {
      for (var i = start; i < end && above < want; i += 1u) {
        above += select(0u, mass(bitcast<f32>(arena[weights + i])), f_key(bitcast<f32>(arena[first + i])) == key);
        if (above >= want) { scratch[result + 2u * row + 1u] = i; }
      }
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 10u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4104u;
  let lane_take_1 = lanes[lane + 5u];
  let lane_take_0 = lanes[lane + 2u];
  let lane_param_0 = lanes[lane + 9u];
  let lane_out_0 = lanes[lane + 8u];
  let lane_status = lanes[lane + 1u];
  // phase 0: 1 op from memory to memory
  let param_2 = bitcast<f32>(lane_param_0);  // %2 param(slot=0) f32[]
  // %3 pivot_mass(%1, %0, %2) bool[3, 500]
  run_pivot_mass_0(lid, lane_take_1, lane_take_0, mine + 4096u, param_2);  // at most 1383 iterations
  storageBarrier();
  // phase 1: a loop over 1500 elements
  for (var i = lid; i < 1500u; i += 256u) {  // at most 6 iterations
    let take_1 = bitcast<f32>(arena[lane_take_1 + i]);  // %1 take(chan=1) f32[3, 500]
    let pivot_mass_3 = kept(take_1, scratch[mine + 4096u + 2u * (i / 500u)], scratch[mine + 4096u + 2u * (i / 500u) + 1u], i % 500u);  // %3 pivot_mass(%1, %0, %2) bool[3, 500]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = select(0u, 1u, pivot_mass_3); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
