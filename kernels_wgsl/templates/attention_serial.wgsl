{# Attention without barriers: the 8 lanes of a workgroup all score every position (free in SIMD) and each owns {{ slots }} vec4 of
   the output. Online softmax over {{ step_positions }} positions an iteration. One workgroup a (token, head). #}
{% include "step.wgsl" %}
{% include "visible.wgsl" %}
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let head = group.x;
  let t = group.y;
  if (t >= step[0]) { return; }
  let kv = head / {{ heads // kv_heads }}u;
  let seen = visible(t);
  let pages = token_word(t, 4u);
  let qbase = (t * {{ heads }}u + head) * {{ vecs }}u;
{% for i in range(vecs) %}
  let q{{ i }} = q[qbase + {{ i }}u] * {{ scale }};
{% endfor %}
{% for s in range(slots) %}
  var acc{{ s }} = vec4f(0.0);
  let own{{ s }} = min(lane + {{ s * 8 }}u, {{ vecs - 1 }}u);
{% endfor %}
  var top = -3.0e38;
  var total = 0.0;
  let count = min(seen.count, {{ positions }}u);
  for (var n = 0u; n < count; n += {{ step_positions }}u) {
{% for p in range(step_positions) %}
    let base{{ p }} = (slot_of(pages, visible_at(seen, min(n + {{ p }}u, count - 1u))) * {{ kv_heads }}u + kv) * {{ vecs }}u;
    var s{{ p }} = 0.0;
{% for i in range(vecs) %}
    s{{ p }} += dot(q{{ i }}, k_cache[base{{ p }} + {{ i }}u]);
{% endfor %}
{% endfor %}
    var best = max(top, s0);
{% for p in range(1, step_positions) %}
    s{{ p }} = select(-3.0e38, s{{ p }}, n + {{ p }}u < count);
    best = max(best, s{{ p }});
{% endfor %}
    let keep = exp(top - best);
    top = best;
{% for p in range(step_positions) %}
    let e{{ p }} = exp(s{{ p }} - best);
{% endfor %}
    total = total * keep{% for p in range(step_positions) %} + e{{ p }}{% endfor %};
{% for s in range(slots) %}
    acc{{ s }} = acc{{ s }} * keep{% for p in range(step_positions) %} + v_cache[base{{ p }} + own{{ s }}] * e{{ p }}{% endfor %};
{% endfor %}
  }
  // More positions than this kernel may loop over: a NaN row, which the epilogue's status reports.
  if (seen.count > {{ positions }}u) { total = bitcast<f32>(0x7FC00000u | (t & 0u)); }
{% for s in range(slots) %}
  if (lane + {{ s * 8 }}u < {{ vecs }}u) { out[qbase + lane + {{ s * 8 }}u] = acc{{ s }} / total; }
{% endfor %}
}
