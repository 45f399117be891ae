{# Attention on a GPU: 64 visible keys a round, a lane scores one; then {{ slices }} interleaved lists of them are summed, lane
   (slice, v) owning vec4 v of the output. Online softmax across rounds. One workgroup a (token, head). #}
{% include "step.wgsl" %}
{% include "visible.wgsl" %}
var<workgroup> score: array<f32, 64>;
var<workgroup> base: array<u32, 64>;
var<workgroup> sums: array<vec4f, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let head = group.x;
  let t = group.y;
  if (t >= step[0]) { return; }
  let kv = head / {{ heads // kv_heads }}u;
  let seen = visible(t);
  let pages = token_word(t, 4u);
  let qbase = (t * {{ heads }}u + head) * {{ vecs }}u;
  let slice = lane / {{ vecs }}u;
  let own = lane % {{ vecs }}u;
  var acc = vec4f(0.0);
  var top = -3.0e38;
  var total = 0.0;
  let count = seen.count;
  let slots = cache_slots();
  var cursor = cursor_at_start(seen);
  for (var n = 0u; n < count; n += 64u) {
    var s = -3.0e38;
    var at = 0u;
    if (n + lane < count) {
      let slot = slot_of(pages, visible_at(seen, n + lane, &cursor));
      at = (slot * {{ kv_heads }}u + kv) * {{ vecs }}u;
      s = select(0.0, nan(t), slot >= slots);
{% for i in range(vecs) %}
      s += dot(q[qbase + {{ i }}u], k_cache[at + {{ i }}u]);
{% endfor %}
      s *= {{ scale }};
    }
    score[lane] = s;
    base[lane] = at;
    workgroupBarrier();
    let here = min(64u, count - n);
    var best = top;
    for (var i = 0u; i < 64u; i += 8u) { // lanes beyond `here` left -3e38
{% for i in range(8) %}
      best = max(best, score[i + {{ i }}u]);
{% endfor %}
    }
    let keep = exp(top - best);
    top = best;
    acc *= keep;
    total *= keep;
    if (slice < {{ slices }}u) {
      for (var i = slice; i < here; i += {{ slices }}u) {
        let e = exp(score[i] - best);
        total += e;
        acc += v_cache[base[i] + own] * e;
      }
    }
    workgroupBarrier();
  }
  // `total` differs a slice; carry it beside the sums.
  sums[lane] = acc;
  score[lane] = total;
  workgroupBarrier();
  if (lane < {{ vecs }}u) {
    var value = vec4f(0.0);
    var weight = 0.0;
    for (var i = 0u; i < {{ slices }}u; i++) {
      value += sums[i * {{ vecs }}u + lane];
      weight += score[i * {{ vecs }}u + lane];
    }
    if (count == 0u) { weight = nan(t); } // a NaN row, which the epilogue's status reports
    out[qbase + lane] = value / weight;
  }
}
