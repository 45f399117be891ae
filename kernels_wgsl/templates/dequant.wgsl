{# Dequantisation per format, in registers. Layout: q4_1 has 4 words of nibbles and one word (f16 d, f16 m) a block of 32;
   q8_0 has 8 words of int8 and one f32 d; f16 has two values a word; f32 is plain. #}

{# element(row, i): one weight. #}
{% macro element(fmt, width, blocks) %}
fn element(row: u32, i: u32) -> f32 {
{% if fmt == "f32" %}
  return quants[row * {{ width }}u + i];
{% elif fmt == "f16" %}
  let at = row * {{ width }}u + i;
  return unpack2x16float(quants[at / 2u])[at % 2u];
{% else %}
  let block = row * {{ blocks }}u + i / 32u;
  let j = i % 32u;
{% if fmt == "q4_1" %}
  let word = quants[block * 4u + (j % 16u) / 4u];
  let nibble = (word >> (8u * (j % 4u) + select(0u, 4u, j >= 16u))) & 15u;
  let dm = unpack2x16float(scales[block]);
  return f32(nibble) * dm.x + dm.y;
{% else %}
  let word = quants[block * 8u + j / 4u];
  return f32(extractBits(bitcast<i32>(word), 8u * (j % 4u), 8u)) * scales[block];
{% endif %}
{% endif %}
}
{% endmacro %}

{# Functions that the macros below use. #}
{% macro unpack_functions(fmt) %}
{% if fmt == "q4_1" %}
// Through i32: a CPU converts signed words in one instruction, unsigned ones in several.
fn nibbles(word: u32) -> vec4f { return vec4f(bitcast<vec4i>(vec4u(word, word >> 8u, word >> 16u, word >> 24u) & vec4u(15u))); }
{% elif fmt == "q8_0" %}
fn bytes4(word: u32) -> vec4f {
  let v = bitcast<i32>(word);
  return vec4f(vec4i(v << 24u, v << 16u, v << 8u, v) >> vec4u(24u));
}
{% endif %}
{% endmacro %}

{# Declares raw{r}...: the words of block number `block`, row r. #}
{% macro load_block(fmt, r, block) %}
{% if fmt == "f32" %}
let at{{ r }} = ({{ block }}) * 8u;
{% elif fmt == "f16" %}
let at{{ r }} = ({{ block }}) * 4u;
{% elif fmt == "q4_1" %}
let raw{{ r }} = quants[{{ block }}];
{% else %}
let raw{{ r }} = quants[({{ block }}) * 2u];
let raw{{ r }}b = quants[({{ block }}) * 2u + 1u];
{% endif %}
{% endmacro %}

{# Declares lo{r}, hi{r}: two vec4 of unscaled weights, number w (0..3) of four pairs; `lo` meets x vec4 number lo_index, `hi` hi_index. #}
{% macro pair(fmt, r, w) %}
{% set component = "xyzw"[w] %}
{% if fmt == "f32" %}
let lo{{ r }} = quants[at{{ r }} + {{ w }}u];
let hi{{ r }} = quants[at{{ r }} + {{ w + 4 }}u];
{% elif fmt == "f16" %}
let raw{{ r }} = quants[at{{ r }} + {{ w }}u];
let lo{{ r }} = vec4f(unpack2x16float(raw{{ r }}.x), unpack2x16float(raw{{ r }}.y));
let hi{{ r }} = vec4f(unpack2x16float(raw{{ r }}.z), unpack2x16float(raw{{ r }}.w));
{% elif fmt == "q4_1" %}
let lo{{ r }} = nibbles(raw{{ r }}.{{ component }});
let hi{{ r }} = nibbles(raw{{ r }}.{{ component }} >> 4u);
{% else %}
let lo{{ r }} = bytes4(raw{{ r }}.{{ component }});
let hi{{ r }} = bytes4(raw{{ r }}b.{{ component }});
{% endif %}
{% endmacro %}

{# x vec4 numbers (of the block's 8) that lo and hi of pair w multiply. #}
{% macro lo_index(fmt, w) %}{{ 2 * w if fmt == "f16" else w }}u{% endmacro %}
{% macro hi_index(fmt, w) %}{{ 2 * w + 1 if fmt == "f16" else w + 4 }}u{% endmacro %}

{# The statement that adds a block's unscaled sum `part` to `acc`. #}
{% macro settle(fmt, acc, part, block, xsum) %}
{% if fmt == "q4_1" %}
{ let dm = unpack2x16float(scales[{{ block }}]); {{ acc }} += dm.x * {{ part }} + dm.y * {{ xsum }}; }
{% elif fmt == "q8_0" %}
{{ acc }} += scales[{{ block }}] * {{ part }};
{% else %}
{{ acc }} += {{ part }};
{% endif %}
{% endmacro %}
