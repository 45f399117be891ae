// One workgroup of 256 a lane; at most 314 loop iterations an invocation.
@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<u32>;
var<workgroup> part0: array<u32, 256>;
var<workgroup> whole0: array<u32, 16>;
const NONE = 0xffffffffu;  // a lane word that stands for nothing
fn f_key(x: f32) -> u32 {  // ordered: NaN 0, then -inf up to +inf; -0 equals +0
  let b = bitcast<u32>(x);
  let m = b & 0x7fffffffu;
  if (m > 0x7f800000u) { return 0u; }
  if (m == 0u) { return 0x80000000u; }
  return select(b ^ 0x80000000u, ~b, b >= 0x80000000u);
}
fn f_down_key(x: f32) -> u32 {  // ordered the other way round; NaN is 0 here too
  let k = f_key(x);
  return select(~k, 0u, k == 0u);
}
fn f_unkey(k: u32) -> f32 {  // the number of an f_key
  return bitcast<f32>(select(~k, k ^ 0x80000000u, k >= 0x80000000u));
}
fn f_gt(a: f32, b: f32) -> bool { let k = f_key(b); return k != 0u && f_key(a) > k; }
fn f_le(a: f32, b: f32) -> bool { let k = f_key(a); return k != 0u && k <= f_key(b); }
fn f_max(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_key(a) > f_key(b)));
}
fn f_min(a: f32, b: f32) -> f32 {  // the other one where one is NaN
  return bitcast<f32>(select(bitcast<u32>(b), bitcast<u32>(a), f_down_key(a) > f_down_key(b)));
}
fn f_pow2(n: i32) -> f32 {  // n in [-126, 127]
  return bitcast<f32>(u32(n + 127i) << 23u);
}
fn f_exp(x: f32) -> f32 {  // e^x; 0 below -87.336, +inf above 88.722
  let k = f_key(x);
  let t = clamp(x, -87.5, 89.0);
  let n = floor(fma(t, 1.44269504, 0.5));
  let r = fma(n, 2.12194440e-4, clamp(fma(n, -0.693359375, t), -1.0, 1.0));
  var p = fma(r, 1.9875691500e-4, 1.3981999507e-3);
  p = fma(p, r, 8.3334519073e-3);
  p = fma(p, r, 4.1665795894e-2);
  p = fma(p, r, 1.6666665459e-1);
  p = fma(p, r, 5.0000001201e-1);
  p = fma(p, r * r, r) + 1.0;
  let i = i32(n);
  let h = i / 2i;
  let y = bitcast<u32>(p * f_pow2(h) * f_pow2(i - h));
  if (k == 0u) { return x; }
  if (k > 0xc2b17217u) { return bitcast<f32>(select(0x7f800000u, y, k == 0u)); }  // 88.72283
  if (k < 0x3d5153b0u) { return 0.0; }  // -87.336
  return bitcast<f32>(y);
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = group.x * 6u;
  if (lanes[lane] == NONE) { return; }  // its gate is shut
  let mine = group.x * 4016u;
  let lane_take_0 = lanes[lane + 2u];
  let lane_out_0 = lanes[lane + 5u];
  let lane_status = lanes[lane + 1u];
  // phase 0: a loop over 4 rows of 1000 elements
  for (var r = 0u; r < 4u; r += 1u) {  // at most 4 iterations
    var fold_1: u32 = 0x007fffffu;  // %1 reduce_max(%0) f32[4]
    for (var k = lid; k < 1000u; k += 256u) {  // at most 16 iterations
      let i = r * 1000u + k;
      let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[4, 1000]
      fold_1 = max(fold_1, f_key(take_0));
    }
    // the parts of all threads joined: fold_1
    part0[lid] = fold_1;
    workgroupBarrier();
    if (lid < 16u) {
      fold_1 = part0[lid * 16u];
      for (var j = 1u; j < 16u; j += 1u) {  // at most 60 iterations
        fold_1 = max(fold_1, part0[lid * 16u + j]);
      }
      whole0[lid] = fold_1;
    }
    workgroupBarrier();
    fold_1 = whole0[0u];
    for (var j = 1u; j < 16u; j += 1u) {  // at most 60 iterations
      fold_1 = max(fold_1, whole0[j]);
    }
    if (lid == 0u) {
      scratch[mine + r] = bitcast<u32>(f_unkey(fold_1));
    }
  }
  storageBarrier();
  // phase 1: a loop over 4 elements
  let const_2 = bitcast<f32>(0xff7fffffu);  // %2 const(bits=4286578687) f32[]
  let const_4 = bitcast<f32>(0x7f7fffffu);  // %4 const(bits=2139095039) f32[]
  for (var i = lid; i < 4u; i += 256u) {  // at most 1 iterations
    let reduce_max_1 = bitcast<f32>(scratch[mine + i]);  // %1 reduce_max(%0) f32[4]
    let max_3 = f_max(reduce_max_1, const_2);  // %3 max(%1, %2) f32[4]
    let min_5 = f_min(max_3, const_4);  // %5 min(%3, %4) f32[4]
    scratch[mine + 4u + i] = bitcast<u32>(min_5);
  }
  storageBarrier();
  // phase 2: a loop over 4 rows of 1000 elements, a loop over 4000 elements
  let const_9 = bitcast<f32>(0x00000000u);  // %9 const(bits=0) f32[]
  for (var r = 0u; r < 4u; r += 1u) {  // at most 4 iterations
    var fold_11: f32 = 0.0;  // %11 reduce_sum(%10) f32[4]
    for (var k = lid; k < 1000u; k += 256u) {  // at most 16 iterations
      let i = r * 1000u + k;
      let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[4, 1000]
      let broadcast_6 = bitcast<f32>(scratch[mine + 4u + (i / 1000u)]);  // %6 broadcast(%5) f32[4, 1000]
      let sub_7 = take_0 - broadcast_6;  // %7 sub(%0, %6) f32[4, 1000]
      let exp_8 = f_exp(sub_7);  // %8 exp(%7) f32[4, 1000]
      let max_10 = f_max(exp_8, const_9);  // %10 max(%8, %9) f32[4, 1000]
      fold_11 = fold_11 + max_10;
    }
    // the parts of all threads joined: fold_11
    part0[lid] = bitcast<u32>(fold_11);
    workgroupBarrier();
    if (lid < 16u) {
      fold_11 = bitcast<f32>(part0[lid * 16u]);
      for (var j = 1u; j < 16u; j += 1u) {  // at most 60 iterations
        fold_11 = fold_11 + bitcast<f32>(part0[lid * 16u + j]);
      }
      whole0[lid] = bitcast<u32>(fold_11);
    }
    workgroupBarrier();
    fold_11 = bitcast<f32>(whole0[0u]);
    for (var j = 1u; j < 16u; j += 1u) {  // at most 60 iterations
      fold_11 = fold_11 + bitcast<f32>(whole0[j]);
    }
    if (lid == 0u) {
      scratch[mine + 4008u + r] = bitcast<u32>(fold_11);
    }
  }
  for (var i = lid; i < 4000u; i += 256u) {  // at most 16 iterations
    let take_0 = bitcast<f32>(arena[lane_take_0 + i]);  // %0 take(chan=0) f32[4, 1000]
    let broadcast_6 = bitcast<f32>(scratch[mine + 4u + (i / 1000u)]);  // %6 broadcast(%5) f32[4, 1000]
    let sub_7 = take_0 - broadcast_6;  // %7 sub(%0, %6) f32[4, 1000]
    let exp_8 = f_exp(sub_7);  // %8 exp(%7) f32[4, 1000]
    scratch[mine + 8u + i] = bitcast<u32>(exp_8);
  }
  storageBarrier();
  // phase 3: a loop over 4 elements
  let const_13 = bitcast<f32>(0x3f800000u);  // %13 const(bits=1065353216) f32[]
  for (var i = lid; i < 4u; i += 256u) {  // at most 1 iterations
    let reduce_sum_11 = bitcast<f32>(scratch[mine + 4008u + i]);  // %11 reduce_sum(%10) f32[4]
    let le_12 = f_le(reduce_sum_11, const_4);  // %12 le(%11, %4) bool[4]
    let max_14 = f_max(reduce_sum_11, const_13);  // %14 max(%11, %13) f32[4]
    let select_15 = select(const_13, max_14, le_12);  // %15 select(%12, %14, %13) f32[4]
    scratch[mine + 4012u + i] = bitcast<u32>(select_15);
  }
  storageBarrier();
  // phase 4: a loop over 4000 elements
  for (var i = lid; i < 4000u; i += 256u) {  // at most 16 iterations
    let exp_8 = bitcast<f32>(scratch[mine + 8u + i]);  // %8 exp(%7) f32[4, 1000]
    let broadcast_16 = bitcast<f32>(scratch[mine + 4012u + (i / 1000u)]);  // %16 broadcast(%15) f32[4, 1000]
    let div_17 = exp_8 / broadcast_16;  // %17 div(%8, %16) f32[4, 1000]
    let gt_18 = f_gt(div_17, const_13);  // %18 gt(%17, %13) bool[4, 1000]
    let select_19 = select(div_17, const_13, gt_18);  // %19 select(%18, %13, %17) f32[4, 1000]
    if (lane_out_0 != NONE) { results[lane_out_0 + i] = bitcast<u32>(select_19); }
  }
  // scalar results
  if (lid == 0u) {
    if (lane_status != NONE) { results[lane_status] = 0u; }
  }
}
