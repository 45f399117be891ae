{# Attention on a software adapter: each of {{ lanes }} lanes takes every {{ lanes }}-th visible key with an online softmax of its
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
  let slots = cache_slots();
  var cursor = cursor_at_start(seen);
  // Masked keys are looked up ahead of the loop that uses them, {{ ahead }} a lane: in its body they would slow down every token.
  var keys: array<u32, {{ ahead }}>;
  for (var from_rank = 0u; from_rank < seen.count;) {
  var end_rank = seen.count;
  if (seen.end != seen.first) {
    end_rank = seen.plain / {{ lanes }}u * {{ lanes }}u;
    if (from_rank >= end_rank) {
      end_rank = min(from_rank + {{ lanes * ahead }}u, seen.count);
      for (var n = from_rank + lane; n < end_rank; n += {{ lanes }}u) { keys[(n - from_rank) / {{ lanes }}u] = visible_at(seen, n, &cursor); }
    }
  }
  for (var n = from_rank + lane; n < end_rank; n += {{ lanes }}u) {
    let masked = keys[(n - from_rank) / {{ lanes }}u % {{ ahead }}u];
    let slot = slot_of(pages, select(plain_at(seen, n), masked, n >= seen.plain));
    let base = (slot * {{ kv_heads }}u + kv) * {{ vecs }}u;
    let none = select(0.0, nan(t), slot >= slots);
{% for h in range(heads_together) %}
    var s{{ h }} = none;
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
  from_rank = end_rank;
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
    if (seen.count == 0u) { weight = nan(t); } // a NaN row, which the epilogue's status reports
    for (var v = lane; v < {{ vecs }}u; v += {{ lanes }}u) {
      var value = vec4f(0.0);
      for (var i = 0u; i < {{ lanes }}u; i++) {
        value += sums[(h * {{ vecs }}u + v) * {{ lanes }}u + i] * exp(tops[h * {{ lanes }}u + i] - best);
      }
      out[qbase + h * {{ vecs }}u + v] = value / weight;
    }
  }
}
