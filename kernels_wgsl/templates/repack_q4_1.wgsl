{# Raw GGUF Q4_1 blocks (f16 d, f16 m, 16 bytes) to 4 words of nibbles and one word of scales. job = [blocks, first block]. #}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let b = gid.y * {{ row }}u + gid.x;
  if (b >= job[0]) { return; }
  let to = job[1] + b;
  scales[to] = raw[b * 5u];
  for (var i = 0u; i < 4u; i++) { quants[to * 4u + i] = raw[b * 5u + 1u + i]; }
}
