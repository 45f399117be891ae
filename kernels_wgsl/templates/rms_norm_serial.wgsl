{# RMS norm without barriers: every lane sums the whole row (free in SIMD), then writes its share. One workgroup a row. #}
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = group.x;
{% if rows == "reads" %}
  if (row >= step[1]) { return; }
  let source = step[step[4] + row] * {{ n }}u;
{% else %}
  if (row >= step[0]) { return; }
  let source = row * {{ n }}u;
{% endif %}
  var total = 0.0;
  for (var i = 0u; i < {{ n }}u; i++) {
    let v = x[source + i];
    total += {% if vec == 4 %}dot(v, v){% else %}v * v{% endif %};
  }
  let factor = inverseSqrt(total / {{ width }}.0 + {{ eps }});
  for (var i = lane; i < {{ n }}u; i += {{ workgroup }}u) {
    out[row * {{ n }}u + i] = x[source + i] * factor * weight[i];
  }
}
