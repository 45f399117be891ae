{# Linear for many tokens on a GPU: 64 invocations stage a 32-deep slice of 64 weight rows and {{ tile_t * 8 }} tokens in shared
   memory; invocation (i, j) owns rows i, i + 8, ... and tokens j, j + 8, ... #}
{% import "dequant.wgsl" as dequant %}
{{ dequant.unpack_functions(fmt) }}
var<workgroup> weights: array<vec4f, {{ 64 * 9 }}>; // 8 vec4 a row and one of padding against bank conflicts
var<workgroup> tokens: array<vec4f, {{ tile_t * 8 * 9 }}>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) local: u32) {
  let rows = step[{{ 1 if rows == "reads" else 0 }}];
  let token = group.y * {{ tile_t * 8 }}u;
  if (token >= rows) { return; }
  let first = group.x * 64u;
  let i = local / 8u;
  let j = local % 8u;
{% for t in range(tile_t) %}{% for r in range(tile_m) %}
  var acc{{ t }}_{{ r }} = 0.0;
{% endfor %}{% endfor %}
  for (var block = 0u; block < {{ blocks }}u; block++) {
    {
      let at = min(first + local, {{ m - 1 }}u) * {{ blocks }}u + block;
{% if fmt == "q4_1" %}
      let dm = unpack2x16float(scales[at]);
{% elif fmt == "q8_0" %}
      let d = scales[at];
{% endif %}
      {{ dequant.load_block(fmt, 0, "at") | indent(6) }}
{% for w in range(4) %}
      {
        {{ dequant.pair(fmt, 0, w) | indent(8) }}
{% if fmt == "q4_1" %}
        weights[local * 9u + {{ dequant.lo_index(fmt, w) }}] = lo0 * dm.x + dm.y;
        weights[local * 9u + {{ dequant.hi_index(fmt, w) }}] = hi0 * dm.x + dm.y;
{% elif fmt == "q8_0" %}
        weights[local * 9u + {{ dequant.lo_index(fmt, w) }}] = lo0 * d;
        weights[local * 9u + {{ dequant.hi_index(fmt, w) }}] = hi0 * d;
{% else %}
        weights[local * 9u + {{ dequant.lo_index(fmt, w) }}] = lo0;
        weights[local * 9u + {{ dequant.hi_index(fmt, w) }}] = hi0;
{% endif %}
      }
{% endfor %}
    }
    for (var n = local; n < {{ tile_t * 8 * 8 }}u; n += 64u) {
      tokens[(n / 8u) * 9u + n % 8u] = x[min(token + n / 8u, rows - 1u) * {{ k // 4 }}u + block * 8u + n % 8u];
    }
    workgroupBarrier();
    for (var v = 0u; v < 8u; v++) {
{% for t in range(tile_t) %}
      let x{{ t }} = tokens[(j + {{ t * 8 }}u) * 9u + v];
{% endfor %}
{% for r in range(tile_m) %}
      {
        let wv = weights[(i + {{ r * 8 }}u) * 9u + v];
{% for t in range(tile_t) %}
        acc{{ t }}_{{ r }} += dot(wv, x{{ t }});
{% endfor %}
      }
{% endfor %}
    }
    workgroupBarrier();
  }
{% for t in range(tile_t) %}{% for r in range(tile_m) %}
  if (token + j + {{ t * 8 }}u < rows && first + i + {{ r * 8 }}u < {{ m }}u) {
    let at = (token + j + {{ t * 8 }}u) * {{ m }}u + first + i + {{ r * 8 }}u;
    out[at] = acc{{ t }}_{{ r }}{% if add %} + out[at]{% endif %};
  }
{% endfor %}{% endfor %}
}
