{# out[t] = row id(t) of the table; one invocation an element. #}
{% include "step.wgsl" %}
{% import "dequant.wgsl" as dequant %}
{{ dequant.element(fmt, width, blocks) }}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let t = gid.y;
  let i = gid.x;
  if (t >= step[0] || i >= {{ width }}u) { return; }
  var id = token_word(t, 0u);
  let src = token_word(t, 1u);
  if (src != NONE) { id = arena[src]; }
  if (id >= {{ vocab }}u) {
    out[t * {{ width }}u + i] = bitcast<f32>(0x7FC00000u | (src & 0u));
    return;
  }
  out[t * {{ width }}u + i] = element(id, i);
}
