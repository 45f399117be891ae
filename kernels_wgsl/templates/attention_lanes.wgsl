{# Attention on a software adapter: each of {{ lanes }} lanes takes every {{ lanes }}-th visible position with an online softmax of its
   own, for {{ heads_together }} heads that share K and V; one barrier, then the lanes' sums are joined in lane order.
   One workgroup a (group of heads, token). #}
{% include "step.wgsl" %}
{% include "visible.wgsl" %}
var<workgroup> sums: array<vec4f, {{ lanes * heads_together * vecs }}>;
var<workgroup> tops: array<f32, {{ lanes * heads_together }}>;
var<workgroup> totals: array<f32, {{ lanes * heads_together }}>;
@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let t = group.y;
  if (t >= step[0]) { return; }
  let head = group.x * {{ heads_together }}u;
  let kv = head / {{ heads // kv_heads }}u;
  let seen = visible(t);
  let pages = token_word(t, 4u);
  let qbase = (t * {{ heads }}u + head) * {{ vecs }}u;
{% for h in range(heads_together) %}
{% for i in range(vecs) %}
  let q{{ h }}_{{ i }} = q[qbase + {{ h * vecs + i }}u] * {{ scale }};
  var acc{{ h }}_{{ i }} = vec4f(0.0);
{% endfor %}
  var top{{ h }} = -3.0e38;
  var total{{ h }} = 0.0;
{% endfor %}
  let count = min(seen.count, {{ positions }}u);
  for (var n = lane; n < count; n += {{ lanes }}u) {
    let base = (slot_of(pages, visible_at(seen, n)) * {{ kv_heads }}u + kv) * {{ vecs }}u;
{% for h in range(heads_together) %}
    var s{{ h }} = 0.0;
{% endfor %}
{% for i in range(vecs) %}
    let k{{ i }} = k_cache[base + {{ i }}u];
{% for h in range(heads_together) %}
    s{{ h }} += dot(q{{ h }}_{{ i }}, k{{ i }});
{% endfor %}
{% endfor %}
{% for h in range(heads_together) %}
    let best{{ h }} = max(top{{ h }}, s{{ h }});
    let keep{{ h }} = exp(top{{ h }} - best{{ h }});
    let e{{ h }} = exp(s{{ h }} - best{{ h }});
    top{{ h }} = best{{ h }};
    total{{ h }} = total{{ h }} * keep{{ h }} + e{{ h }};
{% endfor %}
{% for i in range(vecs) %}
    let v{{ i }} = v_cache[base + {{ i }}u];
{% for h in range(heads_together) %}
    acc{{ h }}_{{ i }} = acc{{ h }}_{{ i }} * keep{{ h }} + v{{ i }} * e{{ h }};
{% endfor %}
{% endfor %}
  }
{% for h in range(heads_together) %}
  tops[{{ h * lanes }}u + lane] = top{{ h }};
  totals[{{ h * lanes }}u + lane] = total{{ h }};
{% for i in range(vecs) %}
  sums[{{ (h * vecs + i) * lanes }}u + lane] = acc{{ h }}_{{ i }};
{% endfor %}
{% endfor %}
  workgroupBarrier();
  for (var h = 0u; h < {{ heads_together }}u; h++) {
    var best = -3.0e38;
    for (var i = 0u; i < {{ lanes }}u; i++) { best = max(best, tops[h * {{ lanes }}u + i]); }
    var weight = 0.0;
    for (var i = 0u; i < {{ lanes }}u; i++) { weight += totals[h * {{ lanes }}u + i] * exp(tops[h * {{ lanes }}u + i] - best); }
    // More positions than this kernel may loop over: a NaN row, which the epilogue's status reports.
    if (seen.count > {{ positions }}u) { weight = bitcast<f32>(0x7FC00000u | (t & 0u)); }
    for (var v = lane; v < {{ vecs }}u; v += {{ lanes }}u) {
      var value = vec4f(0.0);
      for (var i = 0u; i < {{ lanes }}u; i++) {
        value += sums[(h * {{ vecs }}u + v) * {{ lanes }}u + i] * exp(tops[h * {{ lanes }}u + i] - best);
      }
      out[qbase + h * {{ vecs }}u + v] = value / weight;
    }
  }
}
