{# Linear without barriers: an invocation owns {{ tile_m }} weight rows and {{ tile_t }} tokens, weights dequantised in registers.
   A token's sum is its own chain in a fixed order, so it does not depend on the other tokens. #}
{% import "dequant.wgsl" as dequant %}
{{ dequant.unpack_functions(fmt) }}
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let rows = step[{{ 1 if rows == "reads" else 0 }}];
  let first = gid.x * {{ tile_m }}u;
  let token = gid.y * {{ tile_t }}u;
  if (first >= {{ m }}u || token >= rows) { return; }
{% for r in range(tile_m) %}
  let row{{ r }} = min(first + {{ r }}u, {{ m - 1 }}u);
{% endfor %}
{% for t in range(tile_t) %}
  let x{{ t }} = min(token + {{ t }}u, rows - 1u) * {{ k // 4 }}u;
{% endfor %}
{% for t in range(tile_t) %}{% for r in range(tile_m) %}
  var acc{{ t }}_{{ r }} = 0.0;
{% endfor %}{% endfor %}
  for (var block = 0u; block < {{ blocks }}u; block++) {
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
  if (token + {{ t }}u < rows && first + {{ r }}u < {{ m }}u) {
    let at = (token + {{ t }}u) * {{ m }}u + first + {{ r }}u;
    out[at] = acc{{ t }}_{{ r }}{% if add %} + out[at]{% endif %};
  }
{% endfor %}{% endfor %}
}
