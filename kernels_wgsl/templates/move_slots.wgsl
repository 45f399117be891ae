{# Moves K and V rows from slot to slot, token row after token row: row `slot` becomes row `id`. An invocation owns one vec4 of every
   row of one cache, so the order of the list holds without a barrier. #}
{% include "step.wgsl" %}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let column = gid.x % {{ vecs }}u;
  let cache = gid.x / {{ vecs }}u; // 0: K, 1: V
  let slots = min(arrayLength(&k_cache), arrayLength(&v_cache)) / {{ vecs }}u;
  let n = min(step[0], {{ bucket }}u);
  for (var t = 0u; t < n; t++) {
    let source = token_word(t, 0u);
    let place = token_word(t, 3u);
    if (source >= slots || place >= slots) { continue; }
    if (cache == 0u) { k_cache[place * {{ vecs }}u + column] = k_cache[source * {{ vecs }}u + column]; }
    if (cache == 1u) { v_cache[place * {{ vecs }}u + column] = v_cache[source * {{ vecs }}u + column]; }
  }
}
