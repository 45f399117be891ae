// One workgroup of 256 a lane; at most 1375 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> bins: array<atomic<u32>, 256>;
var<workgroup> wrapped: atomic<u32>;
var<workgroup> blocks: array<u32, 16>;
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_nan(x: f32) -> u32 {
  return select(0u, 1u, (bitcast<u32>(x) << 1u) > 0xff000000u);
}
fn kept(x: f32, least: u32, last: u32, at: u32) -> bool {  // of a pivot: by key, equal keys by index
  let key = f_key(x);
  return key > least || (key == least && at <= last);
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
fn pivot_rank_0(lid: u32, source: u32, result: u32, k: u32) {  // the key of the k-th greatest element of each row
  let want = min(k, 49152u);
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
    if (lid == 0u) {
      scratch[result + 2u * row] = select(max(key, 1u), 0xffffffffu, want == 0u);  // 1: no NaN
      scratch[result + 2u * row + 1u] = 0xffffffffu;
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 4u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 4100u;
  let v3 = (lanes[lane + 0u]) * 49152u;
  let v5 = lanes[lane + 3u];
  let v11 = lanes[lane + 2u];
  let v12 = lanes[lane + 1u];
  // phase 0: loops over 49152, 1 from memory to memory
  var v1: u32 = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v4 = logits[v3 + i];  // %0 output(index=0, name=logits) f32[49152]
    v1 = max(v1, f_nan(v4));
  }
  part0[lid] = v1;
  workgroupBarrier();
  if (lid < 16u) {
    v1 = part0[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v1 = max(v1, part0[lid * 16u + j]);
    }
    whole0[lid] = v1;
  }
  workgroupBarrier();
  v1 = whole0[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v1 = max(v1, whole0[j]);
  }
  let v6 = v5;  // %1 param(slot=0) u32[]
  // %2 pivot_rank(%0, %1) bool[49152]
  pivot_rank_0(lid, v3, mine + 4096u, v6);  // at most 961 iterations
  storageBarrier();
  // phase 1: loops over 49152
  let v7 = scratch[mine + 4096u];  // least key kept of %2
  let v8 = scratch[mine + 4097u];  // last index kept of those equal to it
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v9 = logits[v3 + i];  // %0 output(index=0, name=logits) f32[49152]
    let v10 = kept(v9, v7, v8, i);  // %2 pivot_rank(%0, %1) bool[49152]
    if (v11 != 0xffffffffu) { results[v11 + i] = select(0u, 1u, v10); }
  }
  // scalar results
  if (lid == 0u) {
    if (v12 != 0xffffffffu) { results[v12] = v1; }
  }
}
