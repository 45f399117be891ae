// One workgroup of 256 a lane; at most 6311 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> parts: array<u32, 256>;
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
fn before(lid: u32, count: u32) -> u32 {  // the sum of `count` over the threads before this one
  parts[lid] = count;
  workgroupBarrier();
  var sum = 0u;
  for (var j = 0u; j < lid; j += 1u) { sum = sum + parts[j]; }
  return sum;
}
fn run_sort_desc_0(lid: u32, source: u32, values: u32, indices: u32, work: u32) {  // stable radix sort of each row, four bits a pass
  let start = min(lid * 192u, 49152u);
  let end = min(start + 192u, 49152u);
  let all = work + 196608u;  // of each digit, a count of each thread's part
  let counts = all + lid;
  for (var row = 0u; row < 1u; row += 1u) {
    let first = source + row * 49152u;
    for (var i = start; i < end; i += 1u) {
      scratch[work + i] = ~f_key(logits[first + i]);
      scratch[work + 49152u + i] = i;
    }
    for (var turn = 0u; turn < 8u; turn += 1u) {
      let shift = 4u * turn;
      let keys = work + (turn & 1u) * 98304u;
      let sorted = work + (1u - (turn & 1u)) * 98304u;
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
        let to = min(scratch[counts + digit * 256u], 49152u - 1u);
        scratch[counts + digit * 256u] += 1u;
        scratch[sorted + to] = key;
        scratch[sorted + 49152u + to] = scratch[keys + 49152u + i];
      }
      storageBarrier();
    }
    for (var j = lid; j < 49152u; j += 256u) {
      let at = scratch[work + 49152u + j];
      scratch[values + row * 49152u + j] = bitcast<u32>(logits[first + at]);
      scratch[indices + row * 49152u + j] = at;
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 4u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 299008u;
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
  // %1 sort_desc(%0) f32[49152]
  run_sort_desc_0(lid, logits_0, mine + 200704u, mine + 249856u, mine);  // at most 5897 iterations
  storageBarrier();
  // phase 1: a loop over 49152 elements
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let sort_desc_1 = bitcast<f32>(scratch[mine + 200704u + i]);  // %1 sort_desc(%0) f32[49152]
    let pick_2 = scratch[mine + 249856u + i];  // %2 pick(%1, i=1) u32[49152]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(sort_desc_1); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = pick_2; }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = nan_0; }
  }
}
