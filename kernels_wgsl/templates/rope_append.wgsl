{# Rotates q and k, appends k and v to the cache. One invocation a pair of elements. A slot outside the cache stores nothing. #}
{% include "step.wgsl" %}
{% include "sincos.wgsl" %}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let t = gid.y;
  let pair = gid.x;
  if (t >= step[0] || pair >= {{ (heads + 2 * kv_heads) * (head_dim // 2) }}u) { return; }
  let head = pair / {{ head_dim // 2 }}u;
  let j = pair % {{ head_dim // 2 }}u;
{% if style == "interleaved" %}
  let a = 2u * j;
  let b = 2u * j + 1u;
{% else %}
  let a = j;
  let b = j + {{ head_dim // 2 }}u;
{% endif %}
  let source = t * {{ (heads + 2 * kv_heads) * head_dim }}u + head * {{ head_dim }}u;
  let va = qkv[source + a];
  let vb = qkv[source + b];
  let place = token_word(t, 3u);
  let slot = place * {{ kv_heads * head_dim }}u;
  let stored = place < min(arrayLength(&k_cache), arrayLength(&v_cache)) / {{ kv_heads * head_dim }}u;
  if (head >= {{ heads + kv_heads }}u) {
    let target_v = slot + (head - {{ heads + kv_heads }}u) * {{ head_dim }}u;
    if (stored) {
      v_cache[target_v + a] = va;
      v_cache[target_v + b] = vb;
    }
    return;
  }
  let cs = cos_sin(token_word(t, 2u), freqs[j]);
  let ra = va * cs.x - vb * cs.y;
  let rb = vb * cs.x + va * cs.y;
  if (head < {{ heads }}u) {
    let target_q = (t * {{ heads }}u + head) * {{ head_dim }}u;
    q[target_q + a] = ra;
    q[target_q + b] = rb;
  } else if (stored) {
    let target_k = slot + (head - {{ heads }}u) * {{ head_dim }}u;
    k_cache[target_k + a] = ra;
    k_cache[target_k + b] = rb;
  }
}
