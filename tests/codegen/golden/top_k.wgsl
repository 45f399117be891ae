// One workgroup of 256 a lane; at most 1865 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> bins: array<atomic<u32>, 256>;
var<workgroup> wrapped: atomic<u32>;
var<workgroup> filled: atomic<u32>;
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
fn f_nan(x: f32) -> u32 {  // 1 for NaN
  return select(0u, 1u, (bitcast<u32>(x) << 1u) > 0xff000000u);
}
fn bin_of(b: u32) -> u32 {  // what a bin holds, at most 2^30: thresholds are not greater
  return select(min(atomicLoad(&bins[b]), 0x40000000u), 0x40000000u, atomicLoad(&wrapped) == b + 1u);
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
fn before(lid: u32, count: u32) -> u32 {  // the sum of `count` over the threads before this one
  parts[lid] = count;
  workgroupBarrier();
  var sum = 0u;
  for (var j = 0u; j < lid; j += 1u) { sum = sum + parts[j]; }
  return sum;
}
fn run_top_k_0(lid: u32, source: u32, values: u32, indices: u32, work: u32) {  // the k greatest of each row: select, compact, rank
  let want = 40u;
  for (var row = 0u; row < 1u; row += 1u) {
    let first = source + row * 49152u;
    var key = 0u;
    var mask = 0u;
    var above = 0u;
    for (var turn = 0u; turn < 4u; turn += 1u) {  // bits of the key, eight at a time
      let shift = 24u - 8u * turn;
      clear_bins(lid);
      for (var i = lid; i < 49152u; i += 256u) {
        let k = f_key(logits[first + i]);
        if ((k & mask) == key) { atomicAdd(&bins[(k >> shift) & 255u], 1u); }
      }
      let digit = digit_of(lid, want - above);
      key |= digit.x << shift;
      above += digit.y;
      mask |= 255u << shift;
    }
    if (lid == 0u) { atomicStore(&filled, 0u); }
    // the greater ones all, of those equal to the key the first: each thread counts how many the threads before it hold
    let start = min(lid * 192u, 49152u);
    let end = min(start + 192u, 49152u);
    var equal = 0u;
    for (var i = start; i < end; i += 1u) { equal += select(0u, 1u, f_key(logits[first + i]) == key); }
    var seen = before(lid, equal);
    for (var i = start; i < end; i += 1u) {
      let k = f_key(logits[first + i]);
      if (k > key || (k == key && seen < want - above)) {
        let slot = atomicAdd(&filled, 1u);
        scratch[work + slot] = i;
        scratch[work + 40u + slot] = k;
      }
      seen += select(0u, 1u, k == key);
    }
    storageBarrier();
    // in order: an element's place is the number of those that come before it
    for (var a = lid; a < 40u; a += 256u) {
      let at = scratch[work + a];
      let k = scratch[work + 40u + a];
      var rank = row * 40u;
      for (var b = 0u; b < 40u; b += 1u) {
        let other = scratch[work + 40u + b];
        rank += select(0u, 1u, other > k || (other == k && scratch[work + b] < at));
      }
      scratch[values + rank] = bitcast<u32>(logits[first + at]);
      scratch[indices + rank] = at;
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 4u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4256u;
  let logits_0 = lanes[lane] * 49152u;
  let lane_out_0 = lanes[lane + 2u];
  let lane_out_1 = lanes[lane + 3u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 49152 elements, 1 op from memory to memory
  var nan_0: u32 = 0u;  // 1 for a NaN in %0
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let output_0 = logits[logits_0 + i];  // %0 output(index=0, name=logits) f32[49152]
    nan_0 = max(nan_0, f_nan(output_0));
  }
  // the parts of all threads joined: nan_0
  part0[lid] = nan_0;
  workgroupBarrier();
  if (lid < 16u) {
    nan_0 = part0[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      nan_0 = max(nan_0, part0[lid * 16u + j]);
    }
    whole0[lid] = nan_0;
  }
  workgroupBarrier();
  nan_0 = whole0[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    nan_0 = max(nan_0, whole0[j]);
  }
  // %1 top_k(%0, k=40) f32[40]
  run_top_k_0(lid, logits_0, mine + 4176u, mine + 4216u, mine);  // at most 1642 iterations
  storageBarrier();
  // phase 1: a loop over 40 elements
  for (var i = lid; i < 40u; i += 256u) {  // at most 1 iterations
    let top_k_1 = bitcast<f32>(scratch[mine + 4176u + i]);  // %1 top_k(%0, k=40) f32[40]
    let pick_2 = scratch[mine + 4216u + i];  // %2 pick(%1, i=1) u32[40]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(top_k_1); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = pick_2; }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = nan_0; }
  }
}
