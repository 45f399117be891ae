// One workgroup of 256 a lane; at most 1 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_from_i32(x: i32) -> f32 {  // to nearest: of two halves, both exact
  return f32(x >> 16u) * 65536.0 + f32(x & 0xffffi);
}
fn f_from_u32(x: u32) -> f32 {  // to nearest: of two halves, both exact
  return f32(x >> 16u) * 65536.0 + f32(x & 0xffffu);
}
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
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let lane_param_0 = lanes[lane + 23u];
  let lane_param_1 = lanes[lane + 24u];
  let lane_param_2 = lanes[lane + 25u];
  let lane_take_0 = lanes[lane + 2u];
  let lane_take_1 = lanes[lane + 5u];
  let lane_take_2 = lanes[lane + 8u];
  let lane_out_0 = lanes[lane + 11u];
  let lane_out_1 = lanes[lane + 12u];
  let lane_out_2 = lanes[lane + 13u];
  let lane_out_3 = lanes[lane + 14u];
  let lane_out_4 = lanes[lane + 15u];
  let lane_out_5 = lanes[lane + 16u];
  let lane_out_6 = lanes[lane + 17u];
  let lane_out_7 = lanes[lane + 18u];
  let lane_out_8 = lanes[lane + 19u];
  let lane_out_9 = lanes[lane + 20u];
  let lane_out_10 = lanes[lane + 21u];
  let lane_out_11 = lanes[lane + 22u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 100 elements
  let param_14 = lane_param_0;  // %14 param(slot=0) u32[]
  let param_16 = lane_param_1;  // %16 param(slot=1) u32[]
  let param_22 = lane_param_2;  // %22 param(slot=2) u32[]
  for (var i = lid; i < 100u; i += 256u) {  // at most 1 iterations
    let take_0 = bitcast<i32>(arena[lane_take_0 + i]);  // %0 take(chan=0) i32[100]
    let take_1 = bitcast<i32>(arena[lane_take_1 + i]);  // %1 take(chan=1) i32[100]
    let take_2 = arena[lane_take_2 + i] != 0u;  // %2 take(chan=2) bool[100]
    let div_3 = i_div(take_0, take_1);  // %3 div(%0, %1) i32[100]
    let rem_4 = i_rem(take_0, take_1);  // %4 rem(%0, %1) i32[100]
    let neg_5 = 0i - take_0;  // %5 neg(%0) i32[100]
    let abs_6 = select(take_0, 0i - take_0, take_0 < 0i);  // %6 abs(%0) i32[100]
    let sign_7 = select(select(0i, 1i, take_0 > 0i), -1i, take_0 < 0i);  // %7 sign(%0) i32[100]
    let cast_8 = f_from_i32(take_0);  // %8 cast(%0) f32[100]
    let cast_9 = take_0 != 0i;  // %9 cast(%0) bool[100]
    let cast_10 = select(0u, 1u, cast_9);  // %10 cast(%9) u32[100]
    let cast_11 = select(0u, 1u, take_2);  // %11 cast(%2) u32[100]
    let ne_12 = cast_10 != cast_11;  // %12 ne(%10, %11) bool[100]
    let cast_13 = bitcast<u32>(take_0);  // %13 cast(%0) u32[100]
    let div_15 = u_div(cast_13, param_14);  // %15 div(%13, %14) u32[100]
    let rem_17 = u_rem(cast_13, param_16);  // %17 rem(%13, %16) u32[100]
    let cast_18 = f_from_u32(cast_13);  // %18 cast(%13) f32[100]
    let cast_19 = select(0.0, 1.0, take_2);  // %19 cast(%2) f32[100]
    let not_20 = !take_2;  // %20 not(%2) bool[100]
    let lt_21 = take_0 < take_1;  // %21 lt(%0, %1) bool[100]
    let gt_23 = cast_13 > param_22;  // %23 gt(%13, %22) bool[100]
    let and_24 = lt_21 && gt_23;  // %24 and(%21, %23) bool[100]
    let or_25 = not_20 || and_24;  // %25 or(%20, %24) bool[100]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(div_3); }
    if (lane_out_1 != NONE) { results[lane_out_1 + i] = bitcast<u32>(rem_4); }
    if (lane_out_2 != NONE) { results[lane_out_2 + i] = bitcast<u32>(neg_5); }
    if (lane_out_3 != NONE) { results[lane_out_3 + i] = bitcast<u32>(abs_6); }
    if (lane_out_4 != NONE) { results[lane_out_4 + i] = bitcast<u32>(sign_7); }
    if (lane_out_5 != NONE) { results[lane_out_5 + i] = bitcast<u32>(cast_8); }
    if (lane_out_6 != NONE) { results[lane_out_6 + i] = select(0u, 1u, ne_12); }
    if (lane_out_7 != NONE) { results[lane_out_7 + i] = div_15; }
    if (lane_out_8 != NONE) { results[lane_out_8 + i] = rem_17; }
    if (lane_out_9 != NONE) { results[lane_out_9 + i] = bitcast<u32>(cast_18); }
    if (lane_out_10 != NONE) { results[lane_out_10 + i] = bitcast<u32>(cast_19); }
    if (lane_out_11 != NONE) { results[lane_out_11 + i] = select(0u, 1u, or_25); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
