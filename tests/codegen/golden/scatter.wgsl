// One workgroup of 256 a lane; at most 610 loop iterations an invocation.
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> arena: array<u32>;
@group(0) @binding(2) var<storage, read> lanes: array<u32>;
@group(0) @binding(3) var<storage, read_write> results: array<u32>;
@group(0) @binding(4) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
var<workgroup> part1: array<u32, 256>;
var<workgroup> whole1: array<u32, 16>;
var<workgroup> part2: array<u32, 256>;
var<workgroup> whole2: array<u32, 16>;
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
fn scatter_add_0(lid: u32, base: u32, index: u32, values: u32, result: u32) {  // rows of a thread's own, updates in index order
  for (var i = lid; i < 49152u; i += 256u) { scratch[result + i] = arena[base + i]; }
  storageBarrier();
  for (var unit = lid; unit < 256u; unit += 256u) {
    let column = unit % 1u;
    let share = unit / 1u;
    for (var j = 0u; j < 1u; j += 1u) {
      let row = scratch[index + j];
      if (row < 49152u && row % 256u == share) {
        let to = result + row * 1u + column;
        scratch[to] = bitcast<u32>(bitcast<f32>(scratch[to]) + bitcast<f32>(scratch[values + j * 1u + column]));
      }
    }
  }
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 8u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let mine = group.x * 49160u;
  let v1 = lanes[lane + 6u];
  let v7 = lanes[lane + 2u];
  let v9 = (lanes[lane + 0u]) * 49152u;
  let v14 = lanes[lane + 7u];
  let v24 = lanes[lane + 3u];
  let v25 = lanes[lane + 4u];
  let v26 = lanes[lane + 5u];
  let v27 = lanes[lane + 1u];
  // phase 0: loops over 49152, 1
  let v2 = bitcast<f32>(v1);  // %2 param(slot=0) f32[]
  var v3: u32 = 0u;
  var v5: u32 = 0u;
  var v6 = 0u;
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v8 = bitcast<f32>(arena[v7 + i]);  // %0 take(chan=0) f32[49152]
    let v10 = logits[v9 + i];  // %1 output(index=0, name=logits) f32[49152]
    let v11 = v2 * v8;  // %3 mul(%2, %0) f32[49152]
    let v12 = v10 - v11;  // %4 sub(%1, %3) f32[49152]
    v3 = max(v3, f_nan(v10));
    let v13 = f_key(v12);
    if (v13 > v5) { v5 = v13; v6 = i; }
  }
  let v15 = bitcast<f32>(v14);  // %7 param(slot=1) f32[]
  for (var i = lid; i < 1u; i += 256u) {  // at most 1 iterations
    let v16 = v15;  // %8 broadcast(%7) f32[1]
    scratch[mine + 0u + i] = bitcast<u32>(v16);
  }
  storageBarrier();
  part0[lid] = v3;
  part1[lid] = v5;
  part2[lid] = v6;
  workgroupBarrier();
  if (lid < 16u) {
    v3 = part0[lid * 16u];
    v5 = part1[lid * 16u];
    v6 = part2[lid * 16u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
      v3 = max(v3, part0[lid * 16u + j]);
      let v17 = part1[lid * 16u + j];
      let v18 = part2[lid * 16u + j];
      if (v17 > v5 || (v17 == v5 && v18 < v6)) { v5 = v17; v6 = v18; }
    }
    whole0[lid] = v3;
    whole1[lid] = v5;
    whole2[lid] = v6;
  }
  workgroupBarrier();
  v3 = whole0[0u];
  v5 = whole1[0u];
  v6 = whole2[0u];
  for (var j = 1u; j < 16u; j += 1u) {  // at most 15 iterations
    v3 = max(v3, whole0[j]);
    let v19 = whole1[j];
    let v20 = whole2[j];
    if (v19 > v5 || (v19 == v5 && v20 < v6)) { v5 = v19; v6 = v20; }
  }
  let v21 = bitcast<i32>(v6);  // %5 reduce_argmax(%4) i32[]
  storageBarrier();
  // phase 1: loops over 1, 1 from memory to memory
  for (var i = lid; i < 1u; i += 256u) {  // at most 1 iterations
    let v22 = v21;  // %6 reshape(%5) i32[1]
    scratch[mine + 49156u + i] = bitcast<u32>(v22);
  }
  storageBarrier();
  // %9 scatter_add(%0, %6, %8) f32[49152]
  scatter_add_0(lid, v7, mine + 49156u, mine + 0u, mine + 4u);  // at most 194 iterations
  storageBarrier();
  // phase 2: loops over 49152
  for (var i = lid; i < 49152u; i += 256u) {  // at most 192 iterations
    let v23 = bitcast<f32>(scratch[mine + 4u + i]);  // %9 scatter_add(%0, %6, %8) f32[49152]
    if (v24 != 0xffffffffu) { arena[v24 + i] = bitcast<u32>(v23); }
    if (v25 != 0xffffffffu) { results[v25 + i] = bitcast<u32>(v23); }
  }
  // scalar results
  if (lid == 0u) {
    if (v26 != 0xffffffffu) { results[v26 + 0u] = bitcast<u32>(v21); }
    if (v27 != 0xffffffffu) { results[v27] = v3; }
  }
}
