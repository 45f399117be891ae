{# RMS norm with a shared tree. One workgroup a row. #}
var<workgroup> partial: array<f32, {{ workgroup }}>;
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
  for (var i = lane; i < {{ n }}u; i += {{ workgroup }}u) {
    let v = x[source + i];
    total += {% if vec == 4 %}dot(v, v){% else %}v * v{% endif %};
  }
  partial[lane] = total;
  workgroupBarrier();
  for (var half = {{ workgroup // 2 }}u; half > 0u; half /= 2u) {
    if (lane < half) { partial[lane] += partial[lane + half]; }
    workgroupBarrier();
  }
  let factor = inverseSqrt(partial[0] / {{ width }}.0 + {{ eps }});
  for (var i = lane; i < {{ n }}u; i += {{ workgroup }}u) {
    out[row * {{ n }}u + i] = x[source + i] * factor * weight[i];
  }
}
