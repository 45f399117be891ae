{# Linear for few tokens on a GPU: {{ lanes }} lanes share the k of {{ tile_m }} rows (coalesced loads), then sum through shared memory. #}
{% import "dequant.wgsl" as dequant %}
{{ dequant.unpack_functions(fmt) }}
var<workgroup> partial: array<f32, {{ workgroup * tile_m * tile_t }}>;
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) local: u32) {
  let rows = step[{{ 1 if rows == "reads" else 0 }}];
  let token = group.y * {{ tile_t }}u;
  if (token >= rows) { return; }
  let lane = local % {{ lanes }}u;
  let team = local / {{ lanes }}u;
  let first = (group.x * {{ workgroup // lanes }}u + team) * {{ tile_m }}u;
{% for r in range(tile_m) %}
  let row{{ r }} = min(first + {{ r }}u, {{ m - 1 }}u);
{% endfor %}
{% for t in range(tile_t) %}
  let x{{ t }} = min(token + {{ t }}u, rows - 1u) * {{ k // 4 }}u;
{% endfor %}
{% for t in range(tile_t) %}{% for r in range(tile_m) %}
  var acc{{ t }}_{{ r }} = 0.0;
{% endfor %}{% endfor %}
  for (var block = lane; block < {{ blocks }}u; block += {{ lanes }}u) {
{% for t in range(tile_t) %}
{% if fmt == "q4_1" %}
    var sum{{ t }} = vec4f(0.0);
{% endif %}
{% for r in range(tile_m) %}
    var part{{ t }}_{{ r }} = 0.0;
{% endfor %}{% endfor %}
{% for r in range(tile_m) %}
    {{ dequant.load_block(fmt, r, "row%d * %du + block" % (r, blocks)) | indent(4) }}
{% endfor %}
{% for w in range(4) %}
    {
{% for r in range(tile_m) %}
      {{ dequant.pair(fmt, r, w) | indent(6) }}
{% endfor %}
{% for t in range(tile_t) %}
      {
        let xlo = x[x{{ t }} + block * 8u + {{ dequant.lo_index(fmt, w) }}];
        let xhi = x[x{{ t }} + block * 8u + {{ dequant.hi_index(fmt, w) }}];
{% if fmt == "q4_1" %}
        sum{{ t }} += xlo + xhi;
{% endif %}
{% for r in range(tile_m) %}
        part{{ t }}_{{ r }} += dot(lo{{ r }}, xlo) + dot(hi{{ r }}, xhi);
{% endfor %}
      }
{% endfor %}
    }
{% endfor %}
{% for t in range(tile_t) %}
{% if fmt == "q4_1" %}
    let xsum{{ t }} = sum{{ t }}.x + sum{{ t }}.y + sum{{ t }}.z + sum{{ t }}.w;
{% endif %}
{% for r in range(tile_m) %}
    {{ dequant.settle(fmt, "acc%d_%d" % (t, r), "part%d_%d" % (t, r), "row%d * %du + block" % (r, blocks), "xsum%d" % t) | indent(4) }}
{% endfor %}{% endfor %}
  }
{% for t in range(tile_t) %}{% for r in range(tile_m) %}
  partial[(team * {{ tile_m * tile_t }}u + {{ t * tile_m + r }}u) * {{ lanes }}u + lane] = acc{{ t }}_{{ r }};
{% endfor %}{% endfor %}
  workgroupBarrier();
  if (lane < {{ tile_m * tile_t }}u) {
    var total = 0.0;
    for (var i = 0u; i < {{ lanes }}u; i++) { total += partial[(team * {{ tile_m * tile_t }}u + lane) * {{ lanes }}u + i]; }
    let t = token + lane / {{ tile_m }}u;
    let r = first + lane % {{ tile_m }}u;
    if (t < rows && r < {{ m }}u) {
      let at = t * {{ m }}u + r;
      out[at] = total{% if add %} + out[at]{% endif %};
    }
  }
}
