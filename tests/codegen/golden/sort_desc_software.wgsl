// One workgroup of 32 a lane; at most 34984 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 32>;
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
fn run_sort_desc_0(lid: u32, source: u32, values: u32, indices: u32, work: u32) {  // stable radix sort of each row, four bits a pass
  let start = min(lid * 1536u, 49152u);
  let end = min(start + 1536u, 49152u);
  let all = work + 196608u;  // of each digit, a count of each thread's part
  let counts = all + lid;
  for (var row = 0u; row < 1u; row += 1u) {
    let first = source + row * 49152u;
    for (var i = start; i < end; i += 1u) {
      scratch[work + i] = ~f_key(logits[first + i]);
      scratch[work + 49152u + i] = i;
    }
    for (var turn = 0u; turn < few(8u); turn += 1u) {
      let shift = 4u * turn;
      let keys = work + (turn & 1u) * 98304u;
      let sorted = work + (1u - (turn & 1u)) * 98304u;
      for (var d = 0u; d < few(16u); d += 1u) { scratch[counts + d * 32u] = 0u; }
      for (var i = start; i < end; i += 1u) { scratch[counts + ((scratch[keys + i] >> shift) & 15u) * 32u] += 1u; }
      storageBarrier();
      var places: array<u32, 16>;
      var place = 0u;
      for (var j = 0u; j < 512u; j += 1u) {
        if (j % 32u == lid) { places[j / 32u] = place; }
        place += scratch[all + j];
      }
      for (var i = start; i < end; i += 1u) {
        let key = scratch[keys + i];
        let digit = (key >> shift) & 15u;
        let to = min(places[digit], 49152u - 1u);
        places[digit] += 1u;
        scratch[sorted + to] = key;
        scratch[sorted + 49152u + to] = scratch[keys + 49152u + i];
      }
      storageBarrier();
    }
    for (var j = lid; j < 49152u; j += 32u) {
      let at = scratch[work + 49152u + j];
      scratch[values + row * 49152u + j] = bitcast<u32>(logits[first + at]);
      scratch[indices + row * 49152u + j] = at;
    }
  }
}
fn few(n: u32) -> u32 { return min(n, (lanes[0] & 1u) + n); }  // n, but no compiler may count on it
@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 4u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 299008u;
  let threads = min(32u, lanes[lane] + 32u);  // 32, but no compiler may count on it
  let logits_0 = lanes[lane] * 49152u;
  let lane_out_0 = lanes[lane + 2u];
  let lane_out_1 = lanes[lane + 3u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 49152 elements, 1 op from memory to memory
  var nan_0: u32 = 0u;  // 1 for a NaN in %0
  for (var i = lid; i < 49152u; i += 32u) {  // at most 1536 iterations
    let output_0 = logits[logits_0 + i];  // %0 output(index=0, name=logits) f32[49152]
    nan_0 = max(nan_0, f_nan(output_0));
  }
  // the parts of all threads joined: nan_0
  part0[lid] = nan_0;
  workgroupBarrier();
  nan_0 = part0[0u];
  for (var j = 1u; j < threads; j += 1u) {  // at most 31 iterations
    nan_0 = max(nan_0, part0[j]);
  }
  // %1 sort_desc(%0) f32[49152]
  run_sort_desc_0(lid, logits_0, mine + 200704u, mine + 249856u, mine);  // at most 31881 iterations
  storageBarrier();
  // phase 1: a loop over 49152 elements
  for (var i = lid; i < 49152u; i += 32u) {  // at most 1536 iterations
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
