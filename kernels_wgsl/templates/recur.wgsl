{# h = decay * h + gain * x over the runs of the step's recurrence table; an invocation owns one element of one run, so the rows of a run
   follow each other without a barrier. Rows that no run covers, and those of a malformed run, are NaN. #}
{% include "step.wgsl" %}
fn run_word(run: u32, field: u32) -> u32 { return step[step[6] + 5u * run + field]; }
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3u) {
  let i = gid.x;
  let run = gid.y;
  let n = min(step[0], {{ bucket }}u);
  let size = arrayLength(&step);
  var runs = step[7];
  if (runs > {{ bucket }}u || step[6] < 16u || step[6] > size || 5u * runs > size - step[6]) { runs = 0u; }
  if (i >= {{ width }}u || run > runs) { return; }
  var begin = 0u;
  if (run > 0u) { begin = run_word(run - 1u, 0u); }
  var end = n; // behind the last run
  var bad = true;
  var start = NONE;
  var place = NONE;
  var limit = 0u;
  var folded = 0u;
  if (run < runs) {
    end = run_word(run, 0u);
    start = run_word(run, 1u);
    place = run_word(run, 2u);
    limit = run_word(run, 3u);
    let cell = run_word(run, 4u);
    let slots = arrayLength(&state) / {{ stride }}u;
    bad = begin > end || end > n || limit > end - begin || (start != NONE && start >= slots) || (place != NONE && place >= slots)
      || (cell != NONE && cell >= arrayLength(&arena));
    folded = limit;
    if (!bad && cell != NONE) { folded = u32(clamp(bitcast<i32>(arena[cell]), 0, i32(limit))); }
  }
  if (bad) {
    for (var t = begin; t < min(end, n); t++) { out[t * {{ width }}u + i] = bitcast<f32>(0x7FC00000u | (n & 0u)); }
    return;
  }
  var h = 0.0;
  if (start != NONE) { h = state[start * {{ stride }}u + {{ offset }}u + i]; }
  var kept = h;
  let a = decay[i];
  let b = gain[i];
  for (var t = begin; t < end; t++) {
    if (t - begin == limit) { h = kept; } // behind what may be folded, a run goes on from what was
    h = a * h + b * x[t * {{ width }}u + i];
    out[t * {{ width }}u + i] = h;
    if (t - begin + 1u == folded) { kept = h; }
  }
  if (place != NONE) { state[place * {{ stride }}u + {{ offset }}u + i] = kept; }
}
