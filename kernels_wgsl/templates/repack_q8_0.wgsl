{# Raw GGUF Q8_0 blocks (f16 d, 32 int8; 34 bytes, so every other block starts inside a word) to 8 words and one f32. #}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let b = gid.y * {{ row }}u + gid.x;
  if (b >= job[0]) { return; }
  let to = job[1] + b;
  let half = b * 17u; // start in 16-bit units
  let word = half / 2u;
  let odd = (half % 2u) == 1u;
  let first = raw[word];
  scales[to] = unpack2x16float(select(first, first >> 16u, odd)).x;
  for (var i = 0u; i < 8u; i++) {
    let a = raw[word + i];
    let next = raw[word + i + 1u];
    quants[to * 8u + i] = select((a >> 16u) | (next << 16u), next, odd);
  }
}
