// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
fn f_from_i32(x: i32) -> f32 { return f32(x >> 16u) * 65536.0 + f32(x & 0xffffi); }
fn f_from_u32(x: u32) -> f32 { return f32(x >> 16u) * 65536.0 + f32(x & 0xffffu); }
fn i_div(a: i32, b: i32) -> i32 {
  if (b == 0i) { return 0i; }
  if (b == -1i) { return 0i - a; }
  return a / b;
}
fn i_rem(a: i32, b: i32) -> i32 {
  if (b == 0i || b == -1i) { return 0i; }
  return a - (a / b) * b;
}
fn u_div(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a / b;
}
fn u_rem(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a % b;
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 26u;
  if (lanes[lane + 0u] == 0xffffffffu) { return; } // its gate is shut
  let v1 = lanes[lane + 23u];
  let v3 = lanes[lane + 24u];
  let v5 = lanes[lane + 25u];
  let v7 = lanes[lane + 2u];
  let v9 = lanes[lane + 5u];
  let v11 = lanes[lane + 8u];
  let v33 = lanes[lane + 11u];
  let v34 = lanes[lane + 12u];
  let v35 = lanes[lane + 13u];
  let v36 = lanes[lane + 14u];
  let v37 = lanes[lane + 15u];
  let v38 = lanes[lane + 16u];
  let v39 = lanes[lane + 17u];
  let v40 = lanes[lane + 18u];
  let v41 = lanes[lane + 19u];
  let v42 = lanes[lane + 20u];
  let v43 = lanes[lane + 21u];
  let v44 = lanes[lane + 22u];
  let v45 = lanes[lane + 1u];
  // phase 0: loops over 100
  let v2 = v1;  // %14 param(slot=0) u32[]
  let v4 = v3;  // %16 param(slot=1) u32[]
  let v6 = v5;  // %22 param(slot=2) u32[]
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let v8 = bitcast<i32>(arena[v7 + i]);  // %0 take(chan=0) i32[100]
    let v10 = bitcast<i32>(arena[v9 + i]);  // %1 take(chan=1) i32[100]
    let v12 = arena[v11 + i] != 0u;  // %2 take(chan=2) bool[100]
    let v13 = i_div(v8, v10);  // %3 div(%0, %1) i32[100]
    let v14 = i_rem(v8, v10);  // %4 rem(%0, %1) i32[100]
    let v15 = 0i - v8;  // %5 neg(%0) i32[100]
    let v16 = select(v8, 0i - v8, v8 < 0i);  // %6 abs(%0) i32[100]
    let v17 = select(select(0i, 1i, v8 > 0i), -1i, v8 < 0i);  // %7 sign(%0) i32[100]
    let v18 = f_from_i32(v8);  // %8 cast(%0) f32[100]
    let v19 = v8 != 0i;  // %9 cast(%0) bool[100]
    let v20 = select(0u, 1u, v19);  // %10 cast(%9) u32[100]
    let v21 = select(0u, 1u, v12);  // %11 cast(%2) u32[100]
    let v22 = v20 != v21;  // %12 ne(%10, %11) bool[100]
    let v23 = bitcast<u32>(v8);  // %13 cast(%0) u32[100]
    let v24 = u_div(v23, v2);  // %15 div(%13, %14) u32[100]
    let v25 = u_rem(v23, v4);  // %17 rem(%13, %16) u32[100]
    let v26 = f_from_u32(v23);  // %18 cast(%13) f32[100]
    let v27 = select(0.0, 1.0, v12);  // %19 cast(%2) f32[100]
    let v28 = !v12;  // %20 not(%2) bool[100]
    let v29 = v8 < v10;  // %21 lt(%0, %1) bool[100]
    let v30 = v23 > v6;  // %23 gt(%13, %22) bool[100]
    let v31 = v29 && v30;  // %24 and(%21, %23) bool[100]
    let v32 = v28 || v31;  // %25 or(%20, %24) bool[100]
    if (v33 != 0xffffffffu) { results[v33 + i] = bitcast<u32>(v13); }
    if (v34 != 0xffffffffu) { results[v34 + i] = bitcast<u32>(v14); }
    if (v35 != 0xffffffffu) { results[v35 + i] = bitcast<u32>(v15); }
    if (v36 != 0xffffffffu) { results[v36 + i] = bitcast<u32>(v16); }
    if (v37 != 0xffffffffu) { results[v37 + i] = bitcast<u32>(v17); }
    if (v38 != 0xffffffffu) { results[v38 + i] = bitcast<u32>(v18); }
    if (v39 != 0xffffffffu) { results[v39 + i] = select(0u, 1u, v22); }
    if (v40 != 0xffffffffu) { results[v40 + i] = v24; }
    if (v41 != 0xffffffffu) { results[v41 + i] = v25; }
    if (v42 != 0xffffffffu) { results[v42 + i] = bitcast<u32>(v26); }
    if (v43 != 0xffffffffu) { results[v43 + i] = bitcast<u32>(v27); }
    if (v44 != 0xffffffffu) { results[v44 + i] = select(0u, 1u, v32); }
  }
  // scalar results
  if (lid == 0u) {
    if (v45 != 0xffffffffu) { results[v45] = 0u; }
  }
}
