{# Masks passes whose gate is shut out of their step; an invocation a gate (all of them, where barriers are dear). `step` and `arena` are
   written, so nothing here reads what another invocation writes: gates of one step have words and places of their own. #}
{% include "step.wgsl" %}
{% if workgroup > 1 %}
var<workgroup> live: atomic<u32>;
{% endif %}
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(local_invocation_index) lid: u32) {
  let size = arrayLength(&step);
  let words = arrayLength(&arena);
  let table = step[8];
  var gates = step[9];
  if (gates > {{ bucket }}u || table < 16u || table > size || 4u * gates > size - table) { gates = 0u; }
  var open = 0u;
  for (var g = lid; g < gates; g += {{ workgroup }}u) {
    let at = table + 4u * g;
    let word = min(step[at], words - 1u);
    let cell = step[at + 1u];
    if (cell < words) { arena[word] |= u32(arena[cell] != 0u); }
    if (arena[word] == 0u) {
      open = 1u;
      continue;
    }
    let places = step[at + 2u];
    let count = min(step[at + 3u], {{ places }}u);
    for (var k = 0u; k < count && places + k < size; k++) {
      let place = step[places + k];
      if (place >= 16u && place < size) { step[place] = NONE; }
    }
  }
{% if workgroup > 1 %}
  if (lid == 0u) { atomicStore(&live, 0u); }
  workgroupBarrier();
  atomicOr(&live, open);
  workgroupBarrier();
  open = atomicLoad(&live);
{% endif %}
  if (lid == 0u && gates > 0u && step[10] == 0u && open == 0u) {
    step[0] = 0u;
    step[1] = 0u;
  }
}
