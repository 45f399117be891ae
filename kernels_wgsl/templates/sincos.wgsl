{# cos and sin of pos * freq. The angle in turns is a 32-bit fraction computed in integers, so range reduction is exact but for
   half a unit of 2^-32 turns a position (6e-6 rad at position 8,191); an adapter's own sin may be off by 5e-4 even in [-pi, pi]. #}
fn mul_wide(a: u32, b: u32) -> vec2u {
  let a0 = a & 0xFFFFu; let a1 = a >> 16u;
  let b0 = b & 0xFFFFu; let b1 = b >> 16u;
  let low = a0 * b0;
  let mid = a1 * b0 + (low >> 16u);
  let mid2 = a0 * b1 + (mid & 0xFFFFu);
  return vec2u((mid2 << 16u) | (low & 0xFFFFu), a1 * b1 + (mid >> 16u) + (mid2 >> 16u));
}
// freq / (2 pi) as a fraction of 2^32, rounded. freq = mantissa * 2^-shift, positive and below 2^22.
fn turns_of(freq: f32) -> u32 {
  let bits = bitcast<u32>(freq);
  let product = mul_wide((bits & 0x7FFFFFu) | 0x800000u, 683565276u); // 2^32 / (2 pi)
  let shift = 150u - ((bits >> 23u) & 255u);
  if (shift >= 64u) { return 0u; }
  if (shift > 32u) { return ((product.y >> (shift - 33u)) + 1u) >> 1u; }
  if (shift == 32u) { return product.y + (product.x >> 31u); }
  return ((product.y << (32u - shift)) | (product.x >> shift)) + ((product.x >> (shift - 1u)) & 1u);
}
fn cos_sin(pos: u32, freq: f32) -> vec2f {
  let turns = pos * turns_of(freq); // modulo one turn by wrapping
  let quadrant = (turns + 0x20000000u) >> 30u;
  let rest = bitcast<i32>(turns - (quadrant << 30u)); // within an eighth of a turn
  let r = f32(rest) * 1.4629180792671596e-9; // 2 pi / 2^32
  let z = r * r;
  let s = r + r * z * (-0.16666654611 + z * (0.0083321608736 - z * 0.00019515295891));
  let c = 1.0 - 0.5 * z + z * z * (0.04166664568298827 + z * (-0.001388731625493765 + z * 0.00002443315711809948));
  switch (quadrant) {
    case 0u: { return vec2f(c, s); }
    case 1u: { return vec2f(-s, c); }
    case 2u: { return vec2f(-c, -s); }
    default: { return vec2f(s, -c); }
  }
}
