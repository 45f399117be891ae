{# Moves rows of a step to the places that a count on the device gives them; an invocation a shift (all of them, where barriers are dear).
   Shifts of one step have totals and rows of their own, and no cell is a total, so that nothing here reads what another one writes. #}
{% include "step.wgsl" %}
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(local_invocation_index) lid: u32) {
  let size = arrayLength(&step);
  let words = arrayLength(&arena);
  let table = step[11];
  var shifts = step[12];
  if (shifts > {{ bucket }}u || table < 16u || table > size || 8u * shifts > size - table) { shifts = 0u; }
  let tokens = min(step[0], {{ bucket }}u);
  for (var s = lid; s < shifts; s += {{ workgroup }}u) {
    let at = table + 8u * s;
    let word = step[at];
    if (word >= words) { continue; }
    let before = select(arena[word], 0u, step[at + 1u] != 0u);
    let cell = step[at + 2u];
    let limit = min(step[at + 3u], 0x7FFFFFFFu);
    var total = before;
    if (cell < words) { total += limit - u32(clamp(bitcast<i32>(arena[cell]), 0i, i32(limit))); }
    arena[word] = total;
    let known = step[at + 4u];
    let first = step[at + 5u];
    let early = step[at + 6u];
    let count = min(step[at + 7u], {{ bucket }}u);
    for (var k = 0u; k < count && first < tokens && k < tokens - first; k++) {
      let row = step[3] + 8u * (first + k);
      if (row >= size || size - row < 8u) { break; }
      let pos = step[row + 2u] - (select(total, before, k < early) - known);
      step[row + 2u] = pos;
      if (step[row + 3u] != NONE) {
        let page = step[row + 4u] + pos / PAGE;
        var slot = NONE;
        if (page < size) { slot = step[page] * PAGE + pos % PAGE; }
        step[row + 3u] = slot;
      }
    }
  }
}
